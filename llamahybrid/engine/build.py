"""Build llama-cpp-python from the pinned sdist, with its own build, once per machine and set of options.

``CMAKE_ARGS`` (CUDA, Metal, Vulkan, BLAS, ...) and the compiler variables have their usual meaning. Results
are kept in the cache folder under a key of everything that shapes them.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from llamahybrid.engine import process, sdist, storage
from llamahybrid.engine.process import Progress
from llamahybrid.engine.recipe import Recipe
from llamahybrid.engine.trust import untrusted
from llamahybrid.errors import EngineError

WAITING = "Waiting for another build of the same"


@storage.disk_errors()
def wheel(progress: Progress) -> Path:
    """Return the stock llama-cpp-python wheel for this machine, built if absent (minutes).

    Raises:
        EngineError: the sdist is unavailable, the build failed (the message names the log), or another user
            could have written the cached wheel.
    """
    recipe = Recipe.here()
    home = sdist.cache_dir() / "wheels" / recipe.key
    if not _wheels(home):
        with storage.locked_build_dir(home, lambda: progress(0, 0, WAITING)) as scratch:
            if not _wheels(home):
                out = scratch / "out"
                run(sdist.fetch(), out, progress, log=home.parent / f"{recipe.key}.log")
                (out / "recipe.json").write_text(json.dumps(asdict(recipe), indent=2) + "\n")
                storage.install(out, home, scratch / "old")
    elif problem := untrusted(home):
        raise EngineError(
            f"{problem}, so what lies in {home} may be anyone's; put that right, or set "
            "LLAMAHYBRID_CACHE_DIR to a folder of your own"
        )
    return _wheels(home)[0]


def run(source: Path, out: Path, progress: Progress, log: Path, cmake_args: str = "") -> None:
    """`pip wheel` of an sdist or its tree into the new folder `out`; the log stays only on failure.

    `cmake_args` come before the environment's CMAKE_ARGS, which override them.

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
            "CMAKE_ARGS": f"{cmake_args} {os.environ.get('CMAKE_ARGS', '')}".strip(),
        },
        made=lambda: bool(_wheels(out)),
    )


def _wheels(folder: Path) -> list[Path]:
    return list(folder.glob("*.whl"))
