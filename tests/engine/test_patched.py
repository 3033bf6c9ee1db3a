"""Building an engine: its inputs, and the cache after failures.

A fake build makes the wheel, with a copy of a real libllama, since the library is loaded.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import threading
import zipfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import ANY

import pytest

from llamahybrid.engine import activation, bindings, choice, installed, patched, sdist, series
from llamahybrid.engine.choice import InstalledBindings
from llamahybrid.engine.process import Progress
from llamahybrid.errors import EngineError


class Build:
    """A fake `patched.build_wheel`: makes a wheel of the stock libraries, or fails."""

    def __init__(self) -> None:
        self.trees: list[dict[str, str]] = []
        self.end: BaseException | None = None
        self.change: Callable[[dict[str, bytes]], object] = lambda files: None
        """Changes the wheel's files before they are packed."""

    def run(self, source: Path, out: Path, progress: Progress, log: Path) -> None:
        self.trees.append(
            {str(f.relative_to(source)): f.read_text() for f in source.rglob("*") if f.is_file()}
        )
        out.mkdir()
        (out / "half.o").touch()
        if self.end:
            raise self.end
        stock = bindings.stock()
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
    """An empty cache, an sdist of two files, and a series that patches one of them."""
    fake = Build()
    patches = tmp_path / "patches"
    (patches / "reuse").mkdir(parents=True)
    (patches / "series").write_text("reuse/0001-b.patch\n")
    (patches / "reuse" / "0001-b.patch").write_text(
        "--- a/include/llama.h\n+++ b/include/llama.h\n@@ -1 +1 @@\n-a\n+b\n"
    )
    monkeypatch.setenv("LLAMAHYBRID_CACHE_DIR", str(tmp_path / "cache"))
    (patches / "pin").write_text("0\n")
    monkeypatch.setattr(series, "folder", lambda version: patches)
    monkeypatch.setattr(sdist, "unpack", unpack)
    monkeypatch.setattr(patched, "build_wheel", fake.run)
    return fake


def unpack(dest: Path, pin: sdist.Pin) -> Path:
    write(dest / "llama_cpp" / "__init__.py", f'__version__ = "{bindings.version()}"\n')
    write(dest / "vendor/llama.cpp/include/llama.h", "a\n")
    write(dest / "vendor/llama.cpp/CMakeLists.txt", "")
    return dest


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def make(force: bool = False, source: Path | None = None) -> installed.Engine:
    return patched.make(lambda *step: None, force=force, source=source)


def test_patches_are_applied_and_the_engine_matches(fake: Build) -> None:
    engine = make()
    assert fake.trees[0]["vendor/llama.cpp/include/llama.h"] == "b\n"
    assert choice.mismatch(engine, InstalledBindings.here()) == ""
    assert installed.engines() == [engine]


def test_default_options_shape_the_key(fake: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make()
    monkeypatch.setattr(patched, "CMAKE_ARGS", "")
    assert make() != first


def test_engine_is_built_once_unless_forced(fake: Build) -> None:
    assert make() == make()
    assert len(fake.trees) == 1
    make(force=True)
    assert len(fake.trees) == 2
    assert len(list(installed.home().iterdir())) == 1


def test_engine_without_a_manifest_is_rebuilt(fake: Build) -> None:
    (make().folder / "manifest.json").unlink()
    engine = make()
    assert installed.engines() == [engine]
    assert len(fake.trees) == 2


def library_named(name: str, files: Iterable[str]) -> str:
    return next(file for file in files if Path(file).stem == f"lib{name}")


@pytest.mark.parametrize("name", ["llama", "ggml", "mtmd"])
def test_build_without_a_library_is_refused(fake: Build, name: str) -> None:
    fake.change = lambda files: files.pop(library_named(name, files))
    with pytest.raises(EngineError, match=f"made no lib{name}"):
        make()
    assert not list(installed.home().iterdir())


def test_build_with_an_unloadable_library_is_refused(fake: Build) -> None:
    fake.change = lambda files: files.update({library_named("llama", files): b"no library"})
    with pytest.raises(EngineError, match="cannot be loaded"):
        make()
    assert not list(installed.home().iterdir())


def test_other_patches_and_options_make_another_engine(fake: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    old = make()
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_BLAS=on")
    blas = make()
    patch = series.folder("") / "reuse" / "0001-b.patch"
    patch.write_text(patch.read_text().replace("+b", "+c"))
    assert len({old.folder, blas.folder, make().folder}) == 3
    assert "patches have changed" in choice.mismatch(old, InstalledBindings.here())


@pytest.mark.parametrize(
    ("end", "error", "said"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, None),
        (EngineError("no compiler"), EngineError, "no compiler"),
        (OSError(errno.ENOSPC, "full"), EngineError, "free a few GiB"),
        (OSError(errno.EROFS, "read-only"), EngineError, "a folder of your own"),
    ],
)
def test_failed_rebuild_keeps_the_previous_engine(
    fake: Build, end: BaseException, error: type[BaseException], said: str | None
) -> None:
    engine = make()
    fake.end = end
    with pytest.raises(error, match=said):
        make(force=True)
    assert installed.engines() == [engine]
    assert list(installed.home().iterdir()) == [engine.folder]


def test_patch_that_does_not_apply_is_named(fake: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    (series.folder("") / "reuse" / "0001-b.patch").write_text(
        "--- a/include/llama.h\n+++ b/include/llama.h\n@@ -1 +1 @@\n-x\n+b\n"
    )
    with pytest.raises(EngineError, match=r"0001-b\.patch does not apply"):
        make()
    assert not list(installed.home().iterdir())


def test_checkout_is_built_unpatched_and_not_used_automatically(fake: Build, tmp_path: Path) -> None:
    write(tmp_path / "mine/include/llama.h", "mine\n")
    write(tmp_path / "mine/CMakeLists.txt", "mine\n")
    write(tmp_path / "mine/models/large.gguf", "")
    write(tmp_path / "mine/.git/config", "")
    write(tmp_path / "mine/build/llama.o", "")
    (tmp_path / "mine/gone").symlink_to("nowhere")
    engine = make(source=tmp_path / "mine")
    assert make(source=tmp_path / "mine").patches == {}
    assert len(fake.trees) == 2, "a checkout may have changed"
    assert fake.trees[0] == {
        "llama_cpp/__init__.py": ANY,
        "vendor/llama.cpp/CMakeLists.txt": "mine\n",
        "vendor/llama.cpp/include/llama.h": "mine\n",
    }
    assert f"LLAMAHYBRID_ENGINE={engine.libraries}" in choice.mismatch(engine, InstalledBindings.here())


@pytest.mark.parametrize("files", [(), ("include/llama.h",), ("vendor/llama.cpp/CMakeLists.txt",)])
def test_invalid_checkout_is_refused_before_the_build(
    fake: Build, tmp_path: Path, files: Sequence[str]
) -> None:
    source = tmp_path / "mine"
    source.mkdir()
    for name in files:
        write(source / name, "")
    with pytest.raises(EngineError, match="checkout of neither"):
        make(source=source)
    assert not sdist.cache_dir().exists()


def test_concurrent_builds_share_one_build(fake: Build) -> None:
    said: list[str] = []
    started, go_on = threading.Event(), threading.Event()

    def wait(files: object) -> None:
        started.set()
        assert go_on.wait(60)

    def second_progress(what: str, done: int, of: int) -> None:
        said.append(what)
        go_on.set()  # it waits: let the first one finish

    fake.change = wait
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(make)
        assert started.wait(60)
        second = pool.submit(patched.make, second_progress)
        assert first.result(60) == second.result(60)
    assert said == [patched.WAITING]
    assert len(fake.trees) == 1
    assert [path.name for path in installed.home().iterdir()] == [first.result().folder.name]


def test_leftovers_of_a_killed_build_are_removed(fake: Build) -> None:
    fake.change = lambda files: os.kill(os.getpid(), signal.SIGKILL)
    killed = multiprocessing.get_context("fork").Process(target=make)
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    fake.change = lambda files: None
    (left,) = installed.home().iterdir()
    other = left.with_name(".part-other-abc")
    other.mkdir()
    assert installed.engines() == []
    assert installed.unreadable() == []
    engine = make()
    assert list(installed.home().iterdir()) == [engine.folder]


def test_damaged_engine_is_rebuilt(fake: Build) -> None:
    library = next(make().libraries.glob("libggml-cpu.*"))
    library.write_bytes(b"damage")
    assert make().damage(thorough=True) == ""
    assert len(fake.trees) == 2


def test_existing_engine_needs_no_write_access(fake: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("mkdir", "open", "replace"):
        monkeypatch.setattr(os, name, read_only)
    assert make() == engine
    assert activation.resolve("patched") == engine.libraries
    with pytest.raises(EngineError, match="a folder of your own"):
        make(force=True)


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o077])
def test_engine_is_writable_by_its_owner_alone(fake: Build, mask: int) -> None:
    before = os.umask(mask)
    try:
        engine = make()
    finally:
        os.umask(before)
    assert engine.unsafe() == ""
    assert choice.mismatch(engine, InstalledBindings.here()) == ""


def test_cache_path_may_have_spaces_and_umlauts(
    fake: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMAHYBRID_CACHE_DIR", str(tmp_path / "mein grüner Ordner"))
    assert activation.resolve("") is None
    assert activation.resolve(str(make().libraries)) == activation.resolve("")
