"""Sharing: attention that another sequence of the context holds is held by both, in the same cells.

A cell of a unified cache may belong to several sequences (src/llama-kv-cache.cpp, seq_cp): nothing is copied,
and it is free when the last of them lets it go. So a beginning that several requests have in common lies in
the context once. What is recurrent has no such parts, and comes from a snapshot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from llamahybrid.prompt_cache.base import Tokens
from llamahybrid.prompt_cache.nodes import common_prefix

if TYPE_CHECKING:
    from llamahybrid.memory.sequence import LiveSequence


class Origin:
    """Names cells that several sequences hold: the same for tokens [a, b) of one and of another."""

    __slots__ = ()


Held = tuple[Origin, int, int]
"""The cells of tokens [start, end), and whose they are, too."""


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


def held_twice(members: Iterable[LiveSequence]) -> int:
    """Cells that are counted too often where the tokens of each sequence are."""
    holders: dict[Origin, list[tuple[int, int]]] = defaultdict(list)
    for live in members:
        for origin, start, end in live.cells.up_to(live.n):
            holders[origin].append((start, end))
    return sum(_overlap(ranges) for ranges in holders.values())


def _overlap(ranges: list[tuple[int, int]]) -> int:
    """How much longer they are one by one than together."""
    total = together = reach = 0
    for start, end in sorted(ranges):
        total += end - start
        together += max(0, end - max(start, reach))
        reach = max(reach, end)
    return total - together


def _others(live: LiveSequence) -> list[LiveSequence]:
    """Who may lend cells to a sequence: what holds tokens of the same salt that the same has computed.

    Nobody with sliding windows, whose cells others take once they lie behind one.
    """
    if live.shared.slots == 1 or live.profile.window:
        return []
    return [
        other
        for other in live.shared.members
        if other is not live and other.fingerprint == live.fingerprint and not other.planes.pending
    ]


def lender(live: LiveSequence, tokens: Tokens) -> LiveSequence | None:
    """Another sequence of its context that holds `tokens`, shape (c,), and is proven right just now."""
    n = len(tokens)
    for other in _others(live):
        if other.n >= n and np.array_equal(other.state.ids[:n], tokens) and other.fault() is None:
            return other
    return None


def lendable(live: LiveSequence, prompt: Tokens, depth: int) -> int:
    """Tokens of a prompt for which a sequence needs no cells of its own, if `depth` of them are resumed."""
    there = max((common_prefix(other.tokens, prompt) for other in _others(live)), default=0)
    return max(0, depth - common_prefix(live.tokens, prompt)) if there >= depth else 0
