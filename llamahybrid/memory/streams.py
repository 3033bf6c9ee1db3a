"""StreamPager: ranges of a context with a KV stream for each sequence (`kv_unified` False), on stock.

The stock library has no ranges there: copies between streams move whole buffers, and a partial copy ends the
process (src/llama-kv-cache.cpp, seq_cp). So the whole state of a sequence is read and ranges are cut out of
its attention; a load writes a whole state, made of the ranges and of the tokens before them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from llama_cpp import llama_cpp
from llama_cpp._internals import LlamaContext

from llamahybrid.capi.calls import FULL, PARTIAL
from llamahybrid.capi.shim import library
from llamahybrid.memory.paging import STATE_HEAD, Pager
from llamahybrid.memory.segment import SegmentLayout
from llamahybrid.prompt_cache.base import Bytes
from llamahybrid.prompt_cache.ram import new_buffer

_NUMBER = struct.Struct("<I")


class StreamPager(Pager):
    """Ranges of a stream, cut out of the sequence's whole state.

    A state is a head; the number of streams; for each stream the number of its cells, and the cells, which
    only the sequence's own stream has; the bytes of the PARTIAL state without its head
    (src/llama-kv-cache.cpp, state_write). A payload is the part of the sequence's stream.
    """

    moves_cells = False
    reads_whole = True

    def __init__(
        self, ctx: LlamaContext, layout: SegmentLayout, nothing: Bytes, seq: int = 0, window: int = 0
    ) -> None:
        """See `Pager`."""
        super().__init__(ctx, layout, nothing, seq, window)
        self._streams = int(llama_cpp.llama_n_seq_max(ctx.ctx))
        self._keeps = False
        self._kept: Bytes | None = None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """See `Pager.reading`."""
        self._keeps = True
        try:
            yield
        finally:
            self._keeps, self._kept = False, None

    def keep_attention(self, position: int) -> None:
        """Nothing: `append` keeps what lies before the cells that it loads."""

    def append(self, payloads: Sequence[Bytes]) -> bool:
        """Put the cells of payloads, in order, behind the live cells before them; False if that failed.

        The sequence's state besides attention is undefined until it is loaded.
        """
        layout, pieces = self.layout, list(payloads)
        if first := layout.first_position(pieces[0]):
            live = self._attention()
            if live is None or layout.count(live) < first:
                return False
            kept = new_buffer(layout.size(first))
            layout.part(live, 0, first, kept)
            pieces.insert(0, kept)
        size = layout.size(sum(map(layout.count, pieces)))
        begin, behind = self._around
        rest = self._nothing[STATE_HEAD:]
        state = new_buffer(begin + size + behind + rest.nbytes)
        state[:begin] = 0
        state[:STATE_HEAD] = self._nothing[:STATE_HEAD]
        _NUMBER.pack_into(state.data, STATE_HEAD, self._streams)
        layout.join(pieces, state[begin : begin + size])
        state[begin + size : begin + size + behind] = 0
        state[begin + size + behind :] = rest
        return library().load_state(self._ctx.ctx, state, self._seq, FULL)

    def learn(self, start: int, end: int) -> SegmentLayout | None:
        """See `Pager.learn`: sequence 0 holds [0, n) with n >= `end`."""
        attention = self._read_attention()
        if attention is None or attention.nbytes < _NUMBER.size:
            return None
        (n,) = _NUMBER.unpack_from(attention.data)
        return SegmentLayout.learn(attention, n, _NUMBER.size, 0)

    def _read(self, start: int, end: int, buffer: Callable[[int], Bytes]) -> Bytes | None:
        live = self._attention()
        if live is None or self.layout.count(live) < end:
            return None
        payload = buffer(self.layout.size(end - start))
        self.layout.part(live, start, end, payload)
        return payload

    def _attention(self) -> Bytes | None:
        """Return a payload of all tokens of the sequence; None if the read failed or tokens are missing."""
        if self._kept is not None:
            return self._kept
        attention = self._read_attention()
        if attention is None:
            return None
        try:
            self.layout.sort(attention, self.layout.count(attention))
            if not self.layout.begins(attention):
                return None
        except ValueError:
            return None
        self._kept = attention if self._keeps else None
        return attention

    def _read_attention(self) -> Bytes | None:
        """Return the part of the state for the sequence's stream, unsorted."""
        native, ctx = library(), self._ctx.ctx
        full = native.state_size(ctx, self._seq, FULL)
        rest = STATE_HEAD if self._attention_is_all else native.state_size(ctx, self._seq, PARTIAL)
        state = new_buffer(full)
        if not native.save_state(ctx, state, self._seq, FULL) or getattr(self._ctx, "lost", False):
            return None
        begin, behind = self._around
        return state[begin : STATE_HEAD + full - rest - behind]

    @property
    def _around(self) -> tuple[int, int]:
        """Bytes of a state before and behind those of the sequence's stream."""
        numbers = 1 + self._seq, self._streams - 1 - self._seq
        return STATE_HEAD + _NUMBER.size * numbers[0], _NUMBER.size * numbers[1]
