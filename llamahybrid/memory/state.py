"""The believed content of one sequence: its tokens, its last row of logits, its rollback planes.

A sequence that cannot be verified ends with `INVALID`, an id that no prompt has, so that it is never reused;
the next alignment cuts or restores before it, or clears. Only `LiveSequence`, its `Identity`, restores and
adoptions change a state.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llamahybrid.capi.calls import LAST_ROW, NativeContext
from llamahybrid.errors import LlamaHybridError
from llamahybrid.prompt_cache.base import Logits, Tokens

INVALID = int(np.iinfo(np.int32).min)

unknown_ids = itertools.count(-1, -1)
"""Ids of content without known tokens: each is used once, and no prompt has any."""


@dataclass(eq=False, slots=True)
class SequenceState:
    """The tokens of a sequence, and properties of its tip."""

    ids: Tokens
    """Shape (capacity + 1,), the first n in use; the extra one is for `INVALID` behind a full context."""
    n: int = 0
    """Tokens in the sequence."""
    lag: int = 0
    """Difference of n - 1 and the last position: an image has fewer positions than counted tokens."""
    tip_logits: bool = False
    """The last output row is the tip's."""
    row_covers_tip: bool = False
    """The last output row was computed from the tip's state or a later one: if the row is finite, so is that
    state (NaN in a state stays there)."""
    extra_bytes: int = 0
    """Bytes of native content beyond the size rule (an M-RoPE image has more cells than positions)."""
    needs_zeroing: bool = False
    """Buffers hold NaN or forgotten text, so that removing cells is not enough."""
    grown: bool = True
    """All tokens since the sequence was empty come from our own decodes."""
    foreign: bool = False
    """The sequence continues a loaded state of unknown origin, and is not stored."""

    @classmethod
    def empty(cls, capacity: int) -> SequenceState:
        """Return the state of a fresh context with room for `capacity` tokens."""
        return cls(np.zeros(capacity + 1, dtype=np.int32))

    @property
    def tokens(self) -> Tokens:
        """The ids, shape (n,); negative where content is unknown. A view: copy to keep."""
        return self.ids[: self.n]

    @property
    def is_invalid(self) -> bool:
        """The state at the tip is unusable: an operation did not finish, or was not ours."""
        return self.n > 0 and bool(self.ids[self.n - 1] == INVALID)

    @property
    def is_lost(self) -> bool:
        """The content of memory is unknown."""
        return self.n == 1 and self.is_invalid

    @property
    def opaque(self) -> bool:
        """Part of the sequence was decoded natively (an image, audio) or is unknown."""
        return bool((self.tokens < 0).any())

    def holds(self, ids: npt.NDArray[np.integer]) -> bool:
        """The sequence is valid and is exactly `ids` (see `starts_with`)."""
        return self.n == len(ids) and self.starts_with(ids)

    def starts_with(self, ids: npt.NDArray[np.integer]) -> bool:
        """The sequence is valid and begins with `ids`, those of native content included; maybe disowned."""
        if self.n < len(ids) or self.is_invalid:
            return False
        own = self.ids[: len(ids)]
        if np.array_equal(own, ids):
            return True
        return len(ids) > 0 and bool(own[0] < 0) and np.array_equal(own[1:], ids[1:])

    # -- changes, in an order in which an interrupt between two lines never leaves a false claim -----

    def forget_row(self) -> None:
        """Note that the last output row no longer belongs to the tip."""
        self.tip_logits = self.row_covers_tip = False

    def replace_tokens(self, ids: npt.NDArray[np.integer]) -> None:
        """Set the tokens to `ids`, shape (n,)."""
        self.row_covers_tip = False
        self.ids[: len(ids)] = ids
        self.n = len(ids)

    def cut(self, n: int) -> None:
        """Keep the tokens [0, n)."""
        self.n, self.lag = n, 0
        if self.extra_bytes and not self.opaque:
            self.extra_bytes = 0

    def invalidate_tip(self) -> None:
        """Put an id that matches nothing at the tip."""
        if not self.is_invalid:
            self.ids[self.n] = INVALID
            self.n += 1

    def disown(self) -> None:
        """Replace the first id by one that no prompt has, so that no prompt matches."""
        if self.n > 0 and self.ids[0] != INVALID:
            self.ids[0] = next(unknown_ids)


class OutputRow:
    """The last row of logits of a sequence, which the sampler reads; `state` says whether it is the tip's.

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

    def takes(self) -> bool:
        """Return whether `put` would take stored logits."""
        return not self._alone or self._native.logits(self._n_vocab) is not None

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

    def put(self, logits: Logits) -> bool:
        """Put stored logits in its place, alone into the context, where other code looks for them.

        False where the context has no row yet.
        """
        self.leave()
        if not self._alone:
            self._copy, self._copied = logits.copy(), True
            return True
        row = self._native.logits(self._n_vocab)
        if row is None:
            return False
        row[:] = logits
        self.lies_at(LAST_ROW)
        return True

    def leave(self) -> None:
        """Drop it before a batch that continues the sequence."""
        self._state.tip_logits = self._state.row_covers_tip = self._copied = False
        self._index = None

    def _row(self) -> Logits | None:
        if self._copied:
            return self._copy
        return None if self._index is None else self._native.logits(self._n_vocab, self._index)


class Planes:
    """The rollback planes of a recurrent memory, and how many of them are valid.

    A context made with `n_rs_seq` = K keeps, for each sequence, the state after each of its last K + 1
    tokens, so that a cut can take back up to K of them. A batch of T tokens writes min(T, K + 1) planes; the
    older ones belong to another history then, but the stock library still rolls back to them
    (src/llama-memory-recurrent.cpp, seq_rm). So the count of valid ones decides.
    """

    def __init__(self, native: NativeContext) -> None:
        self.count = native.planes()
        """Number of planes besides the current state."""
        self.reach = 0
        """Number of tokens that a cut may take back now."""
        self.pending = False
        """No token was decoded since a rollback: the current state still lies in its plane."""
        self.in_use = False
        """A decoded draft is neither accepted nor rejected yet, and may be rolled back."""

    def wrote(self, tokens: int) -> None:
        """Note a batch of `tokens` of this sequence alone."""
        self.reach = min(tokens - 1, self.count)
        self.pending = False

    def rolled_back(self) -> None:
        """Note a cut to a plane."""
        self.reach = 0
        self.pending = True

    def invalidate(self) -> None:
        """Note that the state was loaded or copied: only the current plane is valid."""
        self.reach = 0
        self.pending = False
