"""Builds the patched engine: the installed release's sdist with our series, or a checkout as it is."""

from __future__ import annotations

import re
import shutil
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from llamahybrid.engine import bindings, build, installed, sdist, series, storage, symbols
from llamahybrid.engine.installed import Engine
from llamahybrid.engine.process import Progress
from llamahybrid.engine.recipe import CMAKE_ARGS, Recipe, short_name
from llamahybrid.errors import EngineError

_LIBRARIES = "llama_cpp/lib/"
LLAMA_CPP = "vendor/llama.cpp"


@storage.disk_errors()
def make(
    progress: Progress, *, force: bool = False, source: Path | None = None, hardening: bool = False
) -> Engine:
    """The patched engine for this machine and the options in the environment, built if need be (minutes).

    Its folder appears in one rename: until then, and after an end of any kind, what was there before stays.

    Args:
        progress: told of each step.
        force: build even if it is there already.
        source: a checkout to build from instead, as it is: of llama-cpp-python (with ``vendor/llama.cpp``),
            or of llama.cpp, built by that release's llama-cpp-python. It may have changed, so it is always
            built.
        hardening: apply the set `hardening` besides `reuse`.

    Raises:
        EngineError: the sdist cannot be had, a patch does not apply, `source` is no checkout, the disk says
            no, or the build failed.
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
    with storage.workshop(home, lambda: progress(0, 0, build.WAITING)) as scratch:
        if not again and (engine := _complete(home)):  # another process has built it meanwhile
            return engine
        started = time.monotonic()
        progress(0, 0, "Unpacking")
        tree = _tree(scratch / "tree", source, release, chosen)
        version = version_of(tree)
        build.run(tree, scratch / "wheel", progress, home.parent / f"{home.name}.log", CMAKE_ARGS)
        new = scratch / "engine"
        _extract(next((scratch / "wheel").glob("*.whl")), new / "lib")
        Engine(
            folder=new,
            version=version,
            recipe=recipe,
            patches=patches,
            source=origin,
            symbols=symbols.optional(new / "lib"),
            built=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
            seconds=round(time.monotonic() - started, 1),
            files=installed.contents(new / "lib"),
        ).write()
        if again or not _complete(home):  # a file system without locks: another may have been first
            storage.install(new, home, scratch / "old")
    return installed.read(home)


def _complete(home: Path) -> Engine | None:
    """The engine that lies there, whole."""
    try:
        engine = installed.read(home)
    except ValueError:
        return None
    return None if engine.damage(thorough=True) else engine


def key(recipe: Recipe, patches: dict[str, str], origin: str = "") -> str:
    """A short name for all that shapes an engine; a checkout is known by its path alone."""
    return short_name([asdict(recipe), patches, origin, CMAKE_ARGS])


def kind(source: Path) -> str:
    """Where llama.cpp lies in a checkout: ``vendor/llama.cpp``, or ``.`` if that is what it is.

    Raises:
        EngineError: it is neither.
    """
    for place in (LLAMA_CPP, "."):
        home = source / place
        if (home / "include" / "llama.h").is_file() and (home / "CMakeLists.txt").is_file():
            return place
    raise EngineError(
        f"{source} is a checkout of neither llama-cpp-python (with {LLAMA_CPP}) nor llama.cpp; "
        "after `git clone` of llama-cpp-python, `git submodule update --init` fetches llama.cpp"
    )


def _tree(dest: Path, source: Path | None, release: str, chosen: Sequence[str]) -> Path:
    """A llama-cpp-python tree that the build may write into."""
    if source is None:
        series.apply(sdist.unpack(dest, series.pin(release)) / LLAMA_CPP, release, chosen)
    elif kind(source) == LLAMA_CPP:
        _copy(source, dest)
    else:
        shutil.rmtree(sdist.unpack(dest, series.pin(release)) / LLAMA_CPP)
        _copy(source, dest / LLAMA_CPP)
    return dest


def _copy(source: Path, dest: Path) -> None:
    """Copy a checkout without what was built or downloaded in it, and without a cache folder in it."""
    named = shutil.ignore_patterns(".git", "build", ".venv", "*.gguf")
    cache = sdist.cache_dir().resolve()

    def left_out(folder: str, names: list[str]) -> set[str]:
        return {name for name in names if Path(folder, name).resolve() == cache} | named(folder, names)

    shutil.copytree(source, dest, symlinks=True, ignore=left_out)


def version_of(tree: Path, default: str = "") -> str:
    """The version of a llama-cpp-python tree; `default` where it does not say.

    Raises:
        EngineError: it does not say, and there is no default.
    """
    init = tree / "llama_cpp" / "__init__.py"
    found = re.search(r'__version__ = "(.+)"', init.read_text()) if init.is_file() else None
    if found is None and default:
        return default
    if found is None:
        raise EngineError(f"{tree} does not say which llama-cpp-python it is")
    return found.group(1)


def _extract(wheel: Path, dest: Path) -> None:
    """Take the libraries out; names of one content become links, so that none is ever loaded twice."""
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
