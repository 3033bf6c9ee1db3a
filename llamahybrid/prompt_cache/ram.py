"""RAM for snapshots: the size of the machine, buffers, and the account of those that are handed out."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from llamahybrid.prompt_cache.base import Bytes

MIN_RAM_BYTES = 256 << 20
MAX_RAM_BYTES = 8 << 30

OWN_GROUPS, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
"""Files of Linux with the control groups of a process, and their limits (versions 1 and 2)."""

MAPPED_BYTES = 64 << 10
"""Buffers from this size on are mappings of their own."""

HUGE_BYTES = 16 << 20
"""Buffers from this size on use huge pages where the system has any, and are first filled in half the time.

Smaller ones get all their pages at once, which is faster: a huge page may have to be composed first, or found
by the host of a virtual machine, in up to 4 ms each.
"""

POPULATE_WRITE = 23
"""`MADV_POPULATE_WRITE` of Linux 5.14; `MAP_POPULATE` would have the pages found while mmap has the GIL."""

_madvise = ctypes.CDLL(None).madvise if sys.platform == "linux" else None


def default_ram_bytes() -> int:
    """An eighth of physical memory, or of what a container may have, within 256 MiB and 8 GiB."""
    return max(MIN_RAM_BYTES, min(MAX_RAM_BYTES, physical_bytes() // 8))


def physical_bytes() -> int:
    """Physical memory, or what a container may have of it; 0 where the system does not tell."""
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not every system tells
        physical = 0
    return min([physical, *_group_limits()])


def _group_limits() -> Iterator[int]:
    """Yield the limits of this process's control groups (a container's, a service's), if there are any."""
    groups = [""]  # a container sees its own as the first
    with contextlib.suppress(OSError):
        groups += [line.split(":", 2)[2].strip("/") for line in OWN_GROUPS.read_text().splitlines()]
    for group in groups:
        for file in (group, "memory.max"), ("memory", group, "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # "max"
                yield int(GROUPS.joinpath(*file).read_text())


def new_buffer(n_bytes: int) -> Bytes:
    """The same as `mapped_buffer`, with its pages where that takes less time than a fault for each."""
    buffer = mapped_buffer(n_bytes)
    if n_bytes >= MAPPED_BYTES and _madvise is not None:  # advice that the kernel does not know is not taken
        advice = mmap.MADV_HUGEPAGE if n_bytes >= HUGE_BYTES else POPULATE_WRITE
        _madvise(ctypes.c_void_p(buffer.ctypes.data), ctypes.c_size_t(n_bytes), advice)
    return buffer


def mapped_buffer(n_bytes: int) -> Bytes:
    """An array of exactly `n_bytes`, contents undefined, whose memory goes back to the system when it goes.

    The C library would keep much of it for later, in pieces: more would be resident than the budget says.
    Pages of a large one come when they are written.
    """
    if n_bytes < MAPPED_BYTES:
        return np.empty(n_bytes, np.uint8)
    flags = {}
    if hasattr(mmap, "MAP_PRIVATE"):  # Windows knows no flags
        flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    try:
        return np.frombuffer(mmap.mmap(-1, n_bytes, **flags), np.uint8)
    except OSError:  # Linux allows a process some 65,000 mappings
        return np.empty(n_bytes, np.uint8)


class Expected:
    """Memory that is about to be filled, and counts from now on."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class Account:
    """The budget, `limit`, and the exact bytes of what is handed out.

    A thing counts until it is unreserved or collected.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._reserved: dict[int, weakref.ref[Any]] = {}  # by id

    @property
    def nbytes(self) -> int:
        """Bytes of all that is handed out, without what was collected."""
        alive = {key: what for key, ref in self._reserved.items() if (what := ref()) is not None}
        self._reserved = {key: self._reserved[key] for key in alive}
        return sum(what.nbytes for what in alive.values())

    def reserve(self, what: Bytes | Expected) -> None:
        """Count it from now on."""
        self._reserved[id(what)] = weakref.ref(what)

    def reserved(self, what: Bytes | Expected) -> int:
        """Bytes of this very thing that count as handed out."""
        ref = self._reserved.get(id(what))
        return what.nbytes if ref is not None and ref() is what else 0

    def unreserve(self, what: Bytes | Expected) -> None:
        """Stop counting it as handed out."""
        self._reserved.pop(id(what), None)
