"""The program that judges the suite: its list fits the product, and it tells a test that shows a fault."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.lab.mutations import ROOT, Copy, Fault, Healthy, faults_in, planted

FAULTS = """
[halves.py] tests/test_halves.py
halves are rounded up
- n // 2
+ -(-n // 2)
nobody asks for thirds
- n // 3
+ n // 4
"""


def test_every_fault_can_be_planted() -> None:
    faults = list(faults_in((ROOT / "tests/lab/planted_faults.txt").read_text(encoding="utf-8")))
    assert len({fault.name for fault in faults}) == len(faults) >= 45
    assert len({(fault.file, fault.edits) for fault in faults}) == len(faults), "one edit under two names"
    for fault in faults:
        compile(planted(fault, (ROOT / fault.file).read_text(encoding="utf-8")), fault.file, "exec")


def test_text_that_is_there_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 times"):
        planted(Fault("", "halves.py", (("n", "m"),), ()), "n + n")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A package with a test of one of its two functions, and a test that is red without any fault."""
    files = {
        "pyproject.toml": '[tool.pytest.ini_options]\nmarkers = ["full"]\n',
        "llamahybrid/__init__.py": "",
        "llamahybrid/halves.py": "def half(n): return n // 2\ndef third(n): return n // 3\n",
        "tests/test_halves.py": "from llamahybrid.halves import half\n\n"
        "def test_red(): assert half(4) == 3\n\ndef test_half(): assert half(5) == 2\n",
    }
    for name, text in files.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(text)
    subprocess.run("git init -q && git add -A", cwd=tmp_path / "tree", shell=True, check=True)
    return tmp_path / "tree"


def test_a_fault_is_red_where_a_test_shows_it_and_green_where_none_does(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    copy = Copy(tree, tmp_path / "copy", "", Healthy())
    results = [copy.judge(fault, rest=False) for fault in faults_in(FAULTS)]
    assert [(r.outcome, r.test) for r in results] == [
        ("red", "tests/test_halves.py::test_half"),
        ("GREEN", ""),
    ]
    assert (tmp_path / "copy/llamahybrid/halves.py").read_text() == (
        tree / "llamahybrid/halves.py"
    ).read_text()
