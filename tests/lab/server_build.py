"""Builds llama-server from the pinned sdist, stock and patched, on libraries that are built anyway.

The installed llama-cpp-python and the patched engine hold libllama; only the code above it (``common``,
``tools/server``) is compiled, once as it is, then, in the same folder, what the patches change. No web
interface, no TLS, no network. ``CMAKE_ARGS`` shapes this build, too. ``python -m tests.lab.server_build``
makes both and prints where they lie.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from llamahybrid.engine import bindings, patched, process, sdist, series, storage
from llamahybrid.engine.process import Progress, display
from llamahybrid.engine.recipe import CMAKE_ARGS, Recipe, short_name
from llamahybrid.errors import EngineError

_LLAMA_CPP = "vendor/llama.cpp"
_PROGRAM = "llama-server.exe" if sys.platform == "win32" else "llama-server"

# llama.cpp's own CMakeLists would build libllama again. This one takes what stands above it.
_PROJECT = """\
cmake_minimum_required(VERSION 3.21) # find_library NO_CACHE
project(llama-server C CXX)
set(PROJECT_SOURCE_DIR ${LLAMA_CPP}) # llama.cpp's scripts look there
set(BUILD_SHARED_LIBS OFF)
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
set(CMAKE_INSTALL_RPATH "$<IF:$<PLATFORM_ID:Darwin>,@loader_path,$ORIGIN>")
set(LLAMA_BUILD_COMMON ON)
set(LLAMA_BUILD_NUMBER 0)
set(LLAMA_BUILD_COMMIT sdist)
set(LLAMA_SUBPROCESS ON)
foreach(name ggml-base ggml llama mtmd)
  add_library(${name} SHARED IMPORTED GLOBAL)
  find_library(path-${name} ${name} PATHS ${LIBRARIES} REQUIRED NO_DEFAULT_PATH NO_CACHE)
  set_target_properties(${name} PROPERTIES
    IMPORTED_LOCATION ${path-${name}}
    IMPORTED_IMPLIB ${path-${name}}
    INTERFACE_INCLUDE_DIRECTORIES "${LLAMA_CPP}/include;${LLAMA_CPP}/ggml/include;${LLAMA_CPP}/tools/mtmd")
endforeach()
set_property(TARGET llama PROPERTY INTERFACE_LINK_LIBRARIES ggml ggml-base)
function(llama_add_compile_flags)
endfunction()
function(license_add_file)
endfunction()
foreach(part vendor common tools/ui tools/server)
  add_subdirectory(${LLAMA_CPP}/${part} ${part})
endforeach()
"""
_OPTIONS = (
    "CMAKE_BUILD_TYPE=Release",
    "LLAMA_OPENSSL=OFF",
    "LLAMA_BUILD_UI=OFF",
    "LLAMA_USE_PREBUILT_UI=OFF",
)


@dataclass(frozen=True)
class Servers:
    """Two llama-server programs from one source, each beside the libraries it loads."""

    stock: Path
    patched: Path


@storage.disk_errors()
def make(progress: Progress) -> Servers:
    """Both servers for this machine and the options in the environment, built if need be (minutes).

    Their folder appears in one rename, so an end of any kind leaves nothing half-installed.

    Raises:
        EngineError: the sdist cannot be had, a patch does not apply, a tool is missing, or a build failed.
    """
    home = (
        sdist.cache_dir() / "servers" / key(Recipe.here(), series.patches(sdist.PIN.version, series.SERVER))
    )
    if not home.is_dir():
        engine = patched.make(progress)
        with storage.locked_build_dir(home, lambda: progress(patched.WAITING, 0, 0)) as scratch:
            if not home.is_dir():
                _make(engine.libraries, home, scratch, progress)
    return Servers(home / "stock" / _PROGRAM, home / "patched" / _PROGRAM)


def _make(libraries: Path, home: Path, scratch: Path, progress: Progress) -> None:
    new = scratch / "new"
    stock = bindings.stock()
    if stock is None or str(bindings.version()).partition("+")[0] != sdist.PIN.version:
        raise EngineError(f"llama-server is built on llama-cpp-python {sdist.PIN.version}: `make venv`")
    shutil.copytree(stock, new / "stock")
    shutil.copytree(libraries, new / "patched", symlinks=True)
    tree = sdist.unpack(scratch / "tree") / _LLAMA_CPP
    _build(tree, new / "stock", progress, home.parent / f"{home.name}.log")
    header = tree / "include" / "llama.h"
    before = header.stat()
    series.apply(tree, sdist.PIN.version, series.SERVER)
    # The patches only add functions to it: what is compiled already stays as good as it was.
    os.utime(header, ns=(before.st_atime_ns, before.st_mtime_ns))
    _build(tree, new / "patched", progress, home.parent / f"{home.name}.log")
    if not home.is_dir():  # a file system without locks: another process may have been first
        storage.install(new, home, scratch / "old")


def key(recipe: Recipe, patches: dict[str, str]) -> str:
    """A short name for all that shapes the servers."""
    return short_name([asdict(recipe), patches, CMAKE_ARGS, _PROJECT, _OPTIONS])


def _build(tree: Path, dest: Path, progress: Progress, log: Path) -> None:
    """Compile what changed since the last call for this tree, link with `dest`'s libraries, copy there."""
    project = tree.parent / "server"
    project.mkdir(exist_ok=True)
    (project / "CMakeLists.txt").write_text(_PROJECT)
    beside = str(Path(sys.executable).parent)  # a virtual environment need not be active
    cmake, ninja = (shutil.which(name, path=beside) or shutil.which(name) for name in ("cmake", "ninja"))
    if cmake is None:
        raise EngineError("building llama-server needs CMake; `pip install cmake ninja` and try again")
    options = [f"-D{option}" for option in (*_OPTIONS, f"LLAMA_CPP={tree}", f"LIBRARIES={dest}")]
    if ninja:
        options += ["-GNinja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    out = project / "build"
    custom = shlex.split(os.environ.get("CMAKE_ARGS", ""))
    progress(f"Configuring llama-server, {dest.name}", 0, 0)
    configure = [cmake, "-S", str(project), "-B", str(out), *options, *custom]
    jobs = str(os.cpu_count() or 1)
    for step in (configure, [cmake, "--build", str(out), "--target", "llama-server", "--parallel", jobs]):
        process.run(step, progress, log, "llama-server did not build")
    shutil.copy2(next(path for path in out.rglob(_PROGRAM) if path.is_file()), dest)


if __name__ == "__main__":
    with display() as progress:
        servers = make(progress)
    print(servers.stock, servers.patched, sep="\n")
