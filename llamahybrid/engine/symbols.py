"""Which of the optional functions a libllama has, and that it can be loaded at all."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from llamahybrid.engine import backends, elf, installed
from llamahybrid.errors import EngineError
from llamahybrid.upstream import OPTIONAL

# A process of its own: a library that cannot be loaded may take its process down, and one that is loaded
# stays. On Windows the toolkits' folders are searched, as llama_cpp does it.
_LOAD = """
import ctypes, os, sys
for name in ("CUDA_PATH", "HIP_PATH"):
    for part in ("bin", "lib"):
        folder = os.path.join(os.environ.get(name, ""), part)
        if sys.platform == "win32" and os.path.isabs(folder) and os.path.isdir(folder):
            os.add_dll_directory(folder)
try:
    library = ctypes.CDLL(sys.argv[1])
except OSError as error:
    sys.exit(str(error))
print(*(name for name in sys.argv[2:] if hasattr(library, name)))
"""
_DRIVERS = re.compile(
    r"lib(cuda|nvidia-[\w-]+|nvcuda|hsa-runtime64|amdhip64|musa|ze_loader|OpenCL|vulkan|ascendcl|ascend_hal)"
    r"\.so[.\d]*: cannot open shared object file"
)
"""Libraries that come with a GPU's driver: a build machine needs none."""
_ON_DRIVERS = frozenset({"cuda", "hip", "musa", "vulkan", "sycl", "cann", "opencl"})
"""Backends that load a GPU's driver with them, where there is one."""


def optional(folder: Path) -> tuple[str, ...]:
    """Those of `OPTIONAL` that the libllama in a folder has.

    One that would load a GPU's driver is not loaded: its file says what it has.

    Raises:
        EngineError: it cannot be loaded, and that is not for want of a GPU's driver.
    """
    if _ON_DRIVERS & (backends.of(folder) or frozenset()) and (found := named(folder)):
        return found
    path = str(installed.library(folder, "llama"))
    run = subprocess.run(
        [sys.executable, "-c", _LOAD, path, *OPTIONAL],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if run.returncode == 0:
        found = tuple(run.stdout.split())
    elif _DRIVERS.search(run.stderr):
        found = named(folder)
    else:
        reason = run.stderr.strip() or f"it ended its process ({run.returncode})"
        raise EngineError(f"what was built cannot be loaded: {reason}")
    return tuple(name for name in OPTIONAL if name in found)


def named(folder: Path) -> tuple[str, ...]:
    """The same as the file says, which is not loaded; empty where that cannot be read."""
    path = installed.library(folder, "llama")
    try:
        names = elf.exported(path) if path else frozenset()
    except (OSError, ValueError):
        return ()
    return tuple(name for name in OPTIONAL if name in names)
