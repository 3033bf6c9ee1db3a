"""Applying the patch series: in order, exactly, with either tool, and leaving nothing else."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from llamahybrid.engine import sdist, series
from llamahybrid.engine.sdist import Pin
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


@pytest.mark.parametrize("tool", ["patch", "git"])
def test_nothing_but_the_patched_files_is_left_in_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: which(name) if name == tool else None)
    monkeypatch.setattr(series, "folder", lambda version: tmp_path)
    monkeypatch.setenv("SIMPLE_BACKUP_SUFFIX", "~")
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))  # as in a git hook
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path))
    write(tmp_path / "tree/include/llama.h", "1\n2\n3\n4\nx\nb\nc\ne\n")  # three lines further down
    write(tmp_path / "tree/kept.orig", "")
    (tmp_path / "series").write_text("one\n")
    (tmp_path / "one").write_text(LONGER.replace("@@ -1,4 +1,4", "@@ -2,4 +2,4"))
    series.apply(tmp_path / "tree", "1.0")
    files = {str(file.relative_to(tmp_path / "tree")) for file in (tmp_path / "tree").rglob("*.*")}
    assert files == {"include/llama.h", "kept.orig"}
    assert (tmp_path / "tree/include/llama.h").read_text().endswith("x\nb\nd\ne\n")


def test_without_any_tool_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(EngineError, match="`patch` or `git`"):
        series.apply(tmp_path, series.release(None))


def test_a_package_without_its_series_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "_PACKAGE", tmp_path / "llamahybrid")
    assert series.releases() == ()
    with pytest.raises(EngineError, match="install llamahybrid again"):
        series.folder(series.release("0.3.36"))


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


def test_an_installed_package_brings_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "_PACKAGE", tmp_path / "site" / "llamahybrid")
    releases(tmp_path / "site", "0.3.35")
    releases(tmp_path / "site" / "llamahybrid", "0.3.36")
    assert series.releases() == ("0.3.36",)


def test_an_engine_is_built_of_reuse_and_of_hardening_where_it_is_asked_for() -> None:
    reuse, hardening = (
        series.patches(sdist.PIN.version, chosen) for chosen in (series.REUSE, series.HARDENING)
    )
    assert {series.set_of(name) for name in reuse} == {"reuse"}
    assert {series.set_of(name) for name in hardening} == {"reuse", "hardening"}
    assert list(hardening)[: len(reuse)] == list(reuse)


def test_the_release_that_everything_is_proven_on_has_patches() -> None:
    assert series.pin(sdist.PIN.version) == sdist.PIN
    assert series.releases()[-1] == sdist.PIN.version
