"""Pins: checkpoints in use keep their bytes, prefixes that the user pinned keep their place."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence

import numpy as np

from llamahybrid.prompt_cache.base import Tokens, same_start
from llamahybrid.prompt_cache.nodes import IDS, Entry, ids_of


class User:
    """A user of a checkpoint's bytes."""


class Pins:
    """Checkpoints in use, each by an object: a plan, or a reader of its bytes.

    Users are held weakly. A user that was collected before `release` (after an exception) is released by
    `release_collected`; no callback runs in the collector.
    """

    def __init__(self) -> None:
        self._used: dict[int, tuple[weakref.ref[object], Entry]] = {}
        self._numbers = itertools.count()

    def use(self, user: object, entry: Entry) -> None:
        """Keep a checkpoint's bytes until `user` releases them or is collected."""
        self._used[next(self._numbers)] = (weakref.ref(user), entry)
        entry.pins += 1

    def release(self, user: object) -> Entry | None:
        """Unpin the checkpoint of `user`, and return it; None if there is none."""
        number = next((n for n, (ref, _) in self._used.items() if ref() is user), None)
        return None if number is None else self._end(number)

    def release_collected(self) -> list[Entry]:
        """Unpin the checkpoints of collected users, and return them, once for each user."""
        return [self._end(n) for n in [n for n, (ref, _) in self._used.items() if ref() is None]]

    def entries(self) -> set[Entry]:
        """Return the checkpoints in use."""
        return {entry for _, entry in self._used.values()}

    def _end(self, number: int) -> Entry:
        _, entry = self._used.pop(number)
        entry.pins -= 1
        return entry


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
