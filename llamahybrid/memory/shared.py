"""SharedContext: the state that the live sequences of one context share.

The library's counters count the tokens of all sequences, its output rows are those of the last batch, and its
buffers are zeroed for all sequences at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import ref

from llama_cpp._internals import LlamaContext

from llamahybrid.capi.calls import NativeContext, Outputs, TokenBatch
from llamahybrid.errors import DecodeError
from llamahybrid.memory.fingerprint import Identity
from llamahybrid.memory.state import OutputRow, SequenceState
from llamahybrid.prompt_cache.base import Bytes, Tokens
from llamahybrid.prompt_cache.ram import new_buffer


class Member(Protocol):
    """A live sequence, as the others of its context see it."""

    native: NativeContext
    state: SequenceState
    identity: Identity
    row: OutputRow

    def lose(self) -> None:
        """Note that its memory was zeroed or changed by others."""

    def empty(self) -> None:
        """Forget everything."""

    def decoded(self, tokens: Sequence[int] | Tokens, outputs: Outputs) -> str | None:
        """Note a decoded batch; return the fault if memory disagrees."""

    def decode_failed(self, code: int) -> None:
        """Note that a decode was refused or failed."""

    def invalidate_tip(self) -> None:
        """Mark the state at the tip as unusable."""


class SharedContext:
    """A context and its live sequences."""

    def __init__(self, ctx: LlamaContext, n_batch: int, slots: int = 1) -> None:
        self.ctx = ctx
        self.slots = slots
        """Number of live sequences."""
        self.batch = TokenBatch(n_batch, sequences=slots > 1)
        """The batch that each decode fills."""
        self.counters: tuple[float, ...] = ()
        """The library's counters after our last operation (see `touched_outside`)."""
        self.clearing: Callable[[], object] = lambda: None
        """Called before the buffers are zeroed, to store the other sequences."""
        self._decoding = self._reset_due = False
        self._native = NativeContext(ctx, 0, self.batch)
        self._undo: Bytes = new_buffer(0)
        self._members: list[ref[Member]] = []
        self.recount()

    def join(self, live: Member) -> None:
        """Add a sequence."""
        self._members.append(ref(live))

    @property
    def members(self) -> list[Member]:
        """All sequences."""
        return [live for member in self._members if (live := member()) is not None]

    def undo_buffer(self, n_bytes: int) -> Bytes:
        """Return the buffer for the state before a batch; batches run one at a time."""
        if self._undo.nbytes < n_bytes:
            self._undo = new_buffer(n_bytes)
        return self._undo[:n_bytes]

    def forget_undo(self) -> None:
        """Drop the copied state."""
        self._undo = new_buffer(0)

    # -- decodes by others -----------------------------------------------------------------------

    def touched_outside(self) -> bool:
        """Other code decoded on this context, or reset its counters, since our last operation."""
        return self._native.counters() != self.counters

    def recount(self) -> None:
        """Take over the library's counters after a change of our own."""
        self.counters = self._native.counters()

    def count(self, tokens: int) -> None:
        """Take over the counters after a decode of `tokens`, unless other code decoded more in between."""
        counters = self._native.counters()
        if 0 <= sum(counters[:2]) - sum(self.counters[:2]) <= tokens:
            self.counters = counters

    def reset_counters(self) -> None:
        """Reset the library's counters, from any thread; behind the running batch, whose tokens count."""
        self._reset_due = True
        if not self._decoding:
            self._reset()

    def _reset(self) -> None:
        self._reset_due = False
        known = not self.touched_outside()
        self._native.reset_counters()
        if known:
            self.recount()

    def look(self) -> str | None:
        """Empty lost sequences, all of them after decodes by other code, and return that reason."""
        touched = self.touched_outside()
        if touched:
            self.lose_all()
            self.recount()
        for live in self.members:
            if live.state.is_lost:
                live.empty()
        return "another caller decoded on this context" if touched else None

    def lose_all(self) -> None:
        """Note that the content of the context is unknown."""
        for live in self.members:
            live.lose()

    def clear(self, live: Member) -> None:
        """Zero the buffers for one sequence; the others note that theirs is lost."""
        try:
            self.clearing()
        finally:
            for other in self.members:
                if other is not live:
                    other.lose()
            live.native.clear()

    # -- decodes ---------------------------------------------------------------------------------

    def overwrite_rows(self, lives: Sequence[Member]) -> None:
        """Copy the output rows of all sequences but these, whose batch overwrites them."""
        for live in self.members if len(self._members) > len(lives) else ():
            if live not in lives:
                live.row.keep()
        for live in lives:
            live.row.leave()

    def decode_parts(
        self, parts: Sequence[tuple[Member, Sequence[int] | Tokens, Outputs]]
    ) -> list[str | None]:
        """Append tokens to several sequences in one batch; return the fault of each, or None.

        Raises DecodeError for all of them when the library refuses or fails.
        """
        lives, named, native, count = [], [], [], 0
        for live, tokens, outputs in parts:
            lives.append(live)
            named.append(live.identity.fingerprint)
            native.append((live.native.seq, live.state.n, tokens, outputs))
            count += len(tokens)
        self.overwrite_rows(lives)
        self._decoding = True
        try:
            rows = self._native.decode_parts(native)
        except DecodeError as error:
            for live in lives:
                live.decode_failed(error.code)
            raise
        except BaseException:  # raised by a wrapper of the context's decode
            for live in lives:
                live.invalidate_tip()
            raise
        finally:
            self.count(count)
            self._decoding = False
            if self._reset_due:
                self._reset()
        faults = []
        for (live, tokens, outputs), row, name in zip(parts, rows, named, strict=True):
            faults.append(live.decoded(tokens, outputs))
            if outputs != "none":
                live.row.lies_at(row)
            if name is not live.identity.fingerprint:  # another thread has changed what computes
                live.state.disown()
        return faults
