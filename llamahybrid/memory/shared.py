"""SharedContext: what the live sequences of one context have in common.

Its counters count all their tokens, its output rows are those of the last batch, whoever's that was, and its
buffers are zeroed for all of them or for none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol
from weakref import ref

from llamahybrid.capi.calls import NativeContext, Outputs, TokenBatch
from llamahybrid.errors import DecodeError
from llamahybrid.memory.identity import Identity
from llamahybrid.memory.output_row import OutputRow
from llamahybrid.memory.state import SequenceState
from llamahybrid.prompt_cache.base import Bytes, Tokens
from llamahybrid.prompt_cache.ram import new_buffer

if TYPE_CHECKING:
    from llama_cpp._internals import LlamaContext


class Member(Protocol):
    """A live sequence, as far as the others of its context have to do with it."""

    native: NativeContext
    state: SequenceState
    identity: Identity
    row: OutputRow

    def lose(self) -> None:
        """Its memory was zeroed, or changed: nothing of it is known."""

    def empty(self) -> None:
        """Forget everything."""

    def decoded(self, tokens: Sequence[int] | Tokens, outputs: Outputs) -> str | None:
        """Note a batch that the library says it decoded; the fault if memory disagrees."""

    def decode_failed(self, code: int) -> None:
        """A decode was refused or failed."""

    def invalidate_tip(self) -> None:
        """The state at the tip is not to be used."""


class SharedContext:
    """One context with the live sequences in it."""

    def __init__(self, ctx: LlamaContext, n_batch: int, slots: int = 1) -> None:
        self.slots = slots
        """Live sequences there will be."""
        self.batch = TokenBatch(n_batch, sequences=slots > 1)
        """What each decode is put into."""
        self.counters: tuple[float, ...] = ()
        """The library's, when we looked last (see `touched_outside`)."""
        self.clearing: Callable[[], object] = lambda: None
        """Called before the buffers are zeroed, while the others still hold what they hold."""
        self._native = NativeContext(ctx, 0, self.batch)
        self._undo: Bytes = new_buffer(0)
        self._members: list[ref[Member]] = []
        self.recount()

    def join(self, live: Member) -> None:
        """One more sequence."""
        self._members.append(ref(live))

    @property
    def members(self) -> list[Member]:
        """All sequences."""
        return [live for member in self._members if (live := member()) is not None]

    def undo_buffer(self, n_bytes: int) -> Bytes:
        """Where the state before a batch is kept while that is decoded: one at a time, so one is enough."""
        if self._undo.nbytes < n_bytes:
            self._undo = new_buffer(n_bytes)
        return self._undo[:n_bytes]

    def forget_undo(self) -> None:
        """Leave no copy of a state behind."""
        self._undo = new_buffer(0)

    # -- decodes by others -----------------------------------------------------------------------

    def touched_outside(self) -> bool:
        """Someone decoded on this context, or reset its counters, since our last operation."""
        return self._native.counters() != self.counters

    def recount(self) -> None:
        """Take the library's counters as they are now for ours."""
        self.counters = self._native.counters()

    def count(self, tokens: int) -> None:
        """So many tokens were decoded here, or none. If it was more, others did, too: the next look tells."""
        counters = self._native.counters()
        if 0 <= sum(counters[:2]) - sum(self.counters[:2]) <= tokens:
            self.counters = counters

    def look(self) -> str | None:
        """What is lost is emptied. Why all of it is lost now, if it is.

        Whoever decodes here besides us may do so in any sequence.
        """
        touched = self.touched_outside()
        if touched:
            self.lose_all()
            self.recount()
        for live in self.members:
            if live.state.is_lost:
                live.empty()
        return "another caller decoded on this context" if touched else None

    def lose_all(self) -> None:
        """Nobody knows what the context holds."""
        for live in self.members:
            live.lose()

    def clear(self, live: Member) -> None:
        """Zero the buffers for one sequence; what the others held is gone, and is known to be."""
        try:
            self.clearing()
        finally:
            for other in self.members:
                if other is not live:
                    other.lose()
            live.native.clear()

    # -- decodes ---------------------------------------------------------------------------------

    def overwrite_rows(self, lives: Sequence[Member]) -> None:
        """The output rows are about to become those of these sequences: the others keep a copy of theirs."""
        for live in self.members:
            if any(live is each for each in lives):
                live.row.leave()
            else:
                live.row.keep()

    def decode_parts(
        self, parts: Sequence[tuple[Member, Sequence[int] | Tokens, Outputs]]
    ) -> list[str | None]:
        """Append tokens to each of some sequences in one batch; the fault of each, or None.

        A part with outputs "last" gets its output row. Raises DecodeError when the library refuses or fails,
        for all of them.
        """
        lives = [live for live, _, _ in parts]
        named = [live.identity.fingerprint for live in lives]
        self.overwrite_rows(lives)
        try:
            rows = self._native.decode_parts(
                [(live.native.seq, live.state.n, tokens, outputs) for live, tokens, outputs in parts]
            )
        except DecodeError as error:
            for live in lives:
                live.decode_failed(error.code)
            raise
        except BaseException:  # of whoever wraps the context's decode
            for live in lives:
                live.invalidate_tip()
            raise
        finally:
            self.count(sum(len(tokens) for _, tokens, _ in parts))
        faults = []
        for (live, tokens, outputs), row, name in zip(parts, rows, named, strict=True):
            faults.append(live.decoded(tokens, outputs))
            if outputs != "none":
                live.row.lies_at(row)
            if name is not live.identity.fingerprint:  # another thread has changed what computes
                live.state.disown()
        return faults
