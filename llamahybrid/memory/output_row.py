"""OutputRow: the last row of logits of a live sequence."""

from __future__ import annotations

import numpy as np

from llamahybrid.capi.calls import LAST_ROW, NativeContext
from llamahybrid.errors import LlamaHybridError
from llamahybrid.memory.state import SequenceState
from llamahybrid.prompt_cache.base import Logits


class OutputRow:
    """The row that the sampler reads; `state` says whether it is the tip's.

    A context has the rows of its last batch, one for each sequence in it. Before the next batch overwrites
    them, rows of sequences outside of that batch are copied.
    """

    def __init__(self, native: NativeContext, state: SequenceState, n_vocab: int, alone: bool) -> None:
        """`alone`: no other sequence has rows in this context."""
        self._native = native
        self._alone = alone
        self._state = state
        self._n_vocab = n_vocab
        self._index: int | None = None
        """Its index among the rows of the context, as the library counts; None: not there."""
        self._copy: Logits | None = None
        self._copied = False
        """`_copy` is the current row."""

    def logits(self) -> Logits | None:
        """Return the logits of the last token, shape (n_vocab,), as a view; None without them."""
        return self._row() if self._state.tip_logits else None

    def proves_finite(self) -> bool:
        """The row shows that the tip's state is free of NaN (see `SequenceState.row_covers_tip`)."""
        row = self._row() if self._state.row_covers_tip else None
        return row is not None and bool(np.isfinite(row).all())

    def exists_for_tip(self) -> bool:
        """There are logits of the last token."""
        return self._state.tip_logits and (self._copied or self._index is not None)

    def exists(self) -> bool:
        """The context has a row for stored logits (see `LiveSequence.put_logits`)."""
        return self._native.logits(self._n_vocab) is not None

    def place(self) -> int | Logits:
        """Return the logits of the last token: the index of a row of the context, or a copy.

        Raises LlamaHybridError without logits.
        """
        if not self._state.tip_logits and self._alone:
            return LAST_ROW  # decoded by other code
        if self._state.tip_logits and self._copied and self._copy is not None:
            return self._copy
        if not self._state.tip_logits or self._index is None:
            raise LlamaHybridError("there are no logits to sample from: eval a token first")
        return self._index

    # -- changes ---------------------------------------------------------------------------------

    def lies_at(self, index: int) -> None:
        """Note its index after a batch."""
        self._copied = False
        self._index = index

    def keep(self) -> None:
        """Copy it before a batch of other sequences overwrites it, if it may still be read."""
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
        """Drop it before a batch that continues the sequence."""
        self._state.forget_row()
        self._copied = False
        self._index = None

    def _row(self) -> Logits | None:
        if self._copied:
            return self._copy
        return None if self._index is None else self._native.logits(self._n_vocab, self._index)
