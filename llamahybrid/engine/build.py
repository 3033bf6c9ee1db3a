"""Build a tree of llama-cpp-python with pip.

``CMAKE_ARGS`` (CUDA, Metal, Vulkan, BLAS, ...) and the compiler variables have their usual meaning.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from llamahybrid.engine import process
from llamahybrid.engine.process import Progress

WAITING = "Waiting for another build of the same"


def run(source: Path, out: Path, progress: Progress, log: Path, cmake_args: str = "") -> None:
    """`pip wheel` of a source tree into the new folder `out`; the log stays only on failure.

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
        made=lambda: any(out.glob("*.whl")),
    )
