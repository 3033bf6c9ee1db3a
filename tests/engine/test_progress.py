"""Progress of a build: a bar on a terminal, lines in a log; both on stderr."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from llamahybrid.engine import progress


def test_a_log_gets_a_line_for_each_phase_and_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.display() as show:
        for step in ((0, 0, "Unpacking"), (0, 0, "Unpacking"), (1, 40, "a.cpp"), (3, 40, "b.cpp")):
            show(*step)
        show(4, 40, "c.cpp")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "llama-cpp-python: Unpacking",
        "llama-cpp-python: 0 % compiled",
        "llama-cpp-python: 10 % compiled",
    ]


def test_what_is_merged_is_not_said_to_be_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.display("merged") as show:
        show(1, 2, "Merging 0001-a.patch")
    assert capsys.readouterr().err == "llama-cpp-python: 50 % merged\n"


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(progress, "Console", lambda stderr: terminal)
    with progress.display() as show:
        show(30, 120, "Building CXX object " + "x" * 80)
    assert isinstance(terminal.file, io.StringIO)
    shown = terminal.file.getvalue()
    assert "30/120" in shown
    assert "Building CXX object " + "x" * 40 in shown
