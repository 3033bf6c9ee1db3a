"""Building an engine: what goes into it, and what an end of any kind leaves behind.

A stand-in for the build makes the wheel; its libllama is a copy of a real library, since it is loaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from unittest.mock import ANY

import pytest

from llamahybrid.engine import activation, build, installed, patched, sdist, series
from llamahybrid.errors import EngineError


class Build:
    """Stands in for `build.run`: a wheel with the stock libraries, or an end."""

    def __init__(self) -> None:
        self.trees: list[dict[str, str]] = []
        self.end: BaseException | None = None
        self.change: Callable[[dict[str, bytes]], object] = lambda files: None
        """What is done to the wheel's files before they are packed."""

    def run(self, source: Path, out: Path, progress: build.Progress, log: Path) -> None:
        self.trees.append(
            {str(f.relative_to(source)): f.read_text() for f in source.rglob("*") if f.is_file()}
        )
        out.mkdir()
        (out / "half.o").touch()
        if self.end:
            raise self.end
        stock = activation.stock()
        assert stock is not None
        files = {f"llama_cpp/lib/{library.name}": library.read_bytes() for library in stock.iterdir()}
        self.change(files)
        with zipfile.ZipFile(out / "x.whl", "w") as wheel:
            for name in ("llama_cpp/__init__.py", "llama_cpp/lib/", "llama_cpp/lib/more/x", "top"):
                wheel.writestr(name, "")
            for name, content in files.items():
                wheel.writestr(name, content)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """The cache is empty, the sdist is two files, the series patches one of them."""
    fake = Build()
    patches = tmp_path / "patches"
    patches.mkdir()
    (patches / "series").write_text("0001-b.patch\n")
    (patches / "0001-b.patch").write_text(
        "--- a/include/llama.h\n+++ b/include/llama.h\n@@ -1 +1 @@\n-a\n+b\n"
    )
    monkeypatch.setenv("LLAMAHYBRID_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(series, "folder", lambda: patches)
    monkeypatch.setattr(sdist, "unpack", unpack)
    monkeypatch.setattr(build, "run", fake.run)
    return fake


def unpack(dest: Path) -> Path:
    write(dest / "llama_cpp" / "__init__.py", f'__version__ = "{activation.version()}"\n')
    write(dest / "vendor/llama.cpp/include/llama.h", "a\n")
    return dest


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(text)


def make(force: bool = False, source: Path | None = None) -> installed.Engine:
    return patched.make(lambda *step: None, force=force, source=source)


def test_the_series_is_applied_and_the_engine_matches(fake: Build) -> None:
    engine = make()
    assert fake.trees[0]["vendor/llama.cpp/include/llama.h"] == "b\n"
    assert engine.mismatch(activation.version()) == ""
    assert installed.engines() == [engine]
    assert "llama_n_rs_seq" in engine.symbols


def test_it_is_built_once_unless_forced(fake: Build) -> None:
    assert make() == make()
    assert len(fake.trees) == 1
    make(force=True)
    assert len(fake.trees) == 2
    assert len(list(installed.home().iterdir())) == 1


def test_a_folder_without_a_manifest_is_no_engine_and_is_built_anew(fake: Build) -> None:
    (make().folder / "manifest.json").unlink()
    engine = make()
    assert installed.engines() == [engine]
    assert len(fake.trees) == 2


def test_the_libraries_and_nothing_else_are_installed(fake: Build) -> None:
    stock = activation.stock()
    assert stock is not None
    folder = make().libraries
    assert {file.name for file in folder.iterdir()} == {file.name for file in stock.iterdir()}
    assert all(os.access(file, os.X_OK) for file in folder.iterdir())


def test_one_content_under_several_names_is_loaded_once(fake: Build) -> None:
    assert len({file.resolve() for file in make().libraries.glob("libllama.*")}) == 1


def library_named(name: str, files: Iterable[str]) -> str:
    return next(file for file in files if Path(file).stem == f"lib{name}")


@pytest.mark.parametrize("name", ["llama", "ggml", "mtmd"])
def test_a_build_that_lacks_a_library_is_refused(fake: Build, name: str) -> None:
    fake.change = lambda files: files.pop(library_named(name, files))
    with pytest.raises(EngineError, match=f"made no lib{name}"):
        make()
    assert not list(installed.home().iterdir())


def test_a_library_that_cannot_be_loaded_is_refused(fake: Build) -> None:
    fake.change = lambda files: files.update({library_named("llama", files): b"no library"})
    with pytest.raises(EngineError, match="cannot be loaded"):
        make()
    assert not list(installed.home().iterdir())


def test_other_patches_and_options_make_another_engine(fake: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    old = make()
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_BLAS=on")
    assert make().folder != old.folder
    (series.folder() / "0001-b.patch").write_text("")
    assert "patches have changed" in old.mismatch(activation.version())


@pytest.mark.parametrize("end", [KeyboardInterrupt(), EngineError("no compiler")])
def test_an_end_leaves_what_was_there(fake: Build, end: BaseException) -> None:
    engine = make()
    fake.end = end
    with pytest.raises(type(end)):
        make(force=True)
    assert installed.engines() == [engine]
    assert list(installed.home().iterdir()) == [engine.folder]


def test_a_patch_that_does_not_apply_is_named(fake: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    (series.folder() / "0001-b.patch").write_text(
        "--- a/include/llama.h\n+++ b/include/llama.h\n@@ -1 +1 @@\n-x\n+b\n"
    )
    with pytest.raises(EngineError, match=r"0001-b\.patch does not apply"):
        make()
    assert not list(installed.home().iterdir())


def test_a_checkout_is_built_as_it_is_and_not_taken_by_itself(fake: Build, tmp_path: Path) -> None:
    write(tmp_path / "mine/include/llama.h", "mine\n")
    write(tmp_path / "mine/.git/config", "")
    write(tmp_path / "mine/build/llama.o", "")
    (tmp_path / "mine/gone").symlink_to("nowhere")
    engine = make(source=tmp_path / "mine")
    assert make(source=tmp_path / "mine").patches == {}
    assert len(fake.trees) == 2, "a checkout may have changed"
    assert fake.trees[0] == {"llama_cpp/__init__.py": ANY, "vendor/llama.cpp/include/llama.h": "mine\n"}
    assert f"LLAMAHYBRID_ENGINE={engine.libraries}" in engine.mismatch(activation.version())


def test_what_is_no_checkout_is_refused(fake: Build, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="checkout of neither"):
        make(source=tmp_path)


def test_a_checkout_must_say_which_version_it_is(fake: Build, tmp_path: Path) -> None:
    write(tmp_path / "mine/vendor/llama.cpp/include/llama.h", "")
    write(tmp_path / "mine/llama_cpp/__init__.py", "")
    with pytest.raises(EngineError, match="which llama-cpp-python"):
        make(source=tmp_path / "mine")


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
