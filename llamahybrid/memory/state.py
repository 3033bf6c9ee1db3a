"""SequenceState: the believed content of one sequence: token ids, and properties of the last one.

A sequence that cannot be verified ends with `INVALID`, an id that no prompt has, so that it is never reused;
the next alignment cuts or restores before it, or clears. Only `LiveSequence`, its parts (`Identity`,
`OutputRow`), restores and adoptions change a state.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llamahybrid.prompt_cache.base import Tokens

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
