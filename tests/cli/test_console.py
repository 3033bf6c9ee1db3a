"""Output on terminals that cannot show every letter, and Ctrl-C inside of native code."""

from __future__ import annotations

import ctypes
import io
import signal
import sys

import pytest

from llamahybrid.cli.console import ctrl_c_kept, prepare_streams
from llamahybrid.engine.process import display


@pytest.mark.parametrize(
    ("encoding", "written"), [("utf-8", b"a\\udcff\xe2\x80\xa6"), ("ascii", b"a\\udcff\\u2026")]
)
def test_every_letter_can_be_printed(encoding: str, written: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ctrl_c_kept():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_progress_without_a_terminal_has_a_line_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    with display() as told:
        for text, done, of in (("unpacking", 0, 0), ("one", 0, 2), ("one", 0, 2), ("two", 1, 2), ("", 2, 2)):
            told(text, done, of)
    assert capsys.readouterr().err.splitlines() == ["unpacking", "[1/2] one", "[2/2] two"]
    with display() as told:
        for done in range(1000):
            told(f"object {done}", done, 1000)
    assert len(capsys.readouterr().err.splitlines()) == 10
