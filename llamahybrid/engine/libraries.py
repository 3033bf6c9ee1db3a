"""Inspect a folder of libraries: its ggml backends, and whether it can be loaded.

A CUDA library cannot be loaded without a driver (``libcuda.so.1``), and many build machines have none, so
backends are found by names of files: llama-cpp-python builds each as a library of its own.
"""

from __future__ import annotations

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
    """Names such as ``cpu`` and ``cuda``; None: unknown, as for libraries in another folder."""
    if folder is None:
        return None
    files = [*_files(folder), *(file for name in _COPIES for file in _files(folder / name))]
    shared = {found.group(1) for file in files if (found := _SHARED.match(file.name))} - {"base"}
    names = frozenset("cpu" if name.startswith("cpu-") else name for name in shared)  # cpu-haswell, cpu-zen4
    return names if "cpu" in names else None


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
    raise EngineError(f"the libllama in {folder} cannot be loaded: {reason}")


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


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
