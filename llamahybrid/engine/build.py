"""Builds llama-cpp-python from the pinned sdist, with its own build, once per machine and set of options.

``CMAKE_ARGS`` (CUDA, Metal, Vulkan, BLAS, ...) and the compiler variables work as its users know them. What
comes out is kept in the cache folder under a key made of everything that shapes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import sysconfig
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

from llamahybrid.engine import sdist
from llamahybrid.errors import EngineError

Progress: TypeAlias = Callable[[int, int, str], None]
"""Called with steps done, steps in all (0: not known yet) and what is being done."""

_OPTIONS = ("CMAKE_ARGS", "CC", "CXX", "CFLAGS", "CXXFLAGS")
_PHASES = ("Installing build dependencies", "Preparing metadata", "Configuring CMake", "Building wheel")


@dataclass(frozen=True)
class Recipe:
    """Everything that shapes a build; equal recipes make interchangeable wheels."""

    sdist: str
    options: tuple[tuple[str, str], ...]
    python: str
    platform: str
    cpu: str

    @classmethod
    def here(cls) -> Recipe:
        """The recipe for the pinned sdist on this machine, with the options in the environment."""
        return cls(
            sdist=sdist.PIN.sha256,
            options=tuple((name, os.environ[name]) for name in _OPTIONS if os.environ.get(name)),
            python=str(sys.implementation.cache_tag),
            platform=sysconfig.get_platform(),
            cpu=_cpu(),
        )

    @property
    def key(self) -> str:
        """A short name for the recipe's content."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def wheel(progress: Progress) -> Path:
    """The stock llama-cpp-python wheel for this machine, built if it is not in the cache (minutes).

    The folder it lies in appears in one rename, so an interrupted build leaves nothing half-installed.

    Raises:
        EngineError: the sdist cannot be had, or the build failed; the message names the log.
    """
    recipe = Recipe.here()
    home = sdist.cache_dir() / "wheels" / recipe.key
    if not home.is_dir():
        source = sdist.fetch()
        with sdist.scratch(home.parent) as folder:
            out = folder / "out"
            run(source, out, progress, log=home.parent / f"{recipe.key}.log")
            (out / "recipe.json").write_text(json.dumps(asdict(recipe), indent=2) + "\n")
            try:
                os.replace(out, home)
            except OSError:
                if not home.is_dir():  # else another process finished the same build first
                    raise
    return next(home.glob("*.whl"))


def read_step(line: str) -> tuple[int, int, str] | None:
    """What a line of build output says of progress, as (done, in all, what), if anything.

    Understands ninja's ``[3/120] Building ...``, make's ``[ 42%] Building ...`` and pip's phases.
    """
    if found := re.match(r"\s*\[\s*(\d+)(?:/(\d+)|%)\]\s*(.*)", line):
        done, total, what = found.groups()
        return int(done), int(total or 100), what
    phase = next((phase for phase in _PHASES if phase in line), None)
    return (0, 0, phase) if phase else None


def run(source: Path, out: Path, progress: Progress, log: Path) -> None:
    """`pip wheel` of an sdist or its tree into the new folder `out`; the log is kept only if it fails.

    Raises:
        EngineError: the build failed; the message names the log and ends with its last lines.
    """
    command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", "--wheel-dir", str(out)]
    command += ["--no-cache-dir", str(source)]  # pip's cache of built wheels does not know CMAKE_ARGS
    temporary = out.parent / "tmp"
    temporary.mkdir()
    tail: deque[str] = deque(maxlen=20)
    process = subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that an end can reach pip, ninja and the compilers alike
    )
    with log.open("w") as record, process:
        try:
            for line in process.stdout or ():
                record.write(line)
                tail.append(line)
                if step := read_step(line):
                    progress(*step)
        except BaseException:
            _end(process)
            raise
    if process.returncode or not list(out.glob("*.whl")):
        raise EngineError(
            "llama-cpp-python did not build. It needs a C++ compiler (Debian: `apt install g++ cmake`) and "
            f"CMAKE_ARGS that fit this machine; the whole log is {log}. Its end:\n{''.join(tail)}"
        )
    log.unlink()


def _end(process: subprocess.Popen[str]) -> None:
    if sys.platform == "win32":
        process.terminate()
    else:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # ended by itself meanwhile
            os.killpg(process.pid, signal.SIGTERM)


def _cpu() -> str:
    """What the compiler's ``-march=native`` looks at, so that no machine runs another's instructions."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    flags = " ".join(sorted(found.group(1).split())) if found else platform.processor()
    return hashlib.sha256(flags.encode()).hexdigest()[:16]
