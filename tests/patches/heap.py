"""Bytes that an operation allocates on its way, freed or not, counted with glibc instead of a clock.

An operation that copies cells it does not change allocates in proportion to them.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import numpy as np
import pytest
from capi import Context, lib

CELLS = 16384
LEAST_COPY = 16 * CELLS  # bytes: less than the smallest copy of as many cells, or of their positions, takes
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # mallopt
_PIECE = 24
_HEADER = 16  # magic, sequence, streams, cells


class _Info(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks")),
        *((name, ctypes.c_size_t) for name in ("fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


def growth(operation: Callable[[], object]) -> int:
    """Return the bytes by which an operation grew the heap; skip the test without glibc."""
    libc = ctypes.CDLL(None)
    if not sys.platform.startswith("linux") or not hasattr(libc, "mallinfo2"):
        pytest.skip("the heap cannot be measured here")
    libc.mallinfo2.restype = _Info
    libc.malloc.restype = ctypes.c_void_p
    libc.mallopt(_MMAP_MAX, 0)  # all of it in the heap, and nothing given back
    libc.mallopt(_TRIM_THRESHOLD, 1 << 30)
    libc.malloc_trim(0)  # small pieces that were freed become larger ones
    held = (ctypes.c_void_p * (libc.mallinfo2().fordblks // _PIECE + 10_000))()
    taken, full = 0, libc.mallinfo2().arena
    while libc.mallinfo2().arena == full:  # what is free in the heap is taken first
        for _ in range(100):
            held[taken] = libc.malloc(_PIECE)
            taken += 1
    before = libc.mallinfo2().arena
    operation()
    grown = libc.mallinfo2().arena - before
    for piece in held[:taken]:
        libc.free(ctypes.c_void_p(piece))
    return int(grown)


def filled(path: str, **params: object) -> tuple[Context, Callable[[int], bytes]]:
    """A context with CELLS - 256 cells in sequence 0 and none in 1, and a state of 64 cells at any position.

    The model must be one whose cells are saved as position, count and sequence, 12 bytes.
    """
    context = Context(path, n_ctx=CELLS, n_seq_max=2, kv_unified=True, **params)
    assert context.feed(0, 64, 1) == 0
    state = np.frombuffer(context.save(1), np.uint8).copy()
    context.rm(1, -1, -1)

    def at(position: int, cells: int = 64) -> bytes:
        """The same attention under other positions."""
        meta = state[_HEADER : _HEADER + cells * 12].view(np.int32).reshape(cells, 3)
        meta[:, 0] = np.arange(position, position + cells)
        return state.tobytes()

    for position in range(0, CELLS - 256, 64):
        assert context.load(at(position), 1)
        lib.llama_memory_seq_cp(context.memory, 1, 0, -1, -1)
        context.rm(1, -1, -1)
    return context, at
