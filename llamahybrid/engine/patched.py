"""Builds the patched engine: the pinned sdist with our series, or a checkout of one's own as it is."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import shutil
import sys
import time
import zipfile
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from llamahybrid.engine import build, installed, sdist, series
from llamahybrid.engine.installed import Engine
from llamahybrid.errors import EngineError

_LIBRARIES = "llama_cpp/lib/"
_LLAMA_CPP = "vendor/llama.cpp"


def make(progress: build.Progress, *, force: bool = False, source: Path | None = None) -> Engine:
    """The patched engine for this machine and the options in the environment, built if need be (minutes).

    Its folder appears in one rename: until then, and after an end of any kind, what was there before stays.

    Args:
        progress: told of each step.
        force: build even if it is there already.
        source: a checkout to build from instead, as it is: of llama-cpp-python (with ``vendor/llama.cpp``),
            or of llama.cpp, built by the pinned llama-cpp-python. It may have changed, so it is always built.

    Raises:
        EngineError: the sdist cannot be had, a patch does not apply, or the build failed.
    """
    recipe = build.Recipe.here()
    patches = {} if source else series.patches()
    origin = str(source.resolve()) if source else ""
    home = installed.home() / key(recipe, patches, origin)
    if not (force or source) and (home / "manifest.json").is_file():
        return installed.read(home)
    started = time.monotonic()
    with sdist.scratch(home.parent) as scratch:
        progress(0, 0, "Unpacking")
        tree = _tree(scratch / "tree", source)
        build.run(tree, scratch / "wheel", progress, log=home.parent / f"{home.name}.log")
        new = scratch / "engine"
        _extract(next((scratch / "wheel").glob("*.whl")), new / "lib")
        Engine(
            folder=new,
            version=_version(tree),
            recipe=recipe,
            patches=patches,
            source=origin,
            symbols=_symbols(new / "lib"),
            built=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - started, 1),
        ).write()
        if home.exists():
            os.replace(home, scratch / "old")
        os.replace(new, home)
    return installed.read(home)


def key(recipe: build.Recipe, patches: dict[str, str], origin: str = "") -> str:
    """A short name for all that shapes an engine; a checkout is known by its path alone."""
    text = json.dumps([asdict(recipe), patches, origin], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _tree(dest: Path, source: Path | None) -> Path:
    """A llama-cpp-python tree that the build may write into."""
    if source is None:
        series.apply(sdist.unpack(dest) / _LLAMA_CPP)
    elif (source / _LLAMA_CPP / "include" / "llama.h").is_file():
        _copy(source, dest)
    elif (source / "include" / "llama.h").is_file():
        shutil.rmtree(sdist.unpack(dest) / _LLAMA_CPP)
        _copy(source, dest / _LLAMA_CPP)
    else:
        raise EngineError(
            f"{source} is a checkout of neither llama-cpp-python (with {_LLAMA_CPP}) nor llama.cpp"
        )
    return dest


def _copy(source: Path, dest: Path) -> None:
    shutil.copytree(source, dest, symlinks=True, ignore=shutil.ignore_patterns(".git", "build", ".venv"))


def _version(tree: Path) -> str:
    text = (tree / "llama_cpp" / "__init__.py").read_text()
    found = re.search(r'__version__ = "(.+)"', text)
    if found is None:
        raise EngineError(f"{tree} does not say which llama-cpp-python it is")
    return found.group(1)


def _extract(wheel: Path, dest: Path) -> None:
    """Take the libraries out; names of one content become links, so that none is ever loaded twice."""
    dest.mkdir(parents=True)
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


def _symbols(folder: Path) -> tuple[str, ...]:
    """Which optional functions libllama has; loading it also shows that it can be loaded."""
    from llamahybrid.native import OPTIONAL

    path = installed.library(folder, "llama")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise EngineError(f"what was built cannot be loaded: {error}") from error
    return tuple(name for name in OPTIONAL if hasattr(library, name))
