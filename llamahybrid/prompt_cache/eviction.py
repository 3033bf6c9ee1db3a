"""What goes first when the budget is full: what is worth least per byte (`value`), live or not.

Segments go with the last checkpoint that needs them. Where only the live path is left, its spare segments go
before its checkpoints, and of these the one whose loss costs least on the ladder of gaps that grow with the
distance from the tip. Pinned entries never go, nor does the attention before what the user pinned.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
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

    def learn(self, tree: Tree, match: Match, entries: Sequence[Entry]) -> None:
        """See `Eviction.learn`."""
        self.value.learn(tree, match, entries)

    def victim(
        self, tree: Tree, path: Match | None, live: Sequence[Entry], incoming: int | None, thin: bool
    ) -> Victim | None:
        """See `Eviction.victim`."""
        entry = self._least(tree, set(live)) if len(tree) > len(live) else None
        if entry is not None:
            return bare_tail(tree, path, entry) or entry
        if (tail := bare_tail(tree, path, None)) or not thin:
            return tail
        return spare_segments(tree, live) or ladder_victim(live, incoming)

    def going_next(self, tree: Tree, count: int) -> list[Entry]:
        """The checkpoints worth least of those that are looked at next, which changes nothing."""
        ranked = sorted(tree.next_in_line(LOOKS), key=lambda e: self.value.of(e, tree.requests))
        return [e for e in ranked if not e.pins and not e.user_pinned][:count]

    def _least(self, tree: Tree, on_path: set[Entry]) -> Entry | None:
        """The least worth of those looked at, live or not; None if no other than live ones may go."""
        for _ in range(0, len(tree), LOOKS - WORST):
            ranked = sorted(tree.next_in_line(LOOKS), key=lambda e: self.value.of(e, tree.requests))
            free = [e for e in ranked if not e.pins and not e.user_pinned]
            stay = set(free[:WORST])
            tree.to_the_end(e for e in ranked if e not in stay)
            if not on_path.issuperset(free):
                return free[0]
        return None


def bare_tail(tree: Tree, path: Match | None, entry: Entry | None) -> Tail | None:
    """Tokens that nothing needs, the longest unused first, if they are to go before `entry`."""
    if entry is None:
        nodes = tree.oldest_nodes()
    elif tree.token_bytes * TOKENS_SHARE > tree.entry_bytes + tree.segment_bytes:
        nodes = (n for n in islice(tree.oldest_nodes(), OLDEST_PATHS) if n.last_used < entry.last_used)
    else:
        return None
    leaf = next((n for n in nodes if n.tail(path.needs(n) if path else 0)), None)
    return None if leaf is None else Tail(leaf)


def spare_segments(tree: Tree, live: Sequence[Entry]) -> Spare | None:
    """The deepest segment of the live path that no checkpoint off the path needs, nor one the user pinned.

    `live`: the path's checkpoints, shallowest first.
    """
    if not live or live[-1].node is None:
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


def ladder_victim(live: Sequence[Entry], incoming: int | None) -> Entry | None:
    """The checkpoint of the live path that is missed least.

    `live`: the path's checkpoints, shallowest first. `incoming`: position of the one room is made for; None:
    it is going to be the deepest. The first one (a system prompt's end: every later chat shares it) goes
    last, the deepest before it.
    """
    free = [e for e in live if not e.pins and not e.user_pinned]
    if not free:
        return None
    positions = sorted({*(e.position for e in live), incoming or live[-1].position + 1})
    tip = positions[-1]
    before = dict(zip(positions, [0, *positions], strict=False))
    after = dict(pairwise(positions))

    def loss(entry: Entry) -> float:
        """Tokens decoded again without the entry, relative to what a divergence there costs anyway."""
        gap = after[entry.position] - before[entry.position]
        worth = LIKELY_WORTH if entry.marked or entry.checkpoint.logits is not None else 1.0
        return worth * gap / (tip - entry.position)

    middle = [e for e in free if positions[0] < e.position < tip]
    return min(middle, key=loss) if middle else free[0]
