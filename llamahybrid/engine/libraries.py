"""Inspect a folder of libraries: its ggml backends, and the optional functions of its libllama.

A CUDA library cannot be loaded without a driver (``libcuda.so.1``), and many build machines have none, so
functions are read from the ELF symbol table (System V ABI, chapter 4).
"""

from __future__ import annotations

import contextlib
import mmap
import re
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from llamahybrid.engine import installed
from llamahybrid.errors import EngineError
from llamahybrid.upstream import OPTIONAL

# Tools that make wheels portable put copies beside the package, with a hash in their names.
_SHARED = re.compile(r"(?:lib)?ggml-([a-z0-9_-]+?)(?:-[0-9a-f]{8,})?\.")
_COPIES = ("../../llama_cpp_python.libs", "../.dylibs")
_REGISTERS = re.compile(r"ggml_backend_([a-z0-9]+)_reg")
_NAMES = {"vk": "vulkan"}
_DRIVERS = re.compile(
    r"lib(cuda|nvidia-[\w-]+|nvcuda|hsa-runtime64|amdhip64|musa|ze_loader|OpenCL|vulkan|ascendcl|ascend_hal)"
    r"\.so[.\d]*: cannot open shared object file"
)
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
_DYNSYM = 11  # SHT_DYNSYM


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
            with contextlib.suppress(OSError, ValueError):
                inside |= {m.group(1) for name in exported(file) if (m := _REGISTERS.fullmatch(name))}
    named = frozenset({*shared, *(_NAMES.get(name, name) for name in inside)})
    return named if "cpu" in inside else None


def how_to_build(names: Iterable[str]) -> str:
    """The command that builds an engine with these backends."""
    options = " ".join(f"-DGGML_{name.upper()}=on" for name in sorted(names) if name != "cpu")
    return f'`CMAKE_ARGS="{options}" llamahybrid engine build`' if options else "`llamahybrid engine build`"


def optional(folder: Path) -> tuple[str, ...]:
    """The functions of `upstream.OPTIONAL` in the symbol table of libllama; empty if it is unreadable."""
    path = installed.library(folder, "llama")
    try:
        names = exported(path) if path else frozenset()
    except (OSError, ValueError):
        return ()
    return tuple(name for name in OPTIONAL if name in names)


def require_loadable(folder: Path) -> None:
    """Load a libllama in a process of its own, to see that it works; a missing GPU driver is no fault.

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
    if run.returncode == 0 or _DRIVERS.search(run.stderr):
        return
    reason = run.stderr.strip() or f"it ended its process ({run.returncode})"
    raise EngineError(f"what was built cannot be loaded: {reason}")


def exported(path: Path) -> frozenset[str]:
    """Names that the dynamic symbol table of an ELF library defines.

    Raises:
        OSError: the file is unreadable.
        ValueError: the file is no ELF library (macOS and Windows have other formats), or a damaged one.
    """
    with path.open("rb") as file:
        if file.read(4) != b"\x7fELF":
            raise ValueError(f"{path} is no ELF library")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return frozenset(_symbols(data, data[4] == 2, "<" if data[5] == 1 else ">"))
            except (struct.error, IndexError, OverflowError) as error:
                raise ValueError(f"{path} is damaged: {error}") from error


def cut_short(path: Path) -> bool:
    """Tell whether an ELF library is truncated: loading it would end the process. Raises OSError.

    The section table, which `exported` reads first, is at the end of the file.
    """
    with path.open("rb") as file:
        if file.read(4) != b"\x7fELF":
            return False
    try:
        exported(path)
    except ValueError:
        return True
    return False


def _symbols(data: mmap.mmap, wide: bool, order: str) -> Iterator[str]:
    """Defined names in each SHT_DYNSYM section. `wide`: 64 bits; `order`: of bytes, for `struct`."""
    start = struct.unpack_from(order + ("Q" if wide else "I"), data, 40 if wide else 32)[0]
    size, count = struct.unpack_from(order + "HH", data, 58 if wide else 46)
    section = struct.Struct(order + ("IIQQQQIIQQ" if wide else "10I"))
    symbol = struct.Struct(order + ("IBBH" if wide else "IIIBBH"))  # st_name first, st_shndx last
    headers = [section.unpack_from(data, start + n * size) for n in range(count)]
    for _, kind, _, _, offset, length, link, _, _, each in headers:
        for at in range(offset, offset + length, each or length or 1) if kind == _DYNSYM else ():
            name, *_, defined = symbol.unpack_from(data, at)
            if defined:
                text = headers[link][4] + name
                yield data[text : data.find(b"\0", text)].decode(errors="replace")


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _is_cpu(name: str) -> bool:
    return name == "cpu" or name.startswith("cpu-")  # all variants: cpu-haswell, cpu-zen4, ...
