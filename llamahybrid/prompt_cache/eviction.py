"""What goes first when the budget is full: what is worth least per byte (`value`), live or not.

Segments go with the last checkpoint that needs them. Where only the live path is left, its spare segments go
before its checkpoints, and of these the one whose loss costs least on the ladder of gaps that grow with the
distance from the tip. Pinned entries never go, nor does the attention before what the user pinned.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice, pairwise
from typing import Protocol, TypeAlias

from llamahybrid.prompt_cache.nodes import ID_BYTES, Entry, Match, Node
from llamahybrid.prompt_cache.tree import Tree
from llamahybrid.prompt_cache.value import ReuseValue

LIKELY_WORTH = 4.0
"""Histories diverge at message starts far more often than elsewhere, and a regenerated answer starts at a
prompt's end: such places are worth more than their distance alone says."""

LOOKS = 64
"""Checkpoints whose value is looked at for one that goes; a cache of fewer is always looked at whole."""

WORST = 16
"""How many of these are looked at the next time too."""

TOKENS_SHARE = 16
"""Bare tokens stay while all tokens together take no more than this part of what is stored: they tell which
paths come back, and where they part."""

OLDEST_PATHS = 128
"""Paths that are looked at for bare tokens that could go in a checkpoint's place."""


@dataclass(frozen=True)
class Tail:
    """A leaf whose last tokens nothing needs."""

    node: Node


@dataclass(frozen=True)
class Spare:
    """A node of the live path whose deepest segment only this path needs: its attention is live anyway."""

    node: Node
    keep: int = 0
    """What of the segment lies before this position stays: the user pinned it."""


Victim: TypeAlias = Entry | Tail | Spare


class Eviction(Protocol):
    """An order in which things go."""

    def learn(self, tree: Tree, match: Match, entries: Sequence[Entry]) -> None:
        """A request is about to follow this path with these checkpoints, shallowest first."""

    def victim(
        self, tree: Tree, path: Match | None, live: Sequence[Entry], incoming: int | None, thin: bool
    ) -> Victim | None:
        """What goes next; None if nothing may.

        `path`: tokens that must stay. `live`: checkpoints of the live path, shallowest first; they may go if
        `thin`. `incoming`: position on it that room is made for.
        """


class ValueEviction:
    """Least value first; looks at a few checkpoints at a time, in turn, and again at the worst of them."""

    def __init__(self) -> None:
        self.value = ReuseValue()
        self._thinning: tuple[weakref.ref[LivePath], Thinning] | None = None

    def learn(self, tree: Tree, match: Match, entries: Sequence[Entry]) -> None:
        """See `Eviction.learn`."""
        tree.changes += 1
        self.value.learn(tree, match, entries)

    def victim(
        self, tree: Tree, path: Match | None, live: Sequence[Entry], incoming: int | None, thin: bool
    ) -> Victim | None:
        """See `Eviction.victim`."""
        entry = self._least(tree, live) if len(tree) > len(live) else None
        if entry is not None:
            return bare_tail(tree, path, entry) or entry
        if (tail := bare_tail(tree, path, None)) or not thin:
            return tail
        if (spare := spare_segments(tree, live)) is not None:
            return spare
        return self._thinned(live, incoming)

    def going_next(self, tree: Tree, count: int) -> list[Entry]:
        """The checkpoints worth least of those that are looked at next, which changes nothing."""
        ranked = self._ranked(tree)
        return [e for e in ranked if not e.pins and not e.user_pinned][:count]

    def _thinned(self, live: Sequence[Entry], incoming: int | None) -> Entry | None:
        """The checkpoint of the live path that is missed least."""
        if not live:
            return None
        path, thinning = (lambda: None, None) if self._thinning is None else self._thinning
        if thinning is None or path() is not live or not thinning.goes_on(live, incoming):
            thinning = Thinning(live, incoming)
            self._thinning = (weakref.ref(live), thinning) if isinstance(live, LivePath) else None
        return thinning.victim(live)

    def _ranked(self, tree: Tree) -> list[Entry]:
        """Those that are looked at next, the least worth first; asked for again, few have changed."""
        line = tree.next_in_line(LOOKS)
        for entry in line:
            if entry.worth is None or entry.worth[0] != tree.changes:
                entry.worth = tree.changes, self.value.of(entry, tree.requests)
        return sorted(line, key=_worth)

    def _least(self, tree: Tree, live: Sequence[Entry]) -> Entry | None:
        """The least worth of those looked at, live or not; None if no other than live ones may go."""
        for _ in range(0, len(tree), LOOKS - WORST):
            ranked = self._ranked(tree)
            free = [e for e in ranked if not e.pins and not e.user_pinned]
            stay = set(free[:WORST])
            tree.to_the_end(e for e in ranked if e not in stay)
            if not all(_at(live, e.position) is e for e in free):
                return free[0]
        return None


def _worth(entry: Entry) -> float:
    assert entry.worth is not None
    return entry.worth[1]


def bare_tail(tree: Tree, path: Match | None, entry: Entry | None) -> Tail | None:
    """Tokens that nothing needs, the longest unused first, if they are to go before `entry`."""
    nodes = tree.oldest_nodes()
    if entry is not None:
        if tree.token_bytes * TOKENS_SHARE <= tree.entry_bytes + tree.segment_bytes:
            return None
        nodes = islice(nodes, OLDEST_PATHS)
    for node in nodes:
        if entry is not None and node.last_used >= entry.last_used:
            break
        if node.ends_bare() and node.tail(path.needs(node) if path else 0):
            return Tail(node)
    return None


def spare_segments(tree: Tree, live: Sequence[Entry]) -> Spare | None:
    """The deepest segment of the live path that no checkpoint off the path needs, nor one the user pinned.

    `live`: the path's checkpoints, shallowest first.
    """
    if not tree.segment_bytes or not live or live[-1].node is None:
        return None
    pinned = max((e.position for e in live if e.user_pinned), default=0)
    for node in live[-1].node.path():
        if node.weight > sum(e.position > node.start for e in live):
            return None
        if node.segments:
            last = node.segments[-1]
            if last.start >= pinned:
                return Spare(node)
            cuttable = live[-1].checkpoint.namespace in tree.splitters
            return Spare(node, pinned) if last.end > pinned and cuttable else None
    return None


def bytes_to_stay(entries: Iterable[Entry], path: Match | None, loose: Container[Entry]) -> int:
    """What stays when all has gone that may: these checkpoints with what leads to them, and a path's tokens.

    `loose`: those whose segments may go, up to what the user pinned.
    """
    tokens: dict[Node, int] = {} if path is None else {n: min(n.end, path.length) for n in path.path}
    attention: dict[Node, tuple[int, bool]] = {}  # up to where, and whether a segment that goes on is whole
    n_bytes, nowhere = 0, (0, False)
    for entry in entries:
        n_bytes += entry.nbytes
        for node in () if entry.node is None else entry.node.path():
            end = min(node.end, entry.position)
            needed = (end, end == node.end or entry not in loose)
            attends = entry.user_pinned or entry not in loose
            if tokens.get(node, 0) >= end and (not attends or attention.get(node, nowhere) >= needed):
                break  # whoever needs this needs all above
            tokens[node] = max(tokens.get(node, 0), end)
            if attends:
                attention[node] = max(attention.get(node, nowhere), needed)
    for node, (end, whole) in attention.items():
        for segment in (s for s in node.segments if s.start < end):
            stop = segment.end if whole else min(segment.end, end)
            n_bytes += segment.nbytes * (stop - segment.start) // (segment.end - segment.start)
            tokens[node] = max(tokens[node], stop)
    return n_bytes + ID_BYTES * sum(end - node.start for node, end in tokens.items())


class LivePath(list[Entry]):
    """The checkpoints of the live path, shallowest first; unlike a list's, its end can be noticed."""

    def discard(self, entry: Entry) -> None:
        """It is gone, if it was one of them."""
        if _at(self, entry.position) is entry:
            del self[bisect_left(self, entry.position, key=_position)]


class Thinning:
    """Where the live path is thinned out, as its checkpoints go one by one: where one is missed least.

    Losses are worked out once, and anew only beside what went, for thousands may have to go at once. Holds no
    checkpoints: their bytes would not be counted.
    """

    def __init__(self, live: Sequence[Entry], incoming: int | None) -> None:
        """`incoming`: position of the one room is made for; None: it is going to be the deepest."""
        self._incoming = incoming
        self._named: int | None = None
        self._worth = {e.position: _likely(e) for e in live}
        positions = sorted({*self._worth, incoming or live[-1].position + 1})
        self._first, self._tip = positions[0], positions[-1]
        self._before = dict(zip(positions, [0, *positions], strict=False))
        self._after = dict(pairwise(positions))
        self._line = [(self._loss(p), p) for p in self._worth if self._first < p < self._tip]
        heapify(self._line)

    def goes_on(self, live: Sequence[Entry], incoming: int | None) -> bool:
        """Of the path that this was made for nothing went but what was named last, between its ends."""
        if incoming != self._incoming:
            return False
        if self._named is not None and len(live) == len(self._worth) - 1 and _at(live, self._named) is None:
            self._closed_up(self._named)
        self._named = None
        last = live[-1].position + 1 if live and incoming is None else self._tip
        return len(live) == len(self._worth) and last == self._tip

    def victim(self, live: Sequence[Entry]) -> Entry | None:
        """The one that is missed least; None if none may go.

        The first one (a system prompt's end: every later chat shares it) goes last, the deepest before it.
        """
        stay: list[tuple[float, int]] = []
        found: Entry | None = None
        while found is None and self._line:
            loss, position = self._line[0]
            entry = _at(live, position)
            if entry is None or loss != self._loss(position):
                heappop(self._line)
            elif entry.pins or entry.user_pinned:
                stay.append(heappop(self._line))
            else:
                found, self._named = entry, position
        for each in stay:  # until they are let go
            heappush(self._line, each)
        return found or next((e for e in live if not e.pins and not e.user_pinned), None)

    def _closed_up(self, position: int) -> None:
        """The gap of one that went is its neighbours' now."""
        del self._worth[position]
        if position == self._incoming:
            return  # another one comes there
        before, after = self._before.pop(position), self._after.pop(position)
        self._before[after], self._after[before] = before, after
        for neighbour in (before, after):
            if self._first < neighbour < self._tip and neighbour in self._worth:
                heappush(self._line, (self._loss(neighbour), neighbour))

    def _loss(self, position: int) -> float:
        """Tokens decoded again without it, relative to what a divergence there costs anyway."""
        gap = self._after[position] - self._before[position]
        return self._worth[position] * gap / (self._tip - position)


def _likely(entry: Entry) -> float:
    return LIKELY_WORTH if entry.marked or entry.checkpoint.logits is not None else 1.0


def _at(live: Sequence[Entry], position: int) -> Entry | None:
    """The checkpoint of a path at a position."""
    at = bisect_left(live, position, key=_position)
    return live[at] if at < len(live) and live[at].position == position else None


def _position(entry: Entry) -> int:
    return entry.position
