"""RAM for snapshots: the size of the machine, and a pool of buffers that are used again.

A fresh buffer of a few hundred KiB costs 27-167 us to fill (page faults), a reused one 3-37 us.
"""

from __future__ import annotations

import os

from llamahybrid.prompt_cache.base import Bytes

MIN_RAM_BYTES = 256 << 20
MAX_RAM_BYTES = 8 << 30


def default_ram_bytes() -> int:
    """An eighth of physical memory, within 256 MiB and 8 GiB."""
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not every system tells
        physical = 0
    return max(MIN_RAM_BYTES, min(MAX_RAM_BYTES, physical // 8))


class BufferPool:
    """Idle snapshot buffers by size; counts their bytes exactly."""

    def __init__(self) -> None:
        self._idle: dict[int, list[Bytes]] = {}
        self.nbytes = 0

    def count(self, n_bytes: int) -> int:
        """Idle buffers of exactly this size."""
        return len(self._idle.get(n_bytes, ()))

    def holds(self, buffer: Bytes) -> bool:
        """Whether this very buffer lies idle here."""
        return any(b is buffer for b in self._idle.get(buffer.nbytes, ()))

    def take(self, n_bytes: int) -> Bytes | None:
        """An idle buffer of exactly this size, writeable, contents undefined; None if there is none."""
        stack = self._idle.get(n_bytes)
        if not stack:
            return None
        buffer = stack.pop()
        if not stack:
            del self._idle[n_bytes]
        self.nbytes -= n_bytes
        buffer.flags.writeable = True
        return buffer

    def put(self, buffer: Bytes) -> None:
        """Keep a buffer that owns its memory for reuse; read-only, so that no second owner goes unseen."""
        buffer.flags.writeable = False
        self._idle.setdefault(buffer.nbytes, []).append(buffer)
        self.nbytes += buffer.nbytes

    def free(self, n_bytes: int) -> None:
        """Give idle buffers back to the system until `n_bytes` are free or none is left."""
        target = max(0, self.nbytes - n_bytes)
        while self.nbytes > target:
            self.take(next(iter(self._idle)))

    def check_integrity(self) -> None:
        """Raise AssertionError unless sizes, ownership and the count are true."""
        buffers = [b for stack in self._idle.values() for b in stack]
        assert all(b.nbytes == size for size, stack in self._idle.items() for b in stack), "filed wrongly"
        assert len({id(b) for b in buffers}) == len(buffers), "a buffer lies in the pool twice"
        assert self.nbytes == sum(b.nbytes for b in buffers), "idle bytes miscounted"


def owned(snapshot: Bytes) -> Bytes:
    """`snapshot` itself if it owns exactly its memory and nobody else keeps it, else a copy.

    A view would hold uncounted bytes; a read-only array may be in the cache already.
    """
    flags = snapshot.flags
    return snapshot if flags.owndata and flags.writeable and flags.c_contiguous else snapshot.copy()
