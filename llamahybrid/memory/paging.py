"""Pagers: attention KV of token ranges, saved from a live sequence and loaded into it.

The stock library moves ranges through a scratch sequence, the context's last one. With `kv_unified` both
sequences share cells, so nothing is copied inside the context; the PARTIAL state of an empty sequence removes
the recurrent part. The patched library reads and writes ranges itself.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from llama_cpp import llama_cpp
from llama_cpp._internals import LlamaContext

from llamahybrid.capi.calls import FULL, PARTIAL
from llamahybrid.capi.shim import library, range_function
from llamahybrid.memory.segment import SegmentLayout
from llamahybrid.prompt_cache.base import Bytes
from llamahybrid.prompt_cache.envelope import HEADER_BYTES
from llamahybrid.prompt_cache.ram import mapped_buffer, new_buffer

logger = logging.getLogger("llamahybrid")

SMALL_BYTES = 4 << 20
"""Size from which segments are loaded one by one; smaller ones are joined before."""

JOINED_BYTES = 8 << 20
"""Size of the buffer for joined segments, kept outside of any budget. A larger one no longer fits the CPU's
cache, and loading takes longer."""


class Pager:
    """Saves and appends ranges of attention KV of one sequence."""

    moves_cells = True
    """Saving changes memory on the way, which must be verified afterwards."""
    reads_whole = False
    """Saving a range takes as long as saving all of the sequence."""

    def __init__(
        self, ctx: LlamaContext, layout: SegmentLayout, nothing: Bytes, seq: int = 0, window: int = 0
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
        self._attention_is_all = nothing.nbytes == STATE_HEAD
        self._room: Bytes | None = None

    @staticmethod
    def available() -> bool:
        """The loaded library has the functions of this pager."""
        return True

    def of(self, seq: int) -> Pager:
        """The same for another sequence of the context."""
        return type(self)(self._ctx, self.layout, self._nothing, seq, self._window)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around several calls of `save` with no other change of the sequence between them."""
        yield

    def learn(self, start: int, end: int) -> SegmentLayout | None:
        """Return the layout of payloads, from that of the live range [start, end); None if it is unknown."""
        payload = self._read(start, end, lambda n: np.empty(n, np.uint8))
        return None if payload is None else self._layout_of(payload, start, end)

    def _layout_of(self, payload: Bytes, start: int, end: int) -> SegmentLayout | None:
        return SegmentLayout.learn(payload, end - start, _SCRATCH_HEAD, self._nothing.nbytes - STATE_HEAD)

    def holds(self, end: int) -> bool:
        """No cell of [0, end) is missing that positions and the size of the state would not show."""
        return True

    def save(self, start: int, end: int, buffer: Callable[[int], Bytes | None]) -> Bytes | None:
        """Return a record with the payload of [start, end) of the live sequence, unsealed; None on failure.

        `buffer(n)` gives a uint8 array of exactly n bytes to fill, or None.
        """
        record = buffer(HEADER_BYTES + self.layout.size(end - start))
        if record is None:
            return None
        payload = self._read(start, end, lambda _: record[HEADER_BYTES:])
        if payload is None or getattr(self._ctx, "lost", False):
            return None
        self.layout.sort(payload, end - start)
        return record

    def keep_attention(self, position: int) -> None:
        """Cut the live sequence's attention to [0, position); its other state is undefined until loaded.

        The library refuses a plain cut of a recurrent state or behind a sliding window, so the kept cells go
        through the scratch sequence.
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
        """Group payloads into runs, each loaded at once.

        Each load searches all cells (0.8 ms with 8,000 of them), so small payloads are joined. Transposed
        values cost a small copy for each row of each load, so all such payloads are joined.
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
            if not library().load_state(self._ctx.ctx, payload, self._scratch, FULL):
                return False
            llama_cpp.llama_memory_seq_cp(self._ctx.memory, self._scratch, self._seq, -1, -1)
        finally:
            cleared = self._clear_scratch()
        return cleared

    def _joined(self, payloads: Sequence[Bytes]) -> Bytes:
        if len(payloads) == 1:
            return payloads[0]
        if self._room is None:
            self._room = mapped_buffer(JOINED_BYTES)
        out = self._room[: self.layout.size(sum(map(self.layout.count, payloads)))]
        self.layout.join(payloads, out)
        return out

    def _read(self, start: int, end: int, buffer: Callable[[int], Bytes]) -> Bytes | None:
        """Return the payload of [start, end) in an array that `buffer(n)` gives; None on failure."""
        native, ctx = library(), self._ctx.ctx
        llama_cpp.llama_memory_seq_cp(self._ctx.memory, self._seq, self._scratch, start, end)
        try:
            rest = STATE_HEAD
            if not self._attention_is_all:
                # This drops the recurrent part before it is copied. Window cells stay: see below.
                native.load_state(ctx, self._nothing, self._scratch, PARTIAL)
                rest = native.state_size(ctx, self._scratch, PARTIAL)
            whole = native.state_size(ctx, self._scratch, FULL)
            payload = buffer(whole - rest + self._nothing.nbytes)
            if payload.nbytes != whole - rest + self._nothing.nbytes:
                return None
            state = payload if whole == payload.nbytes else new_buffer(whole)
            written = native.save_state(ctx, state, self._scratch, FULL)
        finally:
            cleared = self._clear_scratch()
        if not cleared or not written:
            return None
        if state is not payload:
            attention = whole - rest + STATE_HEAD
            payload[:attention] = state[:attention]
            payload[attention:] = self._nothing[STATE_HEAD:]
        return payload

    def _clear_scratch(self) -> bool:
        memory = self._ctx.memory
        removed = bool(llama_cpp.llama_memory_seq_rm(memory, self._scratch, -1, -1))
        return removed and llama_cpp.llama_memory_seq_pos_max(memory, self._scratch) == -1


class WindowPager(Pager):
    """Ranges of full-size sliding windows, whose layers have a cache of their own.

    The library writes only the cells that a sequence's next token attends to (src/llama-kv-cache.cpp,
    state_write), which is all of a scratch sequence no longer than the window. So a range is read in pieces,
    which begin at multiples of the window, like the chunks of chunked attention.
    """

    def _layout_of(self, payload: Bytes, start: int, end: int) -> SegmentLayout | None:
        windows = self._piece_bytes(start, end, PARTIAL) - STATE_HEAD
        base = SegmentLayout.learn(payload[: payload.nbytes - windows], end - start, _SCRATCH_HEAD, 0)
        window = SegmentLayout.learn(payload[payload.nbytes - windows :], end - start, _COUNTS_BYTES, 0)
        return None if base is None or window is None else base.then(window)

    def holds(self, end: int) -> bool:
        """See `Pager.holds`: neither shows cells behind the window."""
        return all(self._piece_bytes(a, b) == self.layout.size(b - a) for a, b in self._pieces(0, end))

    def _read(self, start: int, end: int, buffer: Callable[[int], Bytes]) -> Bytes | None:
        pieces = self._pieces(start, end)
        if len(pieces) == 1:
            return super()._read(start, end, buffer)
        read = [super(WindowPager, self)._read(a, b, new_buffer) for a, b in pieces]
        payloads = [piece for piece in read if piece is not None]
        if [p.nbytes for p in payloads] != [self.layout.size(b - a) for a, b in pieces]:
            return None
        payload = buffer(self.layout.size(end - start))
        self.layout.join(payloads, payload)
        return payload

    def _pieces(self, start: int, end: int) -> list[tuple[int, int]]:
        borders = [start, *range(start - start % self._window + self._window, end, self._window), end]
        return list(itertools.pairwise(borders))

    def _piece_bytes(self, start: int, end: int, flags: int = FULL) -> int:
        llama_cpp.llama_memory_seq_cp(self._ctx.memory, self._seq, self._scratch, start, end)
        try:
            return library().state_size(self._ctx.ctx, self._scratch, flags)
        finally:
            self._clear_scratch()


class RangePager(Pager):
    """Ranges by the patched library's functions for them (patches/0015-attention-ranges.patch).

    Loaded ranges replace the cells at their positions, and a cut behind them follows.
    """

    moves_cells = False

    @staticmethod
    def available() -> bool:
        """See `Pager.available`."""
        return "llama_state_seq_get_data_range" in library().optional

    def _layout_of(self, payload: Bytes, start: int, end: int) -> SegmentLayout | None:
        return SegmentLayout.learn(payload, end - start, _RANGE_HEAD, 0)

    def keep_attention(self, position: int) -> None:
        """Nothing."""

    def _read(self, start: int, end: int, buffer: Callable[[int], Bytes]) -> Bytes | None:
        size = range_function("get_size")(self._ctx.ctx, self._seq, start, end)
        if not size:
            return None
        payload = buffer(size)
        if payload.nbytes != size:
            return None
        return payload if library().save_range(self._ctx.ctx, payload, self._seq, start, end) else None

    def _write(self, payload: Bytes) -> bool:
        first = self.layout.first_position(payload)
        end = first + self.layout.count(payload)
        write = range_function("set_data", ctypes.c_void_p, ctypes.c_size_t)
        read = write(self._ctx.ctx, payload.ctypes.data, payload.nbytes, self._seq, first, end)
        return bool(read == payload.nbytes)


def learn_pager(
    kinds: Sequence[type[Pager]], ctx: LlamaContext, start: int, end: int, *, whole: bool, window: int
) -> Pager | None:
    """Return a pager of the first kind that works in a context whose sequence 0 holds [start, end).

    `whole`: of all layers, those with a sliding `window` too; else of those that PARTIAL states leave out.
    The last sequence of the context must be empty. None without a second sequence, with more or less than
    one attention cell for each token, and for an unknown layout.
    """
    native, empty = library(), int(llama_cpp.llama_n_seq_max(ctx.ctx)) - 1
    if empty < 1:
        return None
    nothing = np.empty(native.state_size(ctx.ctx, empty, PARTIAL), np.uint8)
    if not native.save_state(ctx.ctx, nothing, empty, PARTIAL):
        return None
    nothing = nothing[: STATE_HEAD if whole else None]
    for kind in kinds:
        if not kind.available():
            continue
        layout = kind(ctx, SegmentLayout((), ()), nothing, window=window).learn(start, end)
        if layout is not None:
            return kind(ctx, layout, nothing, window=window)
    logger.info("attention of this context cannot be stored: the library writes it in no layout we know")
    return None


STATE_HEAD = 8  # magic and sequence id, in front of every state (src/llama-context.cpp, state_seq_get_data)
_SCRATCH_HEAD = STATE_HEAD + 8  # and the numbers of streams and cells
_COUNTS_BYTES = 8  # the numbers of streams and cells alone, in front of the second cache
_RANGE_HEAD = 8  # magic and the number of cells
