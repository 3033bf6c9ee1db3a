"""Sharing: attention that another sequence of the context holds is held by both, in the same cells.

A cell of a unified cache may belong to several sequences (src/llama-kv-cache.cpp, seq_cp): nothing is copied,
and it is free when the last of them lets it go. So a beginning that several requests have in common lies in
the context once. What is recurrent has no such parts, and comes from a snapshot.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from heapq import nlargest
from typing import Protocol


class Origin:
    """Names cells that several sequences hold: the same for tokens [a, b) of one and of another."""

    __slots__ = ()


Held = tuple[Origin, int, int]
"""The cells of tokens [start, end), and whose they are, too."""


MOST_RANGES = 32
"""Of one sequence: each token of an answer has them counted."""


class SharedCells:
    """Which cells of one sequence others may hold as well. Where that is not known, none."""

    __slots__ = ("ranges",)

    def __init__(self) -> None:
        self.ranges: list[Held] = []
        """Apart from one another."""

    def up_to(self, n: int, start: int = 0) -> list[Held]:
        """Those of tokens [start, n)."""
        clipped = ((origin, max(a, start), min(b, n)) for origin, a, b in self.ranges)
        return [(origin, a, b) for origin, a, b in clipped if a < b]

    def hold(self, ranges: list[Held]) -> None:
        """These are shared from now on; of more than `MOST_RANGES` the others count as its own."""
        self.ranges = nlargest(MOST_RANGES, ranges, key=lambda held: held[2] - held[1])

    def cut(self, n: int) -> None:
        """Only tokens [0, n) are left."""
        if self.ranges:
            self.ranges = self.up_to(n)

    def lend(self, start: int, end: int) -> list[Held]:
        """Another sequence gets the cells of tokens [start, end): what it holds now."""
        known = sorted(self.up_to(end, start), key=lambda held: held[1])
        borders = [start, *(at for _, a, b in known for at in (a, b)), end]
        gaps = zip(borders[::2], borders[1::2], strict=True)
        fresh = [(Origin(), a, b) for a, b in gaps if a < b]
        self.ranges += fresh
        return known + fresh


class Holder(Protocol):
    """A sequence of tokens, each of which has a cell."""

    cells: SharedCells

    @property
    def n(self) -> int:
        """Tokens in it."""


def held_twice(members: Iterable[Holder]) -> int:
    """Cells that are counted too often where the tokens of each sequence are."""
    holders: dict[Origin, list[tuple[int, int]]] = defaultdict(list)
    for holder in members:
        for origin, start, end in holder.cells.up_to(holder.n):
            holders[origin].append((start, end))
    return sum(_overlap(ranges) for ranges in holders.values())


def forget_what_one_holds(members: Iterable[Holder]) -> None:
    """Cells that the others have let go are no longer shared: else who lends often remembers ever more."""
    everybody = list(members)
    holders = Counter(origin for each in everybody for origin in {held[0] for held in each.cells.ranges})
    for each in everybody:
        each.cells.ranges = [held for held in each.cells.ranges if holders[held[0]] > 1]


def _overlap(ranges: list[tuple[int, int]]) -> int:
    """How much longer they are one by one than together."""
    total = together = reach = 0
    for start, end in sorted(ranges):
        total += end - start
        together += max(0, end - max(start, reach))
        reach = max(reach, end)
    return total - together
