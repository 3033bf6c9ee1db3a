"""Applying the patch series: in order, exactly, with either tool, and leaving nothing else."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from llamahybrid.engine import series
from llamahybrid.errors import EngineError


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


HEAD = "diff --git a/include/llama.h b/include/llama.h\n--- a/include/llama.h\n+++ b/include/llama.h\n"
LONGER = f"{HEAD}@@ -1,4 +1,4 @@\n x\n b\n-c\n+d\n e\n"


@pytest.mark.parametrize("tool", ["patch", "git"])
def test_either_tool_applies_it_and_nothing_is_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: which(name) if name == tool else None)
    monkeypatch.setattr(series, "folder", lambda: tmp_path)
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)  # the tree lies inside a repository
    write(tmp_path / "tree/include/llama.h", "a\n")
    (tmp_path / "series").write_text("one\n")
    (tmp_path / "one").write_text(f"{HEAD}@@ -1 +1 @@\n-a\n+b\n")
    series.apply(tmp_path / "tree")
    header = tmp_path / "tree/include/llama.h"
    assert header.read_text() == "b\n"
    header.write_text("a\nb\nc\ne\n")  # its surroundings differ
    (tmp_path / "one").write_text(LONGER)
    with pytest.raises(EngineError, match="one does not apply"):
        series.apply(tmp_path / "tree")


@pytest.mark.parametrize("tool", ["patch", "git"])
def test_nothing_but_the_patched_files_is_left_in_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: which(name) if name == tool else None)
    monkeypatch.setattr(series, "folder", lambda: tmp_path)
    monkeypatch.setenv("SIMPLE_BACKUP_SUFFIX", "~")
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))  # as in a git hook
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path))
    write(tmp_path / "tree/include/llama.h", "1\n2\n3\n4\nx\nb\nc\ne\n")  # three lines further down
    write(tmp_path / "tree/kept.orig", "")
    (tmp_path / "series").write_text("one\n")
    (tmp_path / "one").write_text(LONGER.replace("@@ -1,4 +1,4", "@@ -2,4 +2,4"))
    series.apply(tmp_path / "tree")
    files = {str(file.relative_to(tmp_path / "tree")) for file in (tmp_path / "tree").rglob("*.*")}
    assert files == {"include/llama.h", "kept.orig"}
    assert (tmp_path / "tree/include/llama.h").read_text().endswith("x\nb\nd\ne\n")


def test_without_any_tool_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(EngineError, match="`patch` or `git`"):
        series.apply(tmp_path)


def test_a_package_without_its_series_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "_PACKAGE", tmp_path / "llamahybrid")
    with pytest.raises(EngineError, match="install llamahybrid again"):
        series.folder()


def test_the_real_series_is_found() -> None:
    assert list(series.patches()) == (series.folder() / "series").read_text().split()
