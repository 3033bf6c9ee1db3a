"""The last output row of a live sequence: where logits are read, and what they prove of the state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llamahybrid.capi.calls import NativeContext
from llamahybrid.memory.state import SequenceState
from llamahybrid.prompt_cache.base import Logits

if TYPE_CHECKING:
    from llamahybrid.memory.shared import SharedContext


class OutputRow:
    """The row that the sampler reads; `state` says whether it is the tip's.

    Where several sequences share a context, its last row is that of the last batch: the others' are copied.
    """

    def __init__(
        self, native: NativeContext, state: SequenceState, n_vocab: int, shared: SharedContext
    ) -> None:
        self._native = native
        self._state = state
        self._n_vocab = n_vocab
        self._shared = shared
        self._copy: Logits | None = None

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

    def forget(self) -> None:
        """It is not the tip's any more."""
        self._state.forget_row()

    def keep(self, index: int = -1) -> None:
        """Copy the row that a token of the last batch has, by its place there: it is about to go."""
        row = self._native.logits(self._n_vocab, index) if self._state.row_covers_tip else None
        if row is None:
            return
        if self._copy is None:
            self._copy = np.empty(self._n_vocab, dtype=np.float32)
        np.copyto(self._copy, row)

    def copied(self) -> Logits | None:
        """The logits of the last token where the context's last row is another sequence's; None where not."""
        return self._copy if self._state.tip_logits and not self._shared.holds_row(self) else None

    def _row(self) -> Logits | None:
        if self._shared.holds_row(self):
            return self._native.logits(self._n_vocab)
        return self._copy
