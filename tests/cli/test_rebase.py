"""What is told of patches that were carried over: whole names, what is left, and how to go on."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import pytest

from llamahybrid.cli import rebase
from llamahybrid.engine.rebase import Carried

ROOT = Path(__file__).parents[2]


class Shown(Protocol):
    def __call__(self, *carried: Carried, folder: Path | None = None, tree: Path | None = None) -> str: ...


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shown:
    """What is printed of these, in 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def show(*carried: Carried, folder: Path | None = None, tree: Path | None = None) -> str:
        rebase.show(carried, "0.3.37", "0.3.36", folder, tree)
        return capsys.readouterr().out

    return show


MERGED = Carried("0001-merged.patch", text="it")
PARTLY = Carried("0002-partly.patch", text="it", missing=("src/gone.cpp",))
FIRST, SECOND = (Carried(f"000{n}-parted.patch", conflicts={"src/a.cpp": n}) for n in (3, 4))
UPSTREAM = Carried("0005-upstream.patch")


def test_names_are_whole_in_80_columns(shown: Shown) -> None:
    tests = rebase.tests("0001-recurrent-rollback-planes.patch")
    assert "rollback-single-tokens" in tests
    name, file = "0021-server-checkpoint-prefixes", "src/llama-memory-recurrent.cpp"
    carried = (
        Carried("0001-recurrent-rollback-planes.patch", text="it"),
        Carried(f"{name}.patch", conflicts={file: 2}),
    )
    said = shown(*carried)
    assert all(word in said for word in (name, *tests))
    assert max(map(len, said.splitlines())) <= 80


def test_what_goes_without_a_file_does_not_count_as_merged(shown: Shown) -> None:
    assert "1 of 3 merged" in shown(MERGED, PARTLY, UPSTREAM)


def test_conflicts_are_picked_in_their_order_in_the_tree_that_was_kept(shown: Shown) -> None:
    said = shown(MERGED, FIRST, SECOND, tree=Path("kept"))
    picks = "cd kept; git cherry-pick 0003-parted; git cherry-pick 0004-parted\n"
    assert f"by hand, in this order: {picks}" in said
    assert "--tree FOLDER" not in said


def test_without_a_tree_it_says_how_to_keep_one_where_something_is_left(shown: Shown) -> None:
    assert "--tree FOLDER" in shown(MERGED, FIRST)
    assert "--tree FOLDER" not in shown(MERGED, PARTLY, UPSTREAM)
    assert "by hand" not in shown(MERGED, tree=Path("kept"))


def test_the_next_steps_are_told_where_patches_were_written(shown: Shown) -> None:
    said = shown(MERGED, PARTLY, FIRST, folder=Path("patches/0.3.37"))
    assert "patches/0.3.37: 2 patches" in said
    assert "llamahybrid engine build" in said
    assert "llamahybrid engine build" not in shown(MERGED)


def test_tests_are_told_of_patches_that_there_are_alone(shown: Shown) -> None:
    name = "0030-some-name.patch"
    assert "batch-of-several" in shown(Carried(name, text="it"))
    assert "batch-of-several" not in shown(Carried(name, conflicts={"src/a.cpp": 1}))


def test_names_in_brackets_are_no_markup(shown: Shown) -> None:
    assert "src/[bold].cpp" in shown(Carried("0003-parted.patch", conflicts={"src/[bold].cpp": 1}))


def test_a_patch_is_told_by_the_probes_and_the_files_of_its_number() -> None:
    assert "batch-of-several" in rebase.tests("0030-any.patch")
    files = [test for test in rebase.tests("0009-any.patch") if test.endswith(".py")]
    assert "tests/patches/test_0009_atomic_restore.py" in files
    assert all((ROOT / file).is_file() for file in files)
    assert rebase.tests("9999-any.patch") == []
