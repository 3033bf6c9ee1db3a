"""SequenceState: what one context's memory is taken to hold, as plain values and the rules for reading them.

It is a list of token ids and what is known of the last one. Whatever cannot be proven right ends with
`INVALID`, an id that no prompt has, so that nothing built on it is ever reused; the next alignment cuts or
restores below it, or clears. Only `LiveSequence`, its parts (`Identity`, `OutputRow`) and what restores or
adopts content in its name change it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llamahybrid.prompt_cache.base import Tokens

INVALID = int(np.iinfo(np.int32).min)

unknown_ids = itertools.count(-1, -1)
"""Ids of content that is not known as tokens: each is given once, and no prompt has any."""


@dataclass(eq=False, slots=True)
class SequenceState:
    """The tokens of sequence 0, and what is known of its tip."""

    ids: Tokens
    """Shape (capacity + 1,): the first n count; the one more is for `INVALID` behind a full context."""
    n: int = 0
    """Tokens in the sequence."""
    lag: int = 0
    """How far the last position lies behind n - 1: an image takes fewer positions than are counted for it."""
    tip_logits: bool = False
    """The last output row is the tip's."""
    row_covers_tip: bool = False
    """The last output row was computed from the tip's state, or from one that went on from it: if the row is
    finite, so is that state (NaN that gets into a state stays there)."""
    extra_bytes: int = 0
    """What native content takes beyond the size rule (an M-RoPE image: more cells than positions)."""
    needs_zeroing: bool = False
    """Buffers hold NaN, or text that is to be forgotten: removing cells is not enough."""
    grown: bool = True
    """It grew by our own decodes alone, since it was empty."""
    foreign: bool = False
    """It rests on a state of which nothing says that this model computed it: nothing of it is stored."""

    @classmethod
    def empty(cls, capacity: int) -> SequenceState:
        """That of a fresh context of so many tokens."""
        return cls(np.zeros(capacity + 1, dtype=np.int32))

    @property
    def tokens(self) -> Tokens:
        """The ids, shape (n,); negative where content is unknown. A view: copy to keep."""
        return self.ids[: self.n]

    @property
    def is_invalid(self) -> bool:
        """The state at the tip is not to be used: an operation did not finish, or was not ours."""
        return self.n > 0 and bool(self.ids[self.n - 1] == INVALID)

    @property
    def is_lost(self) -> bool:
        """Nothing is known of what memory holds."""
        return self.n == 1 and self.is_invalid

    @property
    def opaque(self) -> bool:
        """Part of the sequence was decoded natively (an image, audio) or is not known."""
        return bool((self.tokens < 0).any())

    def holds(self, ids: npt.NDArray[np.integer]) -> bool:
        """The sequence is valid and is exactly `ids` (see `starts_with`)."""
        return self.n == len(ids) and self.starts_with(ids)

    def starts_with(self, ids: npt.NDArray[np.integer]) -> bool:
        """The sequence is valid and begins with `ids`, native content with its own; it may be disowned."""
        if self.n < len(ids) or self.is_invalid:
            return False
        own = self.ids[: len(ids)]
        if np.array_equal(own, ids):
            return True
        return len(ids) > 0 and bool(own[0] < 0) and np.array_equal(own[1:], ids[1:])

    # -- changes; an interrupt between two lines must leave too little said, never too much ----------

    def forget_row(self) -> None:
        """The last output row says nothing of the tip any more."""
        self.tip_logits = self.row_covers_tip = False

    def replace_tokens(self, ids: npt.NDArray[np.integer]) -> None:
        """The sequence is `ids` now, shape (n,)."""
        self.row_covers_tip = False
        self.ids[: len(ids)] = ids
        self.n = len(ids)

    def cut(self, n: int) -> None:
        """Only tokens [0, n) are left."""
        self.n, self.lag = n, 0
        if self.extra_bytes and not self.opaque:
            self.extra_bytes = 0

    def take_over(self, other: SequenceState) -> None:
        """The sequence is what another one is, but for its output row."""
        self.forget_row()
        self.ids[:] = other.ids
        self.lag, self.extra_bytes = other.lag, other.extra_bytes
        self.needs_zeroing, self.grown, self.foreign = other.needs_zeroing, False, other.foreign
        self.n = other.n

    def invalidate_tip(self) -> None:
        """Put an id that matches nothing at the tip."""
        if not self.is_invalid:
            self.ids[self.n] = INVALID
            self.n += 1

    def disown(self) -> None:
        """Nothing is known as tokens of a prompt: one id that no prompt has is enough, the first."""
        if self.n > 0 and self.ids[0] != INVALID:
            self.ids[0] = next(unknown_ids)
