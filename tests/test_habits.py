"""Habits that `make lint` and the commit hook check."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.habits import LINE, SUBJECT, hints, long_lines, long_subject

ROOT = Path(__file__).parents[1]
LONG = "docs: " + "x" * (SUBJECT - 5)


def test_long_lines_of_a_page_are_named() -> None:
    page = f"short\n{'x' * LINE}\n{'x' * (LINE + 1)}\n"
    assert list(long_lines("page.md", page)) == [f"page.md:3: {LINE + 1} letters, at most {LINE}"]


@pytest.mark.parametrize("exempt", ["```\n{}\n```", "| {} |", "[{}](page.md)"])
def test_code_tables_and_links_may_be_long(exempt: str) -> None:
    assert not list(long_lines("page.md", exempt.format("x" * 200)))


def test_pronouns_as_subjects_are_hinted_at() -> None:
    source = 'def f():\n    """Return a number. It is even."""\n    # The reason\n    # What is left\n'
    assert list(hints(source)) == [(2, "It is even."), (4, "What is left")]


@pytest.mark.parametrize(
    "fine", [LONG[:-1], f"# a comment of git\n\n{LONG[:-1]}\n\n{LONG}", f"Merge {LONG}", ""]
)
def test_subjects_within_the_bound_pass(fine: str) -> None:
    assert long_subject(fine) is None


@pytest.mark.parametrize(("subject", "status"), [(LONG, 1), (LONG[:-1], 0)])
def test_the_hook_refuses_a_subject_that_is_too_long(tmp_path: Path, subject: str, status: int) -> None:
    message = tmp_path / "COMMIT_EDITMSG"
    message.write_text(f"{subject}\n\nbody\n", encoding="utf-8")
    command = [sys.executable, "-m", "tests.lab.habits", "--subject", message]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == status, run.stderr
    assert ("a subject of 73 letters" in run.stderr) == bool(status)
