"""Undo: take back tokens of the live sequence, by a cut, a rollback plane or a snapshot."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from llamahybrid.memory.restore import restore
from llamahybrid.memory.sequence import LiveSequence
from llamahybrid.prompt_cache.base import Bytes, Tokens

Rollback: TypeAlias = Literal["cut", "planes", "snapshot"]
"""The way in which tokens were taken back: attention was cut, a rollback plane became the state, a snapshot
was loaded (the tokens behind it are then decoded again)."""


class Undo:
    """The live sequence's state before tokens that may have to go again."""

    def __init__(self, live: LiveSequence) -> None:
        self._live = live
        self._record: Bytes = np.empty(0, dtype=np.uint8)
        self._tokens: Tokens | None = None
        self._named = b"", False

    @property
    def position(self) -> int | None:
        """Tokens of the state that is saved, where it is one of this history; else None."""
        if self._tokens is None or not self._live.state.starts_with(self._tokens):
            return None
        named = self._live.fingerprint, self._live.state.foreign
        if self._named != named:  # saved for another salt, or on top of a state that is gone
            return None
        return len(self._tokens)

    def take(self) -> None:
        """Save the tip's state, unless it is saved already or memory can be cut."""
        live = self._live
        if live.profile.cuttable or not live.profile.linear or self.position == live.n:
            return
        self._tokens = None  # an interrupt below must not leave them beside another state
        if live.snapshot(self._buffer) is not None:
            self._named = live.fingerprint, live.state.foreign
            self._tokens = live.tokens.copy()

    def drop(self) -> None:
        """Discard the saved state, which may be the reason why a request failed."""
        self._tokens = None

    def go_back(self, n: int) -> Rollback | None:
        """Take back the tokens behind the first n; return the way, or None if no exact one is known.

        After "snapshot" fewer than n tokens may be left: the others must be decoded again.
        """
        live, position = self._live, self.position
        if live.cut(n):
            return "planes" if live.planes.pending else "cut"
        if position is None or position > n:
            return None
        if restore(live, self._record, live.tokens[:position].copy(), row_follows=True) is not None:
            return None
        return "snapshot"

    def _buffer(self, n_bytes: int) -> Bytes:
        if self._record.nbytes != n_bytes:
            self._record = np.empty(n_bytes, dtype=np.uint8)
        return self._record
