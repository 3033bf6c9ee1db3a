"""Attention KV out of the live sequence and back into it.

On the stock library by way of a scratch sequence, the context's last one, given `kv_unified`: cells are
shared by both, so that nothing is copied inside the context. A recurrent part is dropped by loading
the PARTIAL state of an empty sequence. The patched library reads and writes ranges itself.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from llama_cpp import llama_cpp

from llamahybrid.capi.calls import FULL, PARTIAL
from llamahybrid.capi.shim import library, range_function
from llamahybrid.errors import SnapshotError
from llamahybrid.memory.segment import Layout, SegmentLayout, StackedLayout
from llamahybrid.prompt_cache.base import Bytes, Segment, Tokens
from llamahybrid.prompt_cache.envelope import HEADER_BYTES, header_of, open_sealed, seal
from llamahybrid.prompt_cache.ram import new_buffer

if TYPE_CHECKING:
    from llama_cpp._internals import LlamaContext

logger = logging.getLogger("llamahybrid")

SMALL_BYTES = 4 << 20
"""Segments below this are joined before they are loaded."""

JOINED_BYTES = 8 << 20
"""What is joined at most: the room for it is kept, beside any budget. More at once takes longer: it no longer
fits the cache."""


class Splitter:
    """Cuts sealed segments of one kind of context in two, each of the same name; needs no context."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def __call__(self, segment: Segment, path: Tokens, at: int) -> tuple[Segment, Segment]:
        """The parts [start, at) and [at, end) of a segment of `path`, its own tokens [0, end).

        Raises SnapshotError when the segment is damaged.
        """
        name = header_of(segment.record[:HEADER_BYTES].tobytes()).namespace
        payload = open_segment(segment, name, path)
        counts = at - segment.start, segment.end - at
        records = tuple(new_buffer(HEADER_BYTES + self._layout.size(n)) for n in counts)
        first, second = records
        self._layout.cut(payload, counts[0], (first[HEADER_BYTES:], second[HEADER_BYTES:]))
        return (
            seal_segment(first, name, path[:at], segment.start),
            seal_segment(second, name, path, at),
        )


def seal_segment(
    record: Bytes, namespace: str, path: Tokens, start: int, checksum: int | None = None
) -> Segment:
    """Close a record whose payload is in place; `path`: the tokens [0, end) it belongs to.

    `checksum` as in `envelope.seal`.
    """
    seal(record, namespace=namespace, tokens=path, start=start, checksum=checksum)
    return Segment(start, len(path), record)


def open_segment(segment: Segment, namespace: str, path: Tokens) -> Bytes:
    """The payload of a segment of `path`, its tokens [0, end).

    Raises SnapshotError, which names the segment, as `open_sealed`.
    """
    try:
        return open_sealed(segment.record, namespace=namespace, tokens=path, start=segment.start)
    except SnapshotError as error:
        error.segment = segment
        raise


class Pager:
    """Saves and appends ranges of attention KV of one sequence."""

    moves_cells = True
    """Saving changes memory on its way: it has to be looked at afterwards."""
    reads_whole = False
    """Saving a range takes as long as saving all of it."""

    def __init__(
        self, ctx: LlamaContext, layout: Layout, nothing: Bytes, seq: int = 0, window: int = 0
    ) -> None:
        """`nothing`: the PARTIAL state of an empty sequence; its head alone where attention is all.

        `window`: tokens of its sliding window.
        """
        self._ctx = ctx
        self._seq = seq
        self._window = window
        self._scratch = int(llama_cpp.llama_n_seq_max(ctx.ctx)) - 1
        self.layout = layout
        self._nothing = nothing
        self._room: Bytes | None = None

    def of(self, seq: int) -> Pager:
        """The same for another sequence of the context."""
        return type(self)(self._ctx, self.layout, self._nothing, seq, self._window)

    @staticmethod
    def learn(
        ctx: LlamaContext, start: int, end: int, *, whole: bool = False, window: int = 0
    ) -> Pager | None:
        """A pager for a context whose live sequence holds [start, end); None where ranges cannot be had.

        `whole`: of all layers, those with a sliding `window` too; else what PARTIAL snapshots leave out.
        That is so without a second sequence, with anything but one attention cell for each token, and
        where a range does not come back as it was.
        """
        kinds: list[type[Pager]] = [WholePager if whole else Pager]
        if whole and window:
            kinds = [WindowPager]
        elif RangePager.available():
            kinds.insert(0, RangePager)
        return learn(kinds, ctx, start, end, whole=whole, window=window)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Nothing of the live sequence is changed inside, but what `save` does: it is read once."""
        yield

    def _learn(self, start: int, end: int) -> Layout | None:
        """The layout of payloads here; None where it is not as we know it."""
        read = self._read(start, end, lambda n: np.empty(n, np.uint8))
        return None if read is None else self._layout_of(read[0], start, end)

    def _layout_of(self, payload: Bytes, start: int, end: int) -> Layout | None:
        return SegmentLayout.learn(payload, end - start, _SCRATCH_HEAD, self._nothing.nbytes - STATE_HEAD)

    def holds(self, end: int) -> bool:
        """Nothing of [0, end) is missing that positions and the size of the state would not show."""
        return True

    def save(
        self, start: int, end: int, buffer: Callable[[int], Bytes | None]
    ) -> tuple[Bytes, int | None] | None:
        """A record with the payload of [start, end) of the live sequence, to be sealed; None if that failed.

        And the payload's checksum, where it came with it. `buffer(n)` gives a uint8 array of exactly n bytes
        to fill, or None.
        """
        record = buffer(HEADER_BYTES + self.layout.size(end - start))
        if record is None:
            return None
        read = self._read(start, end, lambda _: record[HEADER_BYTES:])
        if read is None or getattr(self._ctx, "lost", False):
            return None
        moved = self.layout.sort(record[HEADER_BYTES:], end - start)  # its checksum is another one then
        return record, None if moved else read[1]

    def keep_attention(self, position: int) -> None:
        """Cut the live sequence's attention to [0, position); what else it holds is undefined until loaded.

        A plain cut is refused where a recurrent state or a sliding window forbids it, so the cells that stay
        wait in the scratch sequence.
        """
        memory = self._ctx.memory
        if position:
            llama_cpp.llama_memory_seq_cp(memory, self._seq, self._scratch, 0, position)
        llama_cpp.llama_memory_seq_rm(memory, self._seq, -1, -1)
        if position:
            llama_cpp.llama_memory_seq_cp(memory, self._scratch, self._seq, -1, -1)
            llama_cpp.llama_memory_seq_rm(memory, self._scratch, -1, -1)

    def append(self, payloads: Sequence[Bytes]) -> bool:
        """Put the cells of payloads, in order, behind those of the live sequence; False if refused."""
        return all(self._write(self._joined(run)) for run in self._runs(payloads))

    def _runs(self, payloads: Sequence[Bytes]) -> Iterator[list[Bytes]]:
        """Payloads that are loaded as one.

        Small ones are: each would cost a look at all cells (0.8 ms with 8,000 of them). So are all where
        values lie transposed: each would cost a small copy for each row.
        """
        run: list[Bytes] = []
        for payload in payloads:
            small = self.layout.transposed or payload.nbytes < SMALL_BYTES
            if run and not (small and sum(p.nbytes for p in run) + payload.nbytes <= JOINED_BYTES):
                yield run
                run = []
            run.append(payload)
            if not small:
                yield run
                run = []
        if run:
            yield run

    def _write(self, payload: Bytes) -> bool:
        try:
            if not set_state(self._ctx, payload, self._scratch, FULL):
                return False
            llama_cpp.llama_memory_seq_cp(self._ctx.memory, self._scratch, self._seq, -1, -1)
        finally:
            cleared = self._clear_scratch()
        return cleared

    def _joined(self, payloads: Sequence[Bytes]) -> Bytes:
        if len(payloads) == 1:
            return payloads[0]
        if self._room is None:
            self._room = new_buffer(JOINED_BYTES, filled=False)
        out = self._room[: self.layout.size(sum(map(self.layout.count, payloads)))]
        self.layout.join(payloads, out)
        return out

    def _read(self, start: int, end: int, buffer: Callable[[int], Bytes]) -> tuple[Bytes, int | None] | None:
        """The payload of [start, end), and its xxh3-64 where that came with it."""
        llama_cpp.llama_memory_seq_cp(self._ctx.memory, self._seq, self._scratch, start, end)
        try:
            # The recurrent part goes without having been copied; window cells stay, and are left out below.
            set_state(self._ctx, self._nothing, self._scratch, PARTIAL)
            whole, rest = (state_size(self._ctx, self._scratch, flags) for flags in (FULL, PARTIAL))
            payload = buffer(whole - rest + self._nothing.nbytes)
            if payload.nbytes != whole - rest + self._nothing.nbytes:
                return None
            state = payload if whole == payload.nbytes else new_buffer(whole)
            written = get_state(self._ctx, state, self._scratch, FULL)
        finally:
            cleared = self._clear_scratch()
        if not cleared or written != whole:
            return None
        if state is not payload:
            attention = whole - rest + STATE_HEAD
            payload[:attention] = state[:attention]
            payload[attention:] = self._nothing[STATE_HEAD:]
        return payload, None

    def _clear_scratch(self) -> bool:
        memory = self._ctx.memory
        removed = bool(llama_cpp.llama_memory_seq_rm(memory, self._scratch, -1, -1))
        return removed and llama_cpp.llama_memory_seq_pos_max(memory, self._scratch) == -1


class WholePager(Pager):
    """The same where attention is all there is: nothing else rides along."""

    def _layout_of(self, payload: Bytes, start: int, end: int) -> Layout | None:
        return SegmentLayout.learn(payload, end - start, _SCRATCH_HEAD, 0)

    def _read(self, start: int, end: int, buffer: Callable[[int], Bytes]) -> tuple[Bytes, int | None] | None:
        llama_cpp.llama_memory_seq_cp(self._ctx.memory, self._seq, self._scratch, start, end)
        try:
            payload = buffer(state_size(self._ctx, self._scratch, FULL))
            written = get_state(self._ctx, payload, self._scratch, FULL)
        finally:
            cleared = self._clear_scratch()
        return (payload, None) if cleared and written == payload.nbytes else None


class WindowPager(WholePager):
    """The same for full-size sliding windows, whose layers are kept apart from the others.

    The library writes only what a sequence's next token attends to (src/llama-kv-cache.cpp, state_write). Of
    a scratch sequence that holds no more than one window that is everything, so a range is read in pieces.
    They begin at multiples of the window, as the chunks of chunked attention do.
    """

    def _layout_of(self, payload: Bytes, start: int, end: int) -> Layout | None:
        windows = self._piece_bytes(start, end, PARTIAL) - STATE_HEAD
        return StackedLayout.learn(payload, end - start, _SCRATCH_HEAD, payload.nbytes - windows)

    def holds(self, end: int) -> bool:
        """See `Pager.holds`: cells behind the window show in neither."""
        return all(self._piece_bytes(a, b) == self.layout.size(b - a) for a, b in self._pieces(0, end))

    def _read(self, start: int, end: int, buffer: Callable[[int], Bytes]) -> tuple[Bytes, int | None] | None:
        pieces = self._pieces(start, end)
        if len(pieces) == 1:
            return super()._read(start, end, buffer)
        read = [super(WindowPager, self)._read(a, b, new_buffer) for a, b in pieces]
        payloads = [piece[0] for piece in read if piece is not None]
        if [p.nbytes for p in payloads] != [self.layout.size(b - a) for a, b in pieces]:
            return None
        payload = buffer(self.layout.size(end - start))
        self.layout.join(payloads, payload)
        return payload, None

    def _pieces(self, start: int, end: int) -> list[tuple[int, int]]:
        borders = [start, *range(start - start % self._window + self._window, end, self._window), end]
        return list(itertools.pairwise(borders))

    def _piece_bytes(self, start: int, end: int, flags: int = FULL) -> int:
        llama_cpp.llama_memory_seq_cp(self._ctx.memory, self._seq, self._scratch, start, end)
        try:
            return state_size(self._ctx, self._scratch, flags)
        finally:
            self._clear_scratch()


class RangePager(Pager):
    """The same through the patched library's functions for ranges (patches/0015-attention-ranges.patch)."""

    moves_cells = False

    @staticmethod
    def available() -> bool:
        """The loaded library has these functions."""
        return "llama_state_seq_get_data_range" in library().optional

    def _layout_of(self, payload: Bytes, start: int, end: int) -> Layout | None:
        return SegmentLayout.learn(payload, end - start, _RANGE_HEAD, 0)

    def _read(self, start: int, end: int, buffer: Callable[[int], Bytes]) -> tuple[Bytes, int | None] | None:
        size = range_function("get_size")(self._ctx.ctx, self._seq, start, end)
        if not size:
            return None
        payload = buffer(size)
        if payload.nbytes != size:
            return None
        checksum = library().save_range(self._ctx.ctx, payload, self._seq, start, end)
        return None if checksum is None else (payload, checksum)

    def _write(self, payload: Bytes) -> bool:
        first = self.layout.first_position(payload)
        end = first + self.layout.count(payload)
        write = range_function("set_data", ctypes.c_void_p, ctypes.c_size_t)
        read = write(self._ctx.ctx, payload.ctypes.data, payload.nbytes, self._seq, first, end)
        return bool(read == payload.nbytes)


def learn(
    kinds: Sequence[type[Pager]], ctx: LlamaContext, start: int, end: int, *, whole: bool, window: int = 0
) -> Pager | None:
    """The first of these kinds of pagers that can be had, as `Pager.learn`.

    The last sequence of the context holds nothing.
    """
    empty = int(llama_cpp.llama_n_seq_max(ctx.ctx)) - 1
    if empty < 1:
        return None
    nothing = np.empty(state_size(ctx, empty, PARTIAL), np.uint8)
    if get_state(ctx, nothing, empty, PARTIAL) != nothing.nbytes:
        return None
    nothing = nothing[: STATE_HEAD if whole else None]
    for kind in kinds:
        layout = kind(ctx, SegmentLayout(0, 0, (), 0), nothing, window=window)._learn(start, end)
        if layout is not None:
            return kind(ctx, layout, nothing, window=window)
    logger.info("attention of this context cannot be stored: the library writes it in no layout we know")
    return None


STATE_HEAD = 8  # magic and sequence id, in front of every state (src/llama-context.cpp, state_seq_get_data)
_SCRATCH_HEAD = STATE_HEAD + 8  # and the numbers of streams and cells
_RANGE_HEAD = 8  # magic and the number of cells


def state_size(ctx: LlamaContext, seq: int, flags: int) -> int:
    """Bytes of a sequence's state."""
    return int(llama_cpp.llama_state_seq_get_size_ext(ctx.ctx, seq, flags))


def get_state(ctx: LlamaContext, out: Bytes, seq: int, flags: int) -> int:
    """Write a sequence's state into `out`; bytes written."""
    return int(llama_cpp.llama_state_seq_get_data_ext(ctx.ctx, _pointer(out), out.nbytes, seq, flags))


def set_state(ctx: LlamaContext, data: Bytes, seq: int, flags: int) -> bool:
    """Load a sequence's state; False where it was refused."""
    return library().load_state(ctx.ctx, data, seq, flags)


def _pointer(array: Bytes) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
