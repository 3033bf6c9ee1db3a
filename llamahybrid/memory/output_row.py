"""The last output row of a context: where logits are read, and what they prove of the state."""

from __future__ import annotations

import numpy as np

from llamahybrid.capi.calls import NativeContext
from llamahybrid.memory.state import SequenceState
from llamahybrid.prompt_cache.base import Logits


class OutputRow:
    """The row that the sampler reads; `state` says whether it is the tip's."""

    def __init__(self, native: NativeContext, state: SequenceState, n_vocab: int) -> None:
        self._native = native
        self._state = state
        self._n_vocab = n_vocab

    def logits(self) -> Logits | None:
        """The logits of the last token, shape (n_vocab,), as a view; None when they are not live."""
        return self._native.logits(self._n_vocab) if self._state.tip_logits else None

    def proves_finite(self) -> bool:
        """The tip's state is free of NaN, as this row says (see `SequenceState.row_covers_tip`)."""
        row = self._native.logits(self._n_vocab) if self._state.row_covers_tip else None
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
        row[:] = logits
        self._state.tip_logits = self._state.row_covers_tip = True
        return True
