"""SharedContext: what the live sequences of one context have in common.

Its counters count all their tokens, its output rows are those of the last batch, whoever's that was, and its
buffers are zeroed for all of them or for none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import ref

from llamahybrid.capi.calls import LAST_ROW, Outputs, TokenBatch
from llamahybrid.errors import DecodeError
from llamahybrid.prompt_cache.base import Bytes, Tokens
from llamahybrid.prompt_cache.ram import new_buffer

if TYPE_CHECKING:
    from llama_cpp._internals import LlamaContext

    from llamahybrid.memory.output_row import OutputRow
    from llamahybrid.memory.sequence import LiveSequence


class SharedContext:
    """One context with the live sequences in it."""

    def __init__(self, ctx: LlamaContext, n_batch: int, slots: int = 1) -> None:
        self.slots = slots
        """Live sequences there will be."""
        self.batch = TokenBatch(n_batch, sequences=slots > 1)
        """What each decode is put into."""
        self.counters: tuple[float, ...] = ()
        """The library's, when we looked last (see `LiveSequence.touched_outside`)."""
        self.clearing: Callable[[], object] = _nothing
        """Called before the buffers are zeroed, while the others still hold what they hold."""
        self._undo: Bytes = new_buffer(0)
        self._ctx = ctx
        self._members: list[ref[LiveSequence]] = []
        self._rows: list[ref[OutputRow]] = []
        """Those that lie in the context."""

    def join(self, live: LiveSequence) -> None:
        """One more sequence."""
        self._members.append(ref(live))

    @property
    def members(self) -> list[LiveSequence]:
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

    # -- the output row --------------------------------------------------------------------------

    def holds_row(self, row: OutputRow) -> bool:
        """One of the context's output rows is that of this sequence."""
        return self.slots == 1 or row.index is not None

    def take_row(self, row: OutputRow) -> None:
        """The context's only output row becomes this sequence's; those that lie there are copied first."""
        if self.slots == 1:
            return
        if row.index == LAST_ROW:
            row.lies_at(LAST_ROW)  # an interrupt may have come when it was copied for another's decode
            return
        row.leave()  # what lies there is still another one's
        self._keep_rows()
        self._rows = [ref(row)]
        row.lies_at(LAST_ROW)

    def _keep_rows(self) -> None:
        """The output rows are about to be overwritten: have those copied that may still be asked for."""
        for held in self._rows:
            if (row := held()) is not None:
                row.keep()
        self._rows = []

    # -- what concerns all -----------------------------------------------------------------------

    def clear(self, live: LiveSequence) -> None:
        """Zero the buffers for one sequence; what the others held is gone, and is known to be."""
        try:
            self.clearing()
        finally:
            for other in self.members:
                if other is not live:
                    other.lose()
            live.native.clear()

    def lose_all(self) -> None:
        """Nobody knows what the context holds."""
        for live in self.members:
            live.lose()

    def look(self) -> str | None:
        """What is lost is emptied. Why all of it is lost now, if it is.

        Whoever decodes here besides us may do so in any sequence.
        """
        members = self.members
        touched = members[0].touched_outside()
        if touched:
            self.lose_all()
            members[0].recount()
        for live in members:
            if live.state.is_lost:
                live.empty()
        return "another caller decoded on this context" if touched else None

    def decode_parts(
        self, parts: Sequence[tuple[LiveSequence, Sequence[int] | Tokens, Outputs]]
    ) -> list[str | None]:
        """Append tokens to each of several sequences in one batch; the fault of each, or None.

        A part with outputs "last" gets its output row. Raises DecodeError when the library refuses or fails,
        for all of them.
        """
        lives = [live for live, _, _ in parts]
        for live in lives:
            live.row.leave()
        self._keep_rows()
        native = lives[0].native
        named = [live.identity.fingerprint for live in lives]
        try:
            rows = native.decode_parts(
                [(live.native.seq, live.n, tokens, outputs) for live, tokens, outputs in parts]
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
            lives[0].count(sum(len(tokens) for _, tokens, _ in parts))
        faults = [live.decoded(tokens, outputs) for live, tokens, outputs in parts]
        self._rows = []
        for (live, _, outputs), row, name in zip(parts, rows, named, strict=True):
            if outputs != "none":
                self._rows.append(ref(live.row))
                live.row.lies_at(row)
            if name is not live.identity.fingerprint:  # another thread has changed what computes
                live.state.disown()
        return faults


def _nothing() -> None:
    """Nobody wants to know."""
