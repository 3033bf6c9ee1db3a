"""Applying the patch series: in order and without fuzz."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from llamahybrid.engine import series
from llamahybrid.engine.sdist import Pin
from llamahybrid.errors import EngineError


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


HEAD = "diff --git a/include/llama.h b/include/llama.h\n--- a/include/llama.h\n+++ b/include/llama.h\n"
LONGER = f"{HEAD}@@ -1,4 +1,4 @@\n x\n b\n-c\n+d\n e\n"


def test_patches_apply_without_fuzz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "folder", lambda version: tmp_path)
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)  # the tree lies inside a repository
    write(tmp_path / "tree/include/llama.h", "a\n")
    (tmp_path / "series").write_text("one\n")
    (tmp_path / "one").write_text(f"{HEAD}@@ -1 +1 @@\n-a\n+b\n")
    series.apply(tmp_path / "tree", "1.0")
    header = tmp_path / "tree/include/llama.h"
    assert header.read_text() == "b\n"
    header.write_text("a\nb\nc\ne\n")  # its surroundings differ
    (tmp_path / "one").write_text(LONGER)
    with pytest.raises(EngineError, match="one does not apply"):
        series.apply(tmp_path / "tree", "1.0")


def test_missing_git_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(EngineError, match="`git`"):
        series.apply(tmp_path, series.release(None))


def releases(folder: Path, *versions: str) -> None:
    for version in versions:
        write(folder / "patches" / version / "series", "one\n")
        write(folder / "patches" / version / "one", version)
        write(folder / "patches" / version / "pin", f"hash of {version}\n")


def test_each_release_has_its_own_patches_and_sdist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "_PACKAGE", tmp_path / "llamahybrid")
    releases(tmp_path, "0.3.9", "0.3.35", "0.3.36")
    (tmp_path / "patches" / "tests").mkdir()
    assert series.releases() == ("0.3.9", "0.3.35", "0.3.36")
    asked = ("0.3.35", "0.3.35+cu124", "0.3.36", "0.3.40", None)
    assert [series.release(version) for version in asked] == [
        "0.3.35",
        "0.3.35",
        "0.3.36",
        "0.3.36",
        "0.3.36",
    ]
    assert series.pin("0.3.9") == Pin("0.3.9", "hash of 0.3.9")
    assert series.patches("0.3.9") != series.patches("0.3.35")
    with pytest.raises(
        EngineError, match=r"no patches for llama-cpp-python 0\.3\.40; there are for 0\.3\.9,"
    ):
        series.folder("0.3.40")
