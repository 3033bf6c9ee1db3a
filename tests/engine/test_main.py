"""`python -m llamahybrid.engine`: a path on stdout, everything else on stderr."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from llamahybrid.engine import __main__ as command
from tests.engine.fake_pip import BUILDS, Index, pip_that


@pytest.mark.parametrize("what", ["sdist", "wheel"])
def test_the_command_prints_the_path_alone(
    index: Index, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    pip_that(monkeypatch, BUILDS)
    monkeypatch.setattr(sys, "argv", ["engine", what])
    assert command.main() == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert Path(line).is_file()


def test_the_command_fails_with_one_message(
    index: Index, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    index.failure = "offline"
    monkeypatch.setattr(sys, "argv", ["engine", "sdist"])
    assert command.main() == 1
    assert capsys.readouterr().err.startswith("error: pip could not fetch")
