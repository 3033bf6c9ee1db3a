"""Everything that shapes a build: source, options, compilers, machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from llamahybrid.engine import sdist
from llamahybrid.engine.sdist import Pin

CMAKE_ARGS = "-DGGML_RPC=ON -DGGML_RPC_RDMA=OFF"
"""Default options of every engine; the environment's CMAKE_ARGS override them. RPC is a small separate
library and opens no connection by itself; RDMA would depend on packages of the build machine."""

_NAMES = """
    CMAKE_ARGS CMAKE_BUILD_TYPE CMAKE_GENERATOR CMAKE_PREFIX_PATH CMAKE_TOOLCHAIN_FILE SKBUILD_CMAKE_ARGS
    SKBUILD_CMAKE_DEFINE PIP_CONFIG_SETTINGS FORCE_CMAKE CC CXX CFLAGS CXXFLAGS CPPFLAGS LDFLAGS CPATH
    LIBRARY_PATH ARCHFLAGS MACOSX_DEPLOYMENT_TARGET SDKROOT CUDACXX CUDAARCHS CUDAFLAGS CUDAHOSTCXX
    CUDA_PATH CUDAToolkit_ROOT NVCC_PREPEND_FLAGS NVCC_APPEND_FLAGS HIPCXX HIPFLAGS HIPARCHS ROCM_PATH
    MUSA_PATH VULKAN_SDK ONEAPI_ROOT
"""
"""Variables of a build's environment that make another engine; after a change of others, `--force` builds."""

# CMake's defaults.
_COMPILERS = {
    "C": ("CC", ("cc", "gcc", "cl", "clang")),
    "CXX": ("CXX", ("c++", "g++", "cl", "clang++")),
    "CUDA": ("CUDACXX", ("nvcc", "/usr/local/cuda/bin/nvcc")),
    "HIP": ("HIPCXX", ("hipcc", "/opt/rocm/bin/hipcc")),
    "VULKAN": ("", ("glslc",)),
}


@dataclass(frozen=True)
class Recipe:
    """The inputs of a build; equal recipes make interchangeable libraries."""

    sdist: str
    options: tuple[tuple[str, str], ...]
    """Environment variables, sorted by name."""
    python: str
    platform: str
    cpu: str
    compilers: tuple[tuple[str, str], ...] = ()
    """Language to the compiler's version line."""

    @classmethod
    def here(cls, pin: Pin | None = None) -> Recipe:
        """The recipe for an sdist (None: `sdist.PIN`) with this machine and environment."""
        options = cls.options_here()
        return cls(
            sdist=(pin or sdist.PIN).sha256,
            options=options,
            python=str(sys.implementation.cache_tag),
            platform=sysconfig.get_platform(),
            cpu=cpu(),
            compilers=compilers(dict(options)),
        )

    @staticmethod
    def options_here() -> tuple[tuple[str, str], ...]:
        """The environment variables that shape a build."""
        return tuple((name, os.environ[name]) for name in sorted(_NAMES.split()) if os.environ.get(name))

    @property
    def pip_cache(self) -> Path:
        """A cache folder for pip of this recipe alone: pip's key of a built wheel has no CMAKE_ARGS."""
        return sdist.cache_dir() / "pip" / short_name(asdict(self))

    def runs_here(self) -> bool:
        """Tell whether its builds run on this machine: another CPU may lack instructions."""
        return (self.platform, self.cpu) == (sysconfig.get_platform(), cpu())


def compilers(options: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """The versions of the compilers that a build with these options uses, by language.

    Compilers for GPUs count only if an option names their backend.
    """
    text = " ".join(value for name, value in options.items() if name.startswith(("CMAKE_", "SKBUILD_")))
    found = []
    for language, (variable, usual) in _COMPILERS.items():
        if language not in ("C", "CXX") and language not in text.upper():
            continue
        named = re.search(rf"-DCMAKE_{language}_COMPILER(?::\w+)?=(\S+)", text)
        command = named.group(1) if named else options.get(variable) or next(filter(shutil.which, usual), "")
        found.append((language, identity(command) if command else ""))
    return tuple(found)


def cpu() -> str:
    """A digest of the CPU features that the compiler's ``-march=native`` depends on."""
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string", "hw.cpufamily"]
        return _digest(subprocess.run(command, capture_output=True, text=True).stdout)
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    features = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    if features is None:
        return platform.processor()
    # on Arm `-march=native` depends on the part; there may be several kinds of core
    parts = sorted(set(re.findall(r"^CPU (?:implementer|part)\s*: (.*)$", text, re.MULTILINE)))
    return _digest(" ".join([*sorted(features.group(1).split()), *parts]))


def short_name(content: object) -> str:
    """A digest of plain data, 16 hex digits."""
    return _digest(json.dumps(content, sort_keys=True))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def identity(command: str) -> str:
    """The line of a compiler's ``--version`` that has the version; the command itself if there is none."""
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        words = _words(command)
        run = subprocess.run(
            [*words, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=30,
        )
        lines = (line.strip() for line in run.stdout.splitlines())
        return next((line for line in lines if re.search(r"\d+\.\d+", line)), command)
    return command


def _words(command: str) -> Sequence[str]:
    """Split a compiler with arguments (``ccache gcc``), but not a path with spaces."""
    return [command] if shutil.which(command) else shlex.split(command)
