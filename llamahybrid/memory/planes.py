"""Rollback planes: states of the last tokens that a recurrent memory keeps, and which of them are valid.

A context made with `n_rs_seq` = K keeps, for each sequence, the state behind each of its last K + 1 tokens,
so that up to K of them can be taken back by a cut. A batch of T tokens writes min(T, K + 1) planes and leaves
older ones as they are, of another history by then; the stock library grants a rollback to those all the same
(src/llama-memory-recurrent.cpp, seq_rm). So `Planes` counts which are valid, and its count decides.
"""

from __future__ import annotations

import logging

from llamahybrid.capi.calls import NativeContext

logger = logging.getLogger("llamahybrid")


class Planes:
    """The rollback planes of one context."""

    def __init__(self, native: NativeContext) -> None:
        self._native = native
        self.count = native.planes()
        """Planes the context has behind its current state."""
        self.reach = 0
        """How many tokens a cut may take back now."""
        self.pending = False
        """A rollback was asked for and no token decoded since: the current state still lies in its plane."""
        self.in_use = False
        """A draft is decoded and not yet accepted or rejected: its planes are not given back now."""
        self._base = self.count
        self._base_bytes = 0

    @property
    def resizable(self) -> bool:
        """The library can change their number (the patched one)."""
        return self._native.resizes_planes

    @property
    def grown(self) -> bool:
        """There are more than the context was made with."""
        return self.count > self._base

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

    def grow(self, count: int) -> bool:
        """Have `count` planes while drafts run; False where that cannot be, and nothing changed."""
        if count <= self.count:
            return True
        if not self.grown:
            self._base_bytes = self._native.memory_bytes()
        return self.resizable and self._resize(count)

    def shrink(self) -> None:
        """Give back what `grow` took, and see that memory returned; not while a draft is pending.

        A pending rollback is carried out by the library on the way.
        """
        if not self.grown or self.in_use:
            return
        self._resize(self._base)
        kept = self._native.memory_bytes() - self._base_bytes
        if kept > 0:
            logger.warning("%d bytes of rollback planes could not be given back", kept)

    def _resize(self, count: int) -> bool:
        if not self._native.resize_planes(count):
            return False
        self.reach = min(self.reach, count)
        self.pending = False
        self.count = count
        return True
