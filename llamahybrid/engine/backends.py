"""Which ggml backends (CUDA, Vulkan, Metal, ...) a folder of libraries has, told from its files alone."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

from llamahybrid.engine import elf

# Tools that make wheels portable put copies beside the package, with a hash in their names.
_SHARED = re.compile(r"(?:lib)?ggml-([a-z0-9_-]+?)(?:-[0-9a-f]{8,})?\.")
_COPIES = ("../../llama_cpp_python.libs", "../.dylibs")
_REGISTERS = re.compile(r"ggml_backend_([a-z0-9]+)_reg")
_NAMES = {"vk": "vulkan"}
_SYSTEM = re.compile(r"(ld-linux|lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|gomp|atomic)\.so)")


def of(folder: Path | None) -> frozenset[str] | None:
    """Backends such as ``cpu`` and ``cuda``; None: cannot be told, as with libraries that lie elsewhere.

    Built as shared libraries each is a file of its own (``libggml-cuda.so``); in one piece each has a
    function that registers it (``ggml_backend_cuda_reg``).
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
            inside |= _registered(file)
    return frozenset({*inside, *shared}) if "cpu" in inside else None


def needs(folder: Path, backend: str) -> list[str]:
    """Libraries from elsewhere that a backend of a folder is loaded with: its toolkit's, and its driver's.

    Empty where it needs none but the system's own, and where that cannot be told.
    """
    shared = [file for file in _files(folder) if (m := _SHARED.match(file.name)) and m.group(1) == backend]
    names: set[str] = set()
    for file in shared or [file for file in _files(folder) if re.match(r"(lib)?(llama|ggml)\b", file.name)]:
        with contextlib.suppress(OSError, ValueError):
            names |= elf.needed(file)
    own = {file.name for file in _files(folder)}
    return sorted(name for name in names - own if not _SYSTEM.match(name) and "ggml" not in name)


def how_to_build(names: Iterable[str]) -> str:
    """The command that builds an engine with these backends."""
    options = " ".join(f"-DGGML_{name.upper()}=on" for name in sorted(names) if name != "cpu")
    return f'`CMAKE_ARGS="{options}" llamahybrid engine build`' if options else "`llamahybrid engine build`"


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _is_cpu(name: str) -> bool:
    return name == "cpu" or name.startswith("cpu-")  # with all variants: cpu-haswell, cpu-zen4, ...


def _registered(file: Path) -> set[str]:
    try:
        found = (_REGISTERS.fullmatch(name) for name in elf.exported(file))
        return {_NAMES.get(match.group(1), match.group(1)) for match in found if match}
    except (OSError, ValueError):
        return set()
