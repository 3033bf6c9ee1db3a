"""Planes: the rollback planes of a recurrent memory, and how many of them are valid.

A context made with `n_rs_seq` = K keeps, for each sequence, the state after each of its last K + 1 tokens, so
that a cut can take back up to K of them. A batch of T tokens writes min(T, K + 1) planes; the older ones
belong to another history then, but the stock library still rolls back to them
(src/llama-memory-recurrent.cpp, seq_rm). So `Planes` counts the valid ones, and its count decides.
"""

from __future__ import annotations

from llamahybrid.capi.calls import NativeContext


class Planes:
    """The rollback planes of one context."""

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
