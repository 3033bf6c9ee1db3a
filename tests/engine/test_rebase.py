"""Porting the patches to another llama.cpp: merged, in conflict, or upstream already."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from llamahybrid.engine import sdist, series
from llamahybrid.engine.sdist import Pin
from tests.lab import rebase
from tests.lab.rebase import Target

pytestmark = pytest.mark.skipif(not shutil.which("git"), reason="no git")

Tree = Mapping[str, str]
LINES = "".join(f"line {number}\n" for number in range(30))
BASE: Tree = {"CMakeLists.txt": "", "include/llama.h": "a\n", "src/a.cpp": LINES, "src/gone.cpp": LINES}
NEW: Tree = {
    "CMakeLists.txt": "",
    "include/llama.h": "a\nb\n",
    "src/a.cpp": "new\n" * 5 + LINES.replace("line 20\n", "theirs\n").replace("line 29\n", "mended\n"),
}
PATCHES = {
    "0001-moved.patch": {"src/a.cpp": ("line 5\n", "ours\n")},
    "0002-changed.patch": {"src/a.cpp": ("line 20\n", "ours\n")},
    "0003-upstream.patch": {"src/a.cpp": ("line 29\n", "mended\n")},
    "0004-gone.patch": {"src/a.cpp": ("line 10\n", "ours\n"), "src/gone.cpp": ("line 3\n", "ours\n")},
}


def plant(folder: Path, tree: Tree) -> Path:
    for name, text in tree.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A newer llama.cpp; the patches are for release 1.0, which came before it."""
    home, before = tmp_path / "patches" / "1.0", dict(BASE)
    home.mkdir(parents=True)
    for name, changes in PATCHES.items():
        text = f"From {'0' * 40} Mon Sep 17 00:00:00 2001\nFrom: x <x@y>\n"
        text += "Date: Sat, 21 Nov 2026 00:00:00 +0000\n"
        text += f"Subject: [PATCH] {name}\n\nDescription: why\n---\n\n"
        for file, (old, new) in changes.items():
            after = before[file].replace(old, new)
            text += f"diff --git a/{file} b/{file}\n" + "".join(
                difflib.unified_diff(
                    before[file].splitlines(True), after.splitlines(True), f"a/{file}", f"b/{file}"
                )
            )
            before[file] = after
        (home / name).write_text(text)
    (home / "series").write_text("\n".join(PATCHES))
    (home / "pin").write_text("0\n")
    monkeypatch.setattr(series, "_PACKAGE", tmp_path / "llamahybrid")
    monkeypatch.setattr(sdist, "unpack", lambda dest, pin: plant(dest / "vendor/llama.cpp", BASE).parents[1])
    monkeypatch.chdir(tmp_path)
    return plant(tmp_path / "new", NEW)


def carry(checkout: Path, keep: Path | None = None) -> list[rebase.Carried]:
    return rebase.carry(Target.of(str(checkout)), "1.0", lambda *_: None, keep)


def test_each_patch_has_an_outcome(checkout: Path):
    assert [(patch.name, patch.outcome) for patch in carry(checkout)] == [
        ("0001-moved.patch", "merged"),
        ("0002-changed.patch", "conflicts in src/a.cpp"),
        ("0003-upstream.patch", "upstream has it"),
        ("0004-gone.patch", "conflicts in src/gone.cpp"),
    ]
    assert {path.name: path.read_text() for path in (checkout / "src").iterdir()} == {
        "a.cpp": NEW["src/a.cpp"]
    }


def test_merged_patches_are_a_series_that_applies(checkout: Path, tmp_path: Path):
    rebase.write(carry(checkout), Target("2.0", Pin("2.0", "1")), tmp_path / "patches" / "2.0")
    assert series.releases() == ("1.0", "2.0")
    assert list(series.patches("2.0")) == ["0001-moved.patch"]
    assert series.pin("2.0") == Pin("2.0", "1")
    assert "\nDescription: why\n" in (series.folder("2.0") / "0001-moved.patch").read_text()
    series.apply(checkout, "2.0")
    assert (checkout / "src/a.cpp").read_text() == NEW["src/a.cpp"].replace("line 5\n", "ours\n")


def test_command_overwrites_nothing_and_returns_1_if_work_is_left(
    checkout: Path, capsys: pytest.CaptureFixture[str]
):
    assert rebase.main([str(checkout)]) == 1
    assert "1 of 4 merged" in capsys.readouterr().out
    assert Path("patches/new/series").is_file()
    assert rebase.main([str(checkout)]) == 1
    assert "in the way" in capsys.readouterr().err
    assert rebase.main([str(checkout), "--check"]) == 1
    assert "1 of 4 merged" in capsys.readouterr().out
