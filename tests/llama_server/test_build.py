"""Building the servers: what each is made of, and what an end of any kind leaves behind.

A stand-in for CMake makes a program of the source it finds; everything around it is real.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from llamahybrid.engine import build, patched, sdist, series
from llamahybrid.engine.process import Progress
from llamahybrid.engine.recipe import Recipe
from llamahybrid.errors import EngineError
from tests.lab import server_build as server


class CMake:
    """Stands in for `server._run`."""

    def __init__(self) -> None:
        self.header: list[int] = []
        self.end: BaseException | None = None
        self.meanwhile: Callable[[], object] = lambda: None

    def run(self, command: Sequence[str], progress: Progress, log: Path) -> None:
        if "--build" not in command:
            return
        tree = Path(command[2]).parents[1] / "llama.cpp"
        self.header.append((tree / "include" / "llama.h").stat().st_mtime_ns)
        if self.end and len(self.header) == 2:
            raise self.end
        self.meanwhile()
        out = Path(command[2]) / "bin" / "llama-server"
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text((tree / "server.cpp").read_text())


@pytest.fixture
def cmake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CMake:
    """The cache is empty; the source is two files, the series patches both."""
    patches, engine, wheel = tmp_path / "patches", tmp_path / "engine", tmp_path / "x.whl"
    (patches / "reuse").mkdir(parents=True)
    (patches / "series").write_text("reuse/0001-b.patch\n")
    change = "--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-a\n+b\n"
    (patches / "reuse" / "0001-b.patch").write_text(
        change.format("include/llama.h") + change.format("server.cpp")
    )
    engine.mkdir()
    (engine / "libllama.so").write_text("patched")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llama_cpp/__init__.py", "")
        archive.writestr("llama_cpp/lib/libllama.so", "stock")

    def unpack(dest: Path) -> Path:
        for name in ("include/llama.h", "server.cpp"):
            path = dest / "vendor/llama.cpp" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("a\n")
        return dest

    fake = CMake()
    monkeypatch.setenv("LLAMAHYBRID_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(series, "folder", lambda version: patches)
    monkeypatch.setattr(sdist, "unpack", unpack)
    monkeypatch.setattr(build, "wheel", lambda _: wheel)
    monkeypatch.setattr(patched, "make", lambda _: SimpleNamespace(libraries=engine))
    monkeypatch.setattr(server, "_run", fake.run)
    monkeypatch.setattr(server, "_tool", lambda name: name)
    return fake


def make() -> server.Servers:
    return server.make(lambda *_: None)


def test_each_program_lies_beside_its_libraries(cmake: CMake):
    servers = make()
    for program, source, library in ((servers.stock, "a\n", "stock"), (servers.patched, "b\n", "patched")):
        assert program.read_text() == source
        assert (program.parent / "libllama.so").read_text() == library


def test_the_second_time_nothing_is_built(cmake: CMake):
    assert make() == make()
    assert len(cmake.header) == 2


def test_a_patched_header_does_not_cost_what_only_includes_it(cmake: CMake):
    make()
    assert cmake.header[0] == cmake.header[1]


@pytest.mark.parametrize("end", [EngineError("no"), KeyboardInterrupt()])
def test_an_end_leaves_nothing_and_the_next_run_succeeds(cmake: CMake, end: BaseException):
    cmake.end = end
    with pytest.raises(type(end)):
        make()
    assert not list((sdist.cache_dir() / "servers").iterdir())
    cmake.header, cmake.end = [], None
    assert make().patched.is_file()


def test_whoever_finishes_second_takes_what_is_there(cmake: CMake):
    home = (
        sdist.cache_dir()
        / "servers"
        / server.key(Recipe.here(), series.patches(sdist.PIN.version, series.SERVER))
    )
    cmake.meanwhile = lambda: (home / "stock").mkdir(parents=True, exist_ok=True)
    assert make().stock.parents[1] == home
    assert not make().stock.exists(), "the second one took its place"


def test_servers_that_cannot_be_put_in_their_place_are_an_error(
    cmake: CMake, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(EngineError, match="disk full"):
        make()


def test_without_cmake_it_says_what_to_install(cmake: CMake, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "_tool", lambda name: None)
    with pytest.raises(EngineError, match="pip install cmake ninja"):
        make()


def test_the_key_covers_patches_and_options(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    plain = server.key(Recipe.here(), {"a": "1"})
    assert plain == server.key(Recipe.here(), {"a": "1"})
    assert plain != server.key(Recipe.here(), {"a": "2"})
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=on")
    assert plain != server.key(Recipe.here(), {"a": "1"})
