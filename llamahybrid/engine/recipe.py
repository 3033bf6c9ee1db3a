"""The inputs of a build: source, options, machine."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True)
class Recipe:
    """The inputs of a build; equal recipes make interchangeable libraries, by any version of a compiler."""

    sdist: str
    options: tuple[tuple[str, str], ...]
    """Environment variables, sorted by name."""
    python: str
    platform: str
    cpu: str

    @classmethod
    def here(cls, pin: Pin | None = None) -> Recipe:
        """The recipe for an sdist (None: `sdist.PIN`) with this machine and environment."""
        return cls(
            sdist=(pin or sdist.PIN).sha256,
            options=cls.options_here(),
            python=str(sys.implementation.cache_tag),
            platform=sysconfig.get_platform(),
            cpu=cpu(),
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
