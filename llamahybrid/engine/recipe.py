"""What shapes a build: source, options, compilers, machine. Builds of equal recipes are interchangeable."""

from __future__ import annotations

import contextlib
import ctypes
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
"""What every engine is built with unless the environment says otherwise. RPC is a small library of its own,
and opens no connection by itself; RDMA would hang on what happens to be installed where it is built."""

# Read by CMake (cmake-env-variables), scikit-build-core, the compilers, and the CMakeLists of the sdist.
_NAMES = """
    CC CXX OBJC OBJCXX ASM CPP AR LD CFLAGS CXXFLAGS CPPFLAGS LDFLAGS OBJCFLAGS OBJCXXFLAGS ASMFLAGS
    CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH LIBRARY_PATH GCC_EXEC_PREFIX COMPILER_PATH PKG_CONFIG_PATH
    CL _CL_ INCLUDE LIB VCToolsInstallDir ARCHFLAGS MACOSX_DEPLOYMENT_TARGET SDKROOT DEVELOPER_DIR
    CUDACXX CUDAARCHS CUDAFLAGS CUDAHOSTCXX CUDA_PATH CUDA_HOME CUDAToolkit_ROOT NVCC_PREPEND_FLAGS
    NVCC_APPEND_FLAGS NVCC_CCBIN NCCL_ROOT HIPCXX HIPFLAGS HIPARCHS HIPHOSTCXX HIP_PATH HIP_PLATFORM
    ROCM_PATH MUSA_PATH VULKAN_SDK ONEAPI_ROOT MKLROOT ASCEND_TOOLKIT_HOME HEXAGON_SDK_ROOT
    HEXAGON_TOOLS_ROOT RISCV_ROOT_PATH ZENDNN_ROOT BLAS_ROOT OpenBLAS_HOME OpenMP_ROOT FORCE_CMAKE
    PIP_CONFIG_SETTINGS SOURCE_DATE_EPOCH
"""
_FAMILIES = ("CMAKE_", "SKBUILD_")
_WITHOUT_EFFECT = """
    CMAKE_BUILD_PARALLEL_LEVEL CMAKE_INSTALL_PARALLEL_LEVEL CMAKE_COLOR_DIAGNOSTICS CMAKE_NO_VERBOSE
    CMAKE_EXPORT_COMPILE_COMMANDS CMAKE_C_COMPILER_LAUNCHER CMAKE_CXX_COMPILER_LAUNCHER
    CMAKE_CUDA_COMPILER_LAUNCHER SKBUILD_LOGGING_LEVEL SKBUILD_BUILD_VERBOSE SKBUILD_CMAKE_VERBOSE
"""
# What CMake takes where nothing is said.
_COMPILERS = {
    "C": ("CC", ("cc", "gcc", "cl", "clang")),
    "CXX": ("CXX", ("c++", "g++", "cl", "clang++")),
    "CUDA": ("CUDACXX", ("nvcc", "/usr/local/cuda/bin/nvcc")),
    "HIP": ("HIPCXX", ("hipcc", "/opt/rocm/bin/hipcc")),
    "VULKAN": ("", ("glslc",)),
}


@dataclass(frozen=True)
class Recipe:
    """Everything that shapes a build; equal recipes make interchangeable wheels."""

    sdist: str
    options: tuple[tuple[str, str], ...]
    """Variables of the environment, by name."""
    python: str
    platform: str
    cpu: str
    compilers: tuple[tuple[str, str], ...] = ()
    """Language to the compiler's own words about its version."""

    @classmethod
    def here(cls, pin: Pin | None = None) -> Recipe:
        """That for an sdist (None: `sdist.PIN`) on this machine, with the options in the environment."""
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
        """The variables of the environment that shape a build."""
        return tuple((name, _value(name)) for name in sorted(os.environ) if _shapes(name))

    @property
    def key(self) -> str:
        """A short name for the recipe's content."""
        return short_name(asdict(self))

    def runs_here(self) -> bool:
        """What it builds can run on this machine: another CPU may lack its instructions."""
        return (self.platform, self.cpu) == (sysconfig.get_platform(), cpu())


def compilers(options: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """The compilers that a build with these options takes, and their versions.

    The same command is another compiler after an upgrade. Those for GPUs count where an option names them.
    """
    text = " ".join(value for name, value in options.items() if name.startswith(_FAMILIES))
    found = []
    for language, (variable, usual) in _COMPILERS.items():
        if language not in ("C", "CXX") and language not in text.upper():
            continue
        named = re.search(rf"-DCMAKE_{language}_COMPILER(?::\w+)?=(\S+)", text)
        command = named.group(1) if named else options.get(variable) or next(filter(shutil.which, usual), "")
        found.append((language, identity(command) if command else ""))
    return tuple(found)


def cpu() -> str:
    """What the compiler's ``-march=native`` looks at, so that no machine runs another's instructions."""
    if sys.platform == "darwin":
        return _digest(" ".join(map(_sysctl, ("machdep.cpu.brand_string", "hw.cpufamily"))))
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    features = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    if features is None:
        return platform.processor()
    # Arm's compilers go by the part; there may be several kinds of core
    parts = sorted(set(re.findall(r"^CPU (?:implementer|part)\s*: (.*)$", text, re.MULTILINE)))
    return _digest(" ".join([*sorted(features.group(1).split()), *parts]))


def short_name(content: object) -> str:
    """A name of 16 letters for plain data, by its content."""
    return _digest(json.dumps(content, sort_keys=True))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _shapes(name: str) -> bool:
    named = name in _NAMES.split() or name.startswith(_FAMILIES)
    return bool(named and name not in _WITHOUT_EFFECT.split() and os.environ[name])


def _value(name: str) -> str:
    # ggml asks only whether it is set: then nothing is tuned to this CPU
    return "set" if name == "SOURCE_DATE_EPOCH" else os.environ[name]


@cache
def identity(command: str) -> str:
    """The line with the version in what a compiler says of itself; else how it is called."""
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
    """A compiler with its arguments (``ccache gcc``), or a path that may have spaces."""
    return [command] if shutil.which(command) else shlex.split(command)


def _sysctl(name: str) -> str:
    """A value of macOS' sysctl as text; empty where there is none."""
    try:
        read = ctypes.CDLL(None).sysctlbyname
        size = ctypes.c_size_t(256)
        value = ctypes.create_string_buffer(size.value)
        if read(name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t(0)):
            return ""
        return value.raw[: size.value].hex()
    except (OSError, AttributeError):
        return ""
