"""Output on terminals that cannot show every letter."""

from __future__ import annotations

import io
import sys

import pytest

from llamahybrid.cli.streams import print_anything


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
    print_anything()
    for stream in (sys.stdout, sys.stderr):
        print("a\udcff…", end="", file=stream, flush=True)
        assert stream.buffer.getvalue() == written  # type: ignore[attr-defined]
