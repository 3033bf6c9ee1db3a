"""The last output row of a live sequence: where logits are read, and what they prove of the state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llamahybrid.capi.calls import LAST_ROW, NativeContext
from llamahybrid.errors import LlamaHybridError
from llamahybrid.memory.state import SequenceState
from llamahybrid.prompt_cache.base import Logits

if TYPE_CHECKING:
    from llamahybrid.memory.shared import SharedContext


class OutputRow:
    """The row that the sampler reads; `state` says whether it is the tip's.

    Where several sequences share a context, its rows are those of the last batch, one for each sequence that
    had a token there. Before the next batch takes their place, those of who is not in it are copied.
    """

    def __init__(
        self, native: NativeContext, state: SequenceState, n_vocab: int, shared: SharedContext
    ) -> None:
        self._native = native
        self._state = state
        self._n_vocab = n_vocab
        self._shared = shared
        self._copy: Logits | None = None
        self._copied = False
        """The row was copied, and is what was computed last."""
        self.index: int | None = None
        """Where it lies among the rows of the context, as the library counts; None: not there."""

    def logits(self) -> Logits | None:
        """The logits of the last token, shape (n_vocab,), as a view; None when they are not live."""
        return self._row() if self._state.tip_logits else None

    def proves_finite(self) -> bool:
        """The tip's state is free of NaN, as this row says (see `SequenceState.row_covers_tip`)."""
        row = self._row() if self._state.row_covers_tip else None
        return row is not None and bool(np.isfinite(row).all())

    def exists(self) -> bool:
        """There is a row that stored logits can be put into (see `put`)."""
        return self._native.logits(self._n_vocab) is not None

    def put(self, logits: Logits) -> bool:
        """Put stored logits of the tip where the sampler reads them, so that it runs as ever.

        False when the context has no output row (`exists`).
        """
        row = self._native.logits(self._n_vocab)
        if row is None:
            return False
        self._shared.take_row(self)
        row[:] = logits
        self._state.tip_logits = self._state.row_covers_tip = True
        return True

    # -- where several sequences share a context -----------------------------------------------------

    def lies_at(self, index: int) -> None:
        """It is this row of the context now."""
        self._copied = False
        self.index = index

    def keep(self) -> None:
        """Copy it, if it may still be asked for: it is about to go from the context."""
        if self.index is None:
            return
        row = self._native.logits(self._n_vocab, self.index) if self._state.row_covers_tip else None
        if row is not None:
            if self._copy is None:
                self._copy = np.empty(self._n_vocab, dtype=np.float32)
            np.copyto(self._copy, row)
            self._copied = True
        self.index = None

    def leave(self) -> None:
        """It goes from the context and says nothing of the tip any more: the sequence is decoded on."""
        self._state.forget_row()
        self._copied = False
        self.index = None

    def place(self) -> int | Logits:
        """Where the logits of the last token are: a row of the context, by its index, or a copy."""
        if not self._state.tip_logits:
            if self._shared.slots > 1:
                raise LlamaHybridError("there are no logits to sample from: eval a token first")
            return LAST_ROW  # what somebody decoded without us
        if self._copied:
            assert self._copy is not None, "it was copied"
            return self._copy
        return self._in_context

    def exists_for_tip(self) -> bool:
        """There are logits of the last token."""
        return self._state.tip_logits and (self._copied or self._shared.holds_row(self))

    @property
    def _in_context(self) -> int:
        """Its index there; with one sequence there is one row."""
        return LAST_ROW if self.index is None else self.index

    def _row(self) -> Logits | None:
        if self._shared.holds_row(self):
            return self._native.logits(self._n_vocab, self._in_context)
        return self._copy if self._copied else None
