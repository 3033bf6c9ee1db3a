"""Who uses which checkpoint: what is used keeps its bytes."""

from __future__ import annotations

import itertools
import weakref

from llamahybrid.prompt_cache.nodes import Entry


class Pins:
    """Checkpoints in use, each by an object: a plan, or whoever reads its bytes.

    Users are held weakly. What one used that was collected before `release` (an exception came where
    nobody could call it) is released by `release_collected`; no callback runs in the collector for it.
    """

    def __init__(self) -> None:
        self._used: dict[int, tuple[weakref.ref[object], Entry]] = {}
        self._numbers = itertools.count()

    def use(self, user: object, entry: Entry) -> None:
        """Keep a checkpoint's bytes until `user` releases them or is collected."""
        self._used[next(self._numbers)] = (weakref.ref(user), entry)
        entry.pins += 1

    def release(self, user: object) -> Entry | None:
        """The checkpoint that `user` no longer needs; None if it held none."""
        number = next((n for n, (ref, _) in self._used.items() if ref() is user), None)
        return None if number is None else self._end(number)

    def release_collected(self) -> list[Entry]:
        """Release the checkpoints whose users are gone; which they are, once for each user."""
        return [self._end(n) for n in [n for n, (ref, _) in self._used.items() if ref() is None]]

    def entries(self) -> set[Entry]:
        """What is in use."""
        return {entry for _, entry in self._used.values()}

    def _end(self, number: int) -> Entry:
        _, entry = self._used.pop(number)
        entry.pins -= 1
        return entry
