"""Prefixes that the user pinned: their checkpoints keep their place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from llamahybrid.prompt_cache.base import Tokens, same_start
from llamahybrid.prompt_cache.nodes import IDS, ids_of


class Prefixes:
    """Token paths that the user pinned, each once."""

    def __init__(self, ids: Iterable[bytes] = ()) -> None:
        self._set(ids)

    def _set(self, ids: Iterable[bytes]) -> None:
        self._ids = dict.fromkeys(ids)
        self.nbytes = sum(map(len, self._ids))
        """Bytes of the tokens."""
        self.tokens = [np.frombuffer(each, IDS).astype(np.int32, copy=False) for each in self._ids]
        """Replaced, never changed, so that any thread may read it."""

    def copy(self) -> Prefixes:
        """The same ones."""
        return Prefixes(self._ids)

    def add(self, tokens: Tokens) -> None:
        """Add a path, unless it is there or empty."""
        if len(tokens):
            self._set([*self._ids, ids_of(tokens)])

    def remove(self, tokens: Tokens) -> None:
        """Remove exactly this path."""
        gone = ids_of(tokens)
        self._set([ids for ids in self._ids if ids != gone])

    def forget(self, tokens: Tokens) -> None:
        """Remove the paths that begin with these tokens."""
        gone = ids_of(tokens)
        self._set([ids for ids in self._ids if not ids.startswith(gone)])

    def cover(self, path: Tokens) -> bool:
        """Return whether a path lies on one of them."""
        ids = ids_of(path)
        return any(each.startswith(ids) for each in self._ids)


def pinned_before(pinned: Sequence[Tokens], tokens: Tokens) -> int:
    """Length of the longest of the pinned prefixes that these tokens go on from; 0 if there is none."""
    return max((len(p) for p in pinned if len(p) < len(tokens) and same_start(p, tokens)), default=0)
