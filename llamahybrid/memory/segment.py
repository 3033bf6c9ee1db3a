"""Attention KV of a token range as the library writes it: its layout, cutting it in two, joining pieces.

A segment's payload is what `paging` gets for a range: a head that ends with the number of cells, the cells'
metadata, then for each layer the keys and the values, and at the end what a scratch sequence has to say of
its empty recurrent or window part (src/llama-kv-cache.cpp, state_write_meta and state_write_data). The layout
is learnt from one such state and holds for every other of its context.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from llamahybrid.prompt_cache.base import Bytes

_COUNT = struct.Struct("<I")
_KINDS = struct.Struct("<II")  # values transposed, layers
_ROWS = struct.Struct("<iQ")  # type, bytes of a cell's row
_COLUMNS = struct.Struct("<iII")  # type, bytes of an element, elements of a cell

_COUNTS_BYTES = 8  # the numbers of streams and cells, in front of each part

CELL_BYTES = (12, 20, 24, 28)
"""Sizes of a cell's metadata that are tried: position, count, sequence id, and what M-RoPE adds."""


@dataclass(frozen=True)
class SegmentLayout:
    """Where the bytes of each cell lie in a payload of n cells."""

    head_bytes: int
    cell_bytes: int
    planes: tuple[tuple[int, int], ...]
    """(rows, bytes of a cell in a row) of keys, then values, in the order of their layers."""
    rest_bytes: int
    """What an empty sequence has besides attention, behind the cells."""

    @classmethod
    def learn(cls, payload: Bytes, n: int, head_bytes: int, rest_bytes: int) -> SegmentLayout | None:
        """The layout of a payload of n cells at consecutive positions; None when it is not as we know it."""
        for cell_bytes in CELL_BYTES:
            planes = _planes(payload[: payload.nbytes - rest_bytes], n, head_bytes, cell_bytes)
            if planes is not None:
                return cls(head_bytes, cell_bytes, planes, rest_bytes)
        return None

    @property
    def transposed(self) -> bool:
        """Values of one cell lie apart, as they do without flash attention."""
        return any(rows > 1 for rows, _ in self.planes)

    def size(self, n: int) -> int:
        """Bytes of a payload of n cells."""
        cells = self.cell_bytes + sum(rows * width for rows, width in self.planes)
        fixed = self.head_bytes + _KINDS.size + len(self.planes) * _ROWS.size + self.rest_bytes
        return fixed + n * cells

    def cut(self, payload: Bytes, at: int, out: tuple[Bytes, Bytes]) -> None:
        """Write cells [0, at) and [at, n) of a payload into two of their own, filling `out`."""
        self.part(payload, 0, at, out[0])
        self.part(payload, at, self.count(payload), out[1])

    def part(self, payload: Bytes, start: int, end: int, out: Bytes) -> None:
        """Write cells [start, end) of a payload into one of their own, filling `out`."""
        n = self.count(payload)
        self._frame(payload, n, out, end - start)
        for whole, part in zip(self._cells(payload, n), self._cells(out, end - start), strict=True):
            part[:] = whole[:, start:end]

    def join(self, payloads: Sequence[Bytes], out: Bytes) -> None:
        """Write the cells of all payloads, in order, into one of `size` of their sum."""
        counts = [self.count(p) for p in payloads]
        total = sum(counts)
        self._frame(payloads[0], counts[0], out, total)
        starts = itertools.accumulate(counts, initial=0)
        for payload, n, start in zip(payloads, counts, starts, strict=False):
            for part, whole in zip(self._cells(payload, n), self._cells(out, total), strict=True):
                whole[:, start : start + n] = part

    def sort(self, payload: Bytes, n: int) -> bool:
        """Put n cells in the order of their positions; False where they lie so already.

        They do not where several sequences have used the cells of a context in turn.
        """
        planes = list(self._cells(payload, n))
        positions = planes[0][0, :, :4].copy().view(np.int32).ravel()
        if np.all(np.diff(positions) > 0):
            return False
        order = np.argsort(positions, kind="stable")
        for cells in planes:
            cells[:] = cells[:, order]
        return True

    def begins(self, payload: Bytes) -> bool:
        """The cells of a payload lie at positions 0, 1, 2 and so on, in this order."""
        n = self.count(payload)
        positions = next(self._cells(payload, n))[0, :, :4].copy().view(np.int32).ravel()
        return bool(np.array_equal(positions, np.arange(n)))

    def first_position(self, payload: Bytes) -> int:
        """Where the first cell of a payload lies."""
        return int(payload[self.head_bytes : self.head_bytes + 4].view(np.int32)[0])

    def count(self, payload: Bytes) -> int:
        """Cells of a payload. Raises ValueError when it is none of this layout."""
        (n,) = _COUNT.unpack_from(payload.data, self.head_bytes - _COUNT.size)
        if payload.nbytes != self.size(n):
            raise ValueError(f"{payload.nbytes} bytes are no {n} cells of this layout")
        return int(n)

    def _frame(self, source: Bytes, n: int, out: Bytes, count: int) -> None:
        """Everything but the cells, as in `source` of n cells, for `count` cells."""
        for (a, b), (c, d) in zip(self._gaps(n), self._gaps(count), strict=True):
            out[c:d] = source[a:b]
        _COUNT.pack_into(out.data, self.head_bytes - _COUNT.size, count)

    def _gaps(self, n: int) -> Iterator[tuple[int, int]]:
        """The byte ranges between the cells, of a payload of n cells."""
        yield 0, self.head_bytes
        at = self.head_bytes + n * self.cell_bytes
        gap = _KINDS.size
        for rows, width in self.planes:
            gap += _ROWS.size
            yield at, at + gap
            at, gap = at + gap + n * rows * width, 0
        yield at, at + gap + self.rest_bytes

    def _cells(self, payload: Bytes, n: int) -> Iterator[npt.NDArray[np.uint8]]:
        """Views of shape (rows, n, bytes): the metadata, then each plane."""
        shapes = ((1, self.cell_bytes), *self.planes)
        for (_, start), (rows, width) in zip(self._gaps(n), shapes, strict=False):
            yield payload[start : start + n * rows * width].reshape(rows, n, width)


@dataclass(frozen=True)
class StackedLayout:
    """The same of memory that keeps its layers in two places, each with all cells: one part behind the other.

    So it is with sliding windows (src/llama-kv-cache-iswa.cpp, state_write).
    """

    parts: tuple[SegmentLayout, ...]

    @classmethod
    def learn(cls, payload: Bytes, n: int, head_bytes: int, first_bytes: int) -> StackedLayout | None:
        """The layout of a payload of n cells, the first part of `first_bytes`; None: not as we know it."""
        first = SegmentLayout.learn(payload[:first_bytes], n, head_bytes, 0)
        second = SegmentLayout.learn(payload[first_bytes:], n, _COUNTS_BYTES, 0)
        return None if first is None or second is None else cls((first, second))

    @property
    def transposed(self) -> bool:
        """Values of one cell lie apart, as they do without flash attention."""
        return any(part.transposed for part in self.parts)

    def size(self, n: int) -> int:
        """Bytes of a payload of n cells."""
        return sum(part.size(n) for part in self.parts)

    def cut(self, payload: Bytes, at: int, out: tuple[Bytes, Bytes]) -> None:
        """Write cells [0, at) and [at, n) of a payload into two of their own, filling `out`."""
        n = self.count(payload)
        pieces = zip(self._split(out[0], at), self._split(out[1], n - at), strict=True)
        for part, whole, piece in zip(self.parts, self._split(payload, n), pieces, strict=True):
            part.cut(whole, at, piece)

    def join(self, payloads: Sequence[Bytes], out: Bytes) -> None:
        """Write the cells of all payloads, in order, into one of `size` of their sum."""
        counts = [self.count(p) for p in payloads]
        stacks = zip(*(self._split(p, n) for p, n in zip(payloads, counts, strict=True)), strict=True)
        for part, pieces, whole in zip(self.parts, stacks, self._split(out, sum(counts)), strict=True):
            part.join(pieces, whole)

    def sort(self, payload: Bytes, n: int) -> bool:
        """Put n cells in the order of their positions; False where they lie so already."""
        pieces = zip(self.parts, self._split(payload, n), strict=True)
        return any([part.sort(piece, n) for part, piece in pieces])

    def first_position(self, payload: Bytes) -> int:
        """Where the first cell of a payload lies."""
        return self.parts[0].first_position(payload)

    def count(self, payload: Bytes) -> int:
        """Cells of a payload. Raises ValueError when it is none of this layout."""
        n = _COUNT.unpack_from(payload.data, self.parts[0].head_bytes - _COUNT.size)[0]
        if payload.nbytes != self.size(n):
            raise ValueError(f"{payload.nbytes} bytes are no {n} cells of this layout")
        return int(n)

    def _split(self, payload: Bytes, n: int) -> list[Bytes]:
        """Views of the parts of a payload of n cells."""
        ends = list(itertools.accumulate((part.size(n) for part in self.parts), initial=0))
        return [payload[a:b] for a, b in itertools.pairwise(ends)]


Layout: TypeAlias = SegmentLayout | StackedLayout


def _planes(data: Bytes, n: int, head_bytes: int, cell_bytes: int) -> tuple[tuple[int, int], ...] | None:
    """Rows and widths of keys and values; None unless every byte of `data` is accounted for."""
    at = head_bytes + n * cell_bytes + _KINDS.size
    if data.nbytes < at:
        return None
    (cells,) = _COUNT.unpack_from(data.data, head_bytes - _COUNT.size)
    metadata = data[head_bytes : head_bytes + n * cell_bytes].reshape(n, cell_bytes)
    positions = metadata[:, :4].copy().view(np.int32).ravel()
    transposed, layers = _KINDS.unpack_from(data.data, at - _KINDS.size)
    if cells != n or transposed > 1 or np.any(np.diff(positions) != 1):
        return None
    planes: list[tuple[int, int]] = []
    while at < data.nbytes:
        if data.nbytes - at < _ROWS.size:
            return None
        if transposed and len(planes) >= layers:
            _, width, rows = _COLUMNS.unpack_from(data.data, at)
        else:
            (_, width), rows = _ROWS.unpack_from(data.data, at), 1
        planes.append((rows, width))
        at += _ROWS.size + n * rows * width
    return tuple(planes) if at == data.nbytes and layers <= len(planes) <= 2 * layers else None
