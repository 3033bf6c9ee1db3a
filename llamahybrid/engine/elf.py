"""Reads which functions a shared library has from its file, so that what it needs need not be there.

A CUDA library cannot be loaded where there is no driver (``libcuda.so.1``), and that is where many are built.
Format: System V ABI, chapters 4 and 5.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

_DYNSYM = 11  # SHT_DYNSYM
_UNDEFINED = 0  # SHN_UNDEF


def exported(path: Path) -> frozenset[str]:
    """Names that the dynamic symbol table of an ELF library defines.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no ELF library (macOS and Windows have other formats), or a damaged one.
    """
    with path.open("rb") as file:
        if file.read(4) != b"\x7fELF":
            raise ValueError(f"{path} is no ELF library")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _exported(data)
            except (struct.error, IndexError, OverflowError) as error:
                raise ValueError(f"{path} is damaged: {error}") from error


def _exported(data: mmap.mmap) -> frozenset[str]:
    wide, order = data[4] == 2, "<" if data[5] == 1 else ">"
    start = struct.unpack_from(order + ("Q" if wide else "I"), data, 40 if wide else 32)[0]
    size, count = struct.unpack_from(order + "HH", data, 58 if wide else 46)
    section = struct.Struct(order + ("IIQQQQIIQQ" if wide else "10I"))
    headers = [section.unpack_from(data, start + n * size) for n in range(count)]
    names: set[str] = set()
    for _, kind, _, _, offset, length, link, _, _, each in headers:
        if kind != _DYNSYM:
            continue
        texts = headers[link][4]
        for at in range(offset, offset + length, each or length):
            # st_name comes first; st_shndx is the last of 64-bit symbols' first four fields, and of 32-bit's
            name, defined = (
                struct.unpack_from(order + layout, data, at)[k]
                for layout, k in (("I", 0), ("IBBH", 3) if wide else ("IIIBBH", 5))
            )
            if defined != _UNDEFINED:
                end = data.find(b"\0", texts + name)
                names.add(data[texts + name : end].decode(errors="replace"))
    return frozenset(names)
