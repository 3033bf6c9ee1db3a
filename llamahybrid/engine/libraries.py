"""Inspect a folder of libraries: its ggml backends, and whether it can be loaded.

A CUDA library cannot be loaded without a driver (``libcuda.so.1``), and many build machines have none, so
backends are found by names of files, and of functions inside them.
"""

from __future__ import annotations

import mmap
import re
import struct
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from llamahybrid.engine import installed
from llamahybrid.errors import EngineError

# Tools that make wheels portable put copies beside the package, with a hash in their names.
_SHARED = re.compile(r"(?:lib)?ggml-([a-z0-9_-]+?)(?:-[0-9a-f]{8,})?\.")
_COPIES = ("../../llama_cpp_python.libs", "../.dylibs")
_NAMES = {"vk": "vulkan"}
# The loader's words for a library that is not on this machine; not one of the build's own.
_ABSENT = re.compile(r"\b(?!lib(?:llama|ggml|mtmd)\b)lib[\w+-]+\.so[.\d]*: cannot open shared object file")
# In a process of its own: loading may end the process, and a loaded library stays. On Windows the toolkits'
# folders are searched, as llama_cpp does.
_LOAD = """
import ctypes, os, sys
for name in ("CUDA_PATH", "HIP_PATH"):
    for part in ("bin", "lib"):
        folder = os.path.join(os.environ.get(name, ""), part)
        if sys.platform == "win32" and os.path.isabs(folder) and os.path.isdir(folder):
            os.add_dll_directory(folder)
try:
    ctypes.CDLL(sys.argv[1])
except OSError as error:
    sys.exit(str(error))
"""


def backends(folder: Path | None) -> frozenset[str] | None:
    """Names such as ``cpu`` and ``cuda``; None: unknown, as for libraries in another folder.

    In a shared build each backend is a file (``libggml-cuda.so``); in a static build each has a function that
    registers it (``ggml_backend_cuda_reg``).
    """
    if folder is None:
        return None
    files = [*_files(folder), *(file for name in _COPIES for file in _files(folder / name))]
    shared = {found.group(1) for file in files if (found := _SHARED.match(file.name))} - {"base"}
    if any(_is_cpu(name) for name in shared):
        return frozenset("cpu" if _is_cpu(name) else name for name in shared)
    inside: set[str] = set()
    for file in files:
        if re.match(r"(lib)?(llama|ggml)\b", file.name):
            inside |= _names(file, rb"ggml_backend_([a-z0-9]+)_reg")
    named = frozenset({*shared, *(_NAMES.get(name, name) for name in inside)})
    return named if "cpu" in inside else None


def how_to_build(names: Iterable[str]) -> str:
    """The command that builds an engine with these backends."""
    options = " ".join(f"-DGGML_{name.upper()}=on" for name in sorted(names) if name != "cpu")
    return f'`CMAKE_ARGS="{options}" llamahybrid engine build`' if options else "`llamahybrid engine build`"


def require_loadable(folder: Path) -> None:
    """Load a libllama in a process of its own, to see that it works.

    A missing library of the system, such as a GPU's driver or cuBLAS, is no fault of the build.

    Raises:
        EngineError: it cannot be loaded.
    """
    path = str(installed.library(folder, "llama"))
    run = subprocess.run(
        [sys.executable, "-c", _LOAD, path],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if run.returncode == 0 or _ABSENT.search(run.stderr):
        return
    reason = run.stderr.strip() or f"it ended its process ({run.returncode})"
    raise EngineError(f"what was built cannot be loaded: {reason}")


def cut_short(path: Path) -> bool:
    """Tell whether an ELF library is truncated: loading it would end the process. Raises OSError.

    The section table is at the end of the file (System V ABI, chapter 4; 64 bits, little-endian).
    """
    with path.open("rb") as file:
        header = file.read(64)
    if header[:6] != b"\x7fELF\x02\x01":
        return False
    if len(header) < 64:
        return True
    (start,), (size, count) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
    return bool(path.stat().st_size < start + size * count)


def _names(path: Path, pattern: bytes) -> set[str]:
    """Names in a library's table of symbols, each ended by a zero; empty if it is unreadable."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return {found.decode() for found in re.findall(pattern + rb"\0", data)}
    except (OSError, ValueError):  # ValueError: it is empty
        return set()


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _is_cpu(name: str) -> bool:
    return name == "cpu" or name.startswith("cpu-")  # all variants: cpu-haswell, cpu-zen4, ...
