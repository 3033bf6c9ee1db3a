"""Reads which functions a shared library has, and which libraries it needs, from its file alone.

A CUDA library cannot be loaded where there is no driver (``libcuda.so.1``), and that is where many are built.
Format: System V ABI, chapters 4 and 5.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

_DYNAMIC, _DYNSYM = 6, 11  # SHT_DYNAMIC, SHT_DYNSYM
_NEEDED = 1  # DT_NEEDED
_UNDEFINED = 0  # SHN_UNDEF


def exported(path: Path) -> frozenset[str]:
    """Names that the dynamic symbol table of an ELF library defines.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no ELF library (macOS and Windows have other formats), or a damaged one.
    """
    return frozenset(_read(path, _exported))


def needed(path: Path) -> frozenset[str]:
    """Names of the libraries that it is loaded with, e.g. ``libcudart.so.13``; raises as `exported`."""
    return frozenset(_read(path, _needed))


def cut_short(path: Path) -> bool:
    """An ELF library that ends before all of it is there: to load it would end the process.

    What says where its parts are stands at its end. Raises OSError where it cannot be read.
    """
    with path.open("rb") as file:
        if file.read(4) != b"\x7fELF":
            return False
    try:
        needed(path)
    except ValueError:
        return True
    return False


def _read(path: Path, names: Names) -> set[str]:
    with path.open("rb") as file:
        if file.read(4) != b"\x7fELF":
            raise ValueError(f"{path} is no ELF library")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return set(names(data, data[4] == 2, "<" if data[5] == 1 else ">"))
            except (struct.error, IndexError, OverflowError) as error:
                raise ValueError(f"{path} is damaged: {error}") from error


Names: TypeAlias = Callable[[mmap.mmap, bool, str], Iterator[str]]
"""Names in a file, given whether it is one of 64 bits and its order of bytes."""


def _tables(data: mmap.mmap, wide: bool, order: str, wanted: int) -> Iterator[tuple[range, int]]:
    """Where the entries of each section of a kind are, and where the names that they refer to begin."""
    start = struct.unpack_from(order + ("Q" if wide else "I"), data, 40 if wide else 32)[0]
    size, count = struct.unpack_from(order + "HH", data, 58 if wide else 46)
    section = struct.Struct(order + ("IIQQQQIIQQ" if wide else "10I"))
    headers = [section.unpack_from(data, start + n * size) for n in range(count)]
    for _, kind, _, _, offset, length, link, _, _, each in headers:
        if kind == wanted:
            yield range(offset, offset + length, each or length or 1), headers[link][4]


def _text(data: mmap.mmap, at: int) -> str:
    return data[at : data.find(b"\0", at)].decode(errors="replace")


def _needed(data: mmap.mmap, wide: bool, order: str) -> Iterator[str]:
    for entries, texts in _tables(data, wide, order, _DYNAMIC):
        for at in entries:
            tag, value = struct.unpack_from(order + ("qQ" if wide else "iI"), data, at)
            if tag == _NEEDED:
                yield _text(data, texts + value)


def _exported(data: mmap.mmap, wide: bool, order: str) -> Iterator[str]:
    for entries, texts in _tables(data, wide, order, _DYNSYM):
        for at in entries:
            # st_name comes first; st_shndx is the last of 64-bit symbols' first four fields, and of 32-bit's
            name, defined = (
                struct.unpack_from(order + layout, data, at)[k]
                for layout, k in (("I", 0), ("IBBH", 3) if wide else ("IIIBBH", 5))
            )
            if defined != _UNDEFINED:
                yield _text(data, texts + name)
