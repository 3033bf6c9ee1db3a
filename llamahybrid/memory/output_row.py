"""The last output row of a live sequence: where logits are read, and what they prove of the state."""

from __future__ import annotations

import numpy as np

from llamahybrid.capi.calls import LAST_ROW, NativeContext
from llamahybrid.errors import LlamaHybridError
from llamahybrid.memory.state import SequenceState
from llamahybrid.prompt_cache.base import Logits


class OutputRow:
    """The row that the sampler reads; `state` says whether it is the tip's.

    The rows of a context are those of its last batch, one for each sequence that had a token there. Before
    the next batch takes their place, those of sequences that are not in it are copied.
    """

    def __init__(self, native: NativeContext, state: SequenceState, n_vocab: int, alone: bool) -> None:
        """`alone`: no other sequence has rows in this context."""
        self._native = native
        self._alone = alone
        self._state = state
        self._n_vocab = n_vocab
        self._index: int | None = None
        """Where it lies among the rows of the context, as the library counts; None: not there."""
        self._copy: Logits | None = None
        self._copied = False
        """The row was copied, and is what was computed last."""

    def logits(self) -> Logits | None:
        """The logits of the last token, shape (n_vocab,), as a view; None when they are not live."""
        return self._row() if self._state.tip_logits else None

    def proves_finite(self) -> bool:
        """The tip's state is free of NaN, as this row says (see `SequenceState.row_covers_tip`)."""
        row = self._row() if self._state.row_covers_tip else None
        return row is not None and bool(np.isfinite(row).all())

    def exists_for_tip(self) -> bool:
        """There are logits of the last token."""
        return self._state.tip_logits and (self._copied or self._index is not None)

    def exists(self) -> bool:
        """There is a row that stored logits can be put into (see `LiveSequence.put_logits`)."""
        return self._native.logits(self._n_vocab) is not None

    def place(self) -> int | Logits:
        """Where the logits of the last token are: a row of the context, by its index, or a copy.

        Raises LlamaHybridError where there are none.
        """
        if not self._state.tip_logits and self._alone:
            return LAST_ROW  # of what somebody decoded without us
        if self._state.tip_logits and self._copied and self._copy is not None:
            return self._copy
        if not self._state.tip_logits or self._index is None:
            raise LlamaHybridError("there are no logits to sample from: eval a token first")
        return self._index

    # -- what becomes of it ----------------------------------------------------------------------

    def lies_at(self, index: int) -> None:
        """It is this row of the context now."""
        self._copied = False
        self._index = index

    def keep(self) -> None:
        """Copy it, if it may still be asked for: it is about to go from the context."""
        if self._index is None:
            return
        row = self._native.logits(self._n_vocab, self._index) if self._state.row_covers_tip else None
        if row is not None:
            if self._copy is None:
                self._copy = np.empty(self._n_vocab, dtype=np.float32)
            np.copyto(self._copy, row)
            self._copied = True
        self._index = None

    def leave(self) -> None:
        """It goes from the context and says nothing of the tip any more: the sequence is decoded on."""
        self._state.forget_row()
        self._copied = False
        self._index = None

    def _row(self) -> Logits | None:
        if self._copied:
            return self._copy
        return None if self._index is None else self._native.logits(self._n_vocab, self._index)
