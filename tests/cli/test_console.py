"""Output on terminals that cannot show every letter, and Ctrl-C inside of native code."""

from __future__ import annotations

import ctypes
import io
import signal
import sys

import pytest

from llamahybrid.cli.console import ctrl_c_kept, prepare_streams


@pytest.mark.parametrize(
    ("encoding", "written"),
    [
        ("utf-8", b"a\xff\xe2\x80\xa6"),
        ("latin-1", b"a\xff?"),
        ("ascii", b"a\xff?"),
    ],
)
def test_unprintable_letters_become_question_marks(
    encoding: str, written: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that is no text stays the bytes that it was: `lib=$(llamahybrid engine build)`."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    prepare_streams()
    for stream in (sys.stdout, sys.stderr):
        print("a\udcff…", end="", file=stream, flush=True)
        assert stream.buffer.getvalue() == written  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_in_a_callback_of_native_code_counts() -> None:
    interrupt = ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(signal.SIGINT))
    kept = ctrl_c_kept()
    kept.__enter__()
    interrupt()  # Python ignores the exception, as it does where llama.cpp logs
    with pytest.raises(KeyboardInterrupt):
        kept.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
