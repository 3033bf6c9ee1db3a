"""Build the patched engine: the installed release's sdist with our series, or a checkout without patches.

``CMAKE_ARGS`` (CUDA, Metal, Vulkan, BLAS, ...) and the compiler variables have their usual meaning.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from llamahybrid.engine import bindings, installed, libraries, process, sdist, series, storage
from llamahybrid.engine.installed import Engine
from llamahybrid.engine.process import Progress
from llamahybrid.engine.recipe import CMAKE_ARGS, Recipe, short_name
from llamahybrid.errors import EngineError

_LIBRARIES = "llama_cpp/lib/"
LLAMA_CPP = "vendor/llama.cpp"
WAITING = "Waiting for another build of the same"


@storage.disk_errors()
def make(
    progress: Progress, *, force: bool = False, source: Path | None = None, hardening: bool = False
) -> Engine:
    """Return the patched engine for this machine and these options, built if absent (minutes).

    Its folder appears in one rename; a failed or interrupted build leaves the previous one in place.

    Args:
        progress: receives each step.
        force: build even if the engine exists.
        source: a checkout to build without patches: of llama-cpp-python (with ``vendor/llama.cpp``), or of
            llama.cpp, built by that release's llama-cpp-python. A checkout is built each time: it may change.
        hardening: apply the set `hardening` besides `reuse`.

    Raises:
        EngineError: the sdist is unavailable, a patch does not apply, `source` is no checkout, the disk
            refuses, or the build failed.
    """
    release = series.release(bindings.version())
    recipe = Recipe.here(series.pin(release))
    chosen = series.HARDENING if hardening else series.REUSE
    patches = {} if source else series.patches(release, chosen)
    origin = str(source.resolve()) if source else ""
    home = installed.home() / key(recipe, patches, origin)
    if source:
        kind(source)
    again = force or source is not None
    if not again and (engine := _complete(home)):
        return engine
    with storage.locked_build_dir(home, lambda: progress(WAITING, 0, 0)) as scratch:
        if not again and (engine := _complete(home)):  # another process built it
            return engine
        progress("Unpacking", 0, 0)
        tree = _tree(scratch / "tree", source, release, chosen)
        version = version_of(tree)
        build_wheel(tree, scratch / "wheel", progress, home.parent / f"{home.name}.log")
        new = scratch / "engine"
        _extract(next((scratch / "wheel").glob("*.whl")), new / "lib")
        libraries.require_loadable(new / "lib")
        Engine(
            folder=new,
            version=version,
            recipe=recipe,
            patches=patches,
            source=origin,
            built=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
            files=installed.contents(new / "lib"),
        ).write()
        storage.install(new, home, scratch / "old")
    return installed.read(home)


def build_wheel(source: Path, out: Path, progress: Progress, log: Path) -> None:
    """`pip wheel` of a source tree into the new folder `out`; the log stays only on failure.

    Raises:
        EngineError: the build failed; the message names the log and ends with its last lines.
    """
    command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", "--wheel-dir", str(out)]
    command += ["--no-cache-dir", str(source)]  # pip's cache of built wheels ignores CMAKE_ARGS
    temporary = out.parent / "tmp"
    temporary.mkdir()
    process.run(
        command,
        progress,
        log,
        "llama-cpp-python did not build. It needs a C++ compiler (Debian: `apt install g++ cmake`) and "
        "CMAKE_ARGS that fit this machine",
        environment={
            **os.environ,
            "TMPDIR": str(temporary),
            "CMAKE_ARGS": f"{CMAKE_ARGS} {os.environ.get('CMAKE_ARGS', '')}".strip(),  # the last one counts
        },
    )


def key(recipe: Recipe, patches: dict[str, str], origin: str = "") -> str:
    """A short name for everything that shapes an engine; a checkout counts by its path alone."""
    return short_name([asdict(recipe), patches, origin, CMAKE_ARGS])


def kind(source: Path) -> str:
    """The folder of llama.cpp in a checkout: ``vendor/llama.cpp`` or ``.``.

    Raises:
        EngineError: neither has one.
    """
    for place in (LLAMA_CPP, "."):
        home = source / place
        if (home / "include" / "llama.h").is_file() and (home / "CMakeLists.txt").is_file():
            return place
    raise EngineError(
        f"{source} is a checkout of neither llama-cpp-python (with {LLAMA_CPP}) nor llama.cpp; "
        "after `git clone` of llama-cpp-python, `git submodule update --init` fetches llama.cpp"
    )


def version_of(tree: Path, default: str = "") -> str:
    """The version of a llama-cpp-python tree; `default` if the tree does not say.

    Raises:
        EngineError: neither gives a version.
    """
    init = tree / "llama_cpp" / "__init__.py"
    found = re.search(r'__version__ = "(.+)"', init.read_text()) if init.is_file() else None
    if version := found.group(1) if found else default:
        return version
    raise EngineError(f"{tree} does not say which llama-cpp-python it is")


def _complete(home: Path) -> Engine | None:
    """The engine in a folder, if it is undamaged."""
    try:
        engine = installed.read(home)
    except ValueError:
        return None
    return None if engine.damage(thorough=True) else engine


def _tree(dest: Path, source: Path | None, release: str, chosen: Sequence[str]) -> Path:
    """Create a llama-cpp-python tree that the build may write into."""
    if source is None:
        series.apply(sdist.unpack(dest, series.pin(release)) / LLAMA_CPP, release, chosen)
    elif kind(source) == LLAMA_CPP:
        _copy(source, dest)
    else:
        shutil.rmtree(sdist.unpack(dest, series.pin(release)) / LLAMA_CPP)
        _copy(source, dest / LLAMA_CPP)
    return dest


def _copy(source: Path, dest: Path) -> None:
    """Copy a checkout without build results, models, and a cache folder inside it."""
    named = shutil.ignore_patterns(".git", "build", ".venv", "*.gguf")
    cache = sdist.cache_dir().resolve()

    def left_out(folder: str, names: list[str]) -> set[str]:
        return {name for name in names if Path(folder, name).resolve() == cache} | named(folder, names)

    shutil.copytree(source, dest, symlinks=True, ignore=left_out)


def _extract(wheel: Path, dest: Path) -> None:
    """Extract the libraries; equal files become links, so that no library is loaded twice."""
    storage.folder(dest)
    known: dict[tuple[int, int], Path] = {}
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            name = info.filename.removeprefix(_LIBRARIES)
            if name == info.filename or "/" in name or not name:
                continue
            path = dest / name
            twin = known.setdefault((info.CRC, info.file_size), path)
            if twin is not path and sys.platform != "win32":
                path.symlink_to(twin.name)
            else:
                path.write_bytes(archive.read(info))
                path.chmod(0o755)
    lacking = [name for name in ("llama", "ggml", "mtmd") if installed.library(dest, name) is None]
    if lacking:
        raise EngineError(f"the build made no lib{', no lib'.join(lacking)}; check CMAKE_ARGS")
