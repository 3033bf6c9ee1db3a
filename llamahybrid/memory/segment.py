"""Segments: attention KV of a token range in the library's format, and its sealed record.

A payload starts with a head, which ends with the number of cells. Then come the cells' metadata, the keys and
values of each layer, and the empty recurrent or window part of a scratch sequence (src/llama-kv-cache.cpp,
state_write_meta and state_write_data). Memory with sliding windows keeps its layers in two caches and writes
one after the other (src/llama-kv-cache-iswa.cpp, state_write). `SegmentLayout.learn` reads the layout from
one payload; all payloads of a context have the same.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llamahybrid.errors import SnapshotError
from llamahybrid.prompt_cache.base import Bytes, Range, Segment, Tokens
from llamahybrid.prompt_cache.envelope import HEADER_BYTES, header_of, open_sealed, seal
from llamahybrid.prompt_cache.ram import new_buffer

_COUNT = struct.Struct("<I")
_KINDS = struct.Struct("<II")  # values transposed, layers
_ROWS = struct.Struct("<iQ")  # type, bytes of a cell's row
_COLUMNS = struct.Struct("<iII")  # type, bytes of an element, elements of a cell

CELL_BYTES = (12, 20, 24, 28)
"""Possible sizes of a cell's metadata: position, number of sequences, sequence id, M-RoPE fields."""


@dataclass(frozen=True)
class SegmentLayout:
    """Places of the cells in a payload of n cells: fixed bytes and planes of cells in turn."""

    fixed: tuple[int, ...]
    """Bytes before each plane, and behind the last one."""
    planes: tuple[tuple[int, int], ...]
    """(rows, bytes of a cell in a row): metadata, keys and values, as they follow each other."""
    caches: tuple[int, ...] = (0,)
    """Indices of the metadata planes, one for each cache; the fixed bytes before them end with n."""

    @classmethod
    def learn(cls, payload: Bytes, n: int, head_bytes: int, rest_bytes: int) -> SegmentLayout | None:
        """Return the layout of a payload of n cells at consecutive positions; None if it is unknown."""
        for cell_bytes in CELL_BYTES:
            planes = _planes(payload[: payload.nbytes - rest_bytes], n, head_bytes, cell_bytes)
            if planes is not None:
                fixed = [head_bytes, _KINDS.size, *[0] * len(planes)]
                for index in range(len(planes)):
                    fixed[1 + index] += _ROWS.size
                fixed[-1] += rest_bytes
                return cls(tuple(fixed), ((1, cell_bytes), *planes))
        return None

    def then(self, other: SegmentLayout) -> SegmentLayout:
        """Return the layout of payloads of this one, each followed by one of the other with as many cells."""
        fixed = (*self.fixed[:-1], self.fixed[-1] + other.fixed[0], *other.fixed[1:])
        caches = (*self.caches, *(len(self.planes) + index for index in other.caches))
        return SegmentLayout(fixed, self.planes + other.planes, caches)

    @property
    def transposed(self) -> bool:
        """Values of one cell lie apart, as they do without flash attention."""
        return any(rows > 1 for rows, _ in self.planes)

    def size(self, n: int) -> int:
        """Bytes of a payload of n cells."""
        return sum(self.fixed) + n * sum(rows * width for rows, width in self.planes)

    def part(self, payload: Bytes, start: int, end: int, out: Bytes) -> None:
        """Write cells [start, end) of a payload as a payload, filling `out`."""
        n = self.count(payload)
        self._frame(payload, n, out, end - start)
        for whole, part in zip(self._cells(payload, n), self._cells(out, end - start), strict=True):
            part[:] = whole[:, start:end]

    def join(self, payloads: Sequence[Bytes], out: Bytes) -> None:
        """Write the cells of all payloads, in order, as one payload, filling `out`."""
        counts = [self.count(p) for p in payloads]
        total = sum(counts)
        self._frame(payloads[0], counts[0], out, total)
        starts = itertools.accumulate(counts, initial=0)
        for payload, n, start in zip(payloads, counts, starts, strict=False):
            for part, whole in zip(self._cells(payload, n), self._cells(out, total), strict=True):
                whole[:, start : start + n] = part

    def sort(self, payload: Bytes, n: int) -> None:
        """Sort n cells by position, which sequences that use a context in turn leave unordered."""
        planes = list(self._cells(payload, n))
        for first, last in itertools.pairwise((*self.caches, len(planes))):
            positions = _positions(planes[first])
            if not np.all(np.diff(positions) > 0):
                order = np.argsort(positions, kind="stable")
                for cells in planes[first:last]:
                    cells[:] = cells[:, order]

    def begins(self, payload: Bytes) -> bool:
        """The cells of a payload have positions 0, 1, 2 and so on, in this order."""
        n = self.count(payload)
        return bool(np.array_equal(_positions(next(self._cells(payload, n))), np.arange(n)))

    def first_position(self, payload: Bytes) -> int:
        """Position of the first cell of a payload."""
        return int(payload[self.fixed[0] : self.fixed[0] + 4].view(np.int32)[0])

    def count(self, payload: Bytes) -> int:
        """Cells of a payload. Raises ValueError for bytes of another layout."""
        (n,) = _COUNT.unpack_from(payload.data, self.fixed[0] - _COUNT.size)
        if payload.nbytes != self.size(n):
            raise ValueError(f"{payload.nbytes} bytes are no {n} cells of this layout")
        return int(n)

    def _frame(self, source: Bytes, n: int, out: Bytes, count: int) -> None:
        """Copy everything but the cells from `source`, of n cells, to `out`, of `count` cells."""
        for index, ((a, b), (c, d)) in enumerate(zip(self._gaps(n), self._gaps(count), strict=True)):
            out[c:d] = source[a:b]
            if index in self.caches:
                _COUNT.pack_into(out.data, d - _COUNT.size, count)

    def _gaps(self, n: int) -> Iterator[tuple[int, int]]:
        """The byte ranges around the planes of a payload of n cells."""
        at = 0
        for fixed, (rows, width) in zip(self.fixed, (*self.planes, (0, 0)), strict=True):
            yield at, at + fixed
            at += fixed + n * rows * width

    def _cells(self, payload: Bytes, n: int) -> Iterator[npt.NDArray[np.uint8]]:
        """Views of shape (rows, n, bytes), one for each plane."""
        for (_, start), (rows, width) in zip(self._gaps(n), self.planes, strict=False):
            yield payload[start : start + n * rows * width].reshape(rows, n, width)


def _positions(metadata: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
    """Positions of the cells in a metadata plane, shape (1, n, bytes): shape (n,)."""
    positions: npt.NDArray[np.int32] = metadata[0, :, :4].copy().view(np.int32).ravel()
    return positions


def _planes(data: Bytes, n: int, head_bytes: int, cell_bytes: int) -> tuple[tuple[int, int], ...] | None:
    """Rows and widths of keys and values; None unless every byte of `data` is accounted for."""
    at = head_bytes + n * cell_bytes + _KINDS.size
    if data.nbytes < at:
        return None
    (cells,) = _COUNT.unpack_from(data.data, head_bytes - _COUNT.size)
    positions = _positions(data[head_bytes : head_bytes + n * cell_bytes].reshape(1, n, cell_bytes))
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


# -- sealed ------------------------------------------------------------------------------------------


def seal_segment(
    record: Bytes, namespace: str, path: Tokens, start: int, split: Splitter | None = None
) -> Segment:
    """Seal a record whose payload is in place; `path`: the tokens [0, end) that it belongs to."""
    seal(record, namespace=namespace, tokens=path, start=start)
    return Segment(start, len(path), record, split)


def open_segment(segment: Segment, namespace: str, path: Tokens) -> Bytes:
    """Return the payload of a segment of `path`, its tokens [0, end).

    Raises SnapshotError, which names the segment, as `open_sealed`.
    """
    try:
        return open_sealed(segment.record, namespace=namespace, tokens=path, start=segment.start)
    except SnapshotError as error:
        error.segment = segment
        raise


class Splitter:
    """Cuts and joins sealed segments of one layout, without a context."""

    def __init__(self, layout: SegmentLayout) -> None:
        self._layout = layout

    def parts(self, segment: Segment, path: Tokens, ranges: Iterable[Range]) -> Iterator[Segment]:
        """Yield parts of a segment of `path`, the tokens before its end.

        Raises SnapshotError when the segment is damaged.
        """
        name = header_of(segment.record[:HEADER_BYTES].tobytes()).namespace
        payload = open_segment(segment, name, path)
        for start, end in ranges:
            record = new_buffer(HEADER_BYTES + self._layout.size(end - start))
            self._layout.part(payload, start - segment.start, end - segment.start, record[HEADER_BYTES:])
            yield seal_segment(record, name, path[:end], start, self)

    def join(self, segments: Sequence[Segment], path: Tokens) -> Segment:
        """Return one segment for adjoining ones of `path`, the tokens before the end of the last one.

        Raises SnapshotError when one of them is damaged.
        """
        name = header_of(segments[0].record[:HEADER_BYTES].tobytes()).namespace
        payloads = [open_segment(segment, name, path[: segment.end]) for segment in segments]
        record = new_buffer(HEADER_BYTES + self._layout.size(len(path) - segments[0].start))
        self._layout.join(payloads, record[HEADER_BYTES:])
        return seal_segment(record, name, path, segments[0].start, self)
