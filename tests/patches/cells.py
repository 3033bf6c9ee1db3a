"""Addresses of a sequence's cells in host memory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from capi import FULL, Context, function

_TAKE = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


@dataclass(frozen=True)
class Runs:
    """The keys of a sequence in the first layer, in the order of their cells."""

    row: int
    """Bytes of a cell."""
    runs: list[tuple[int, int]]
    """Address and bytes of each run of cells."""

    @property
    def begin(self) -> int:
        """The address of the first cell."""
        return self.runs[0][0]


def of(context: Context, seq: int, count: int) -> Runs:
    """Return the runs of a sequence's `count` cells: tensor data is handed out in place."""
    write = function("llama_state_seq_write_ext", ctypes.c_size_t)
    write.argtypes = None
    row, runs = 0, []

    def take(data: int, size: int, _: object) -> bool:
        nonlocal row
        if not row and size == ctypes.sizeof(ctypes.c_uint64):  # the first number of this size
            row = ctypes.c_uint64.from_address(data).value
        elif row and sum(length for _, length in runs) < count * row:
            runs.append((data, size))
        return True

    arguments = ctypes.c_int32(seq), ctypes.c_uint32(FULL), _TAKE(take), None
    assert write(ctypes.c_void_p(context.ctx), *arguments)
    assert sum(size for _, size in runs) == count * row
    return Runs(row, runs)
