"""Rollback planes: states of the last tokens that a recurrent memory keeps, and which of them are valid.

A context made with `n_rs_seq` = K keeps, for each sequence, the state behind each of its last K + 1 tokens,
so that up to K of them can be taken back by a cut. A batch of T tokens writes min(T, K + 1) planes and leaves
older ones as they are, of another history by then; the stock library grants a rollback to those all the same
(src/llama-memory-recurrent.cpp, seq_rm). So `Planes` counts which are valid, and its count decides.
"""

from __future__ import annotations

from llamahybrid.capi.calls import NativeContext


class Planes:
    """The rollback planes of one context."""

    def __init__(self, native: NativeContext) -> None:
        self.count = native.planes()
        """Planes the context has behind its current state."""
        self.reach = 0
        """How many tokens a cut may take back now."""
        self.pending = False
        """A rollback was asked for and no token decoded since: the current state still lies in its plane."""
        self.in_use = False
        """A draft is decoded and not yet accepted or rejected: a rollback to its planes may be asked for."""

    def wrote(self, tokens: int) -> None:
        """One batch of so many tokens was decoded into the sequence, and into no other."""
        self.reach = min(tokens - 1, self.count)
        self.pending = False

    def rolled_back(self) -> None:
        """A cut went back by a plane."""
        self.reach = 0
        self.pending = True

    def invalidate(self) -> None:
        """The state came from elsewhere, or was copied: only the current plane is valid."""
        self.reach = 0
        self.pending = False
