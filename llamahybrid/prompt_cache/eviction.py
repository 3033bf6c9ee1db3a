"""What goes first when the budget is full.

Off the live path: by age, checkpoints and token tails alike. On it: first the segments that only this path
needs, because its attention is live anyway; then the checkpoint whose loss costs least on the ladder of
gaps that grow with the distance from the tip. Pinned entries never go.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from typing import Protocol, TypeAlias
from dataclasses import dataclass
from llamahybrid.prompt_cache.tree import Entry, Match, Node, Tree


@dataclass(frozen=True)
class Tail:
    """A leaf whose tokens nothing needs."""

    node: Node


@dataclass(frozen=True)
class Spare:
    """A node of the live path whose deepest segment only that path needs."""

    node: Node


Victim: TypeAlias = Entry | Tail | Spare


class Eviction(Protocol):
    """Chooses what goes next."""

    def victim(
        self, tree: Tree, path: Match | None, live: Sequence[Entry], incoming: int | None, ladder: bool
    ) -> Victim | None:
        ...


class ByAge:
    def victim(
        self, tree: Tree, path: Match | None, live: Sequence[Entry], incoming: int | None, ladder: bool
    ) -> Victim | None:
        victim = off_path_victim(tree, path, live)
        if victim is None and ladder and (node := spare_segments(live)):
            return Spare(node)
        if victim is None and ladder:
            victim = ladder_victim(live, incoming)
        return Tail(victim) if isinstance(victim, Node) else victim


LIKELY_WORTH = 4.0
"""Histories diverge at message starts far more often than elsewhere, and a regenerated answer starts at a
prompt's end: such places are worth more than their distance alone says."""


def off_path_victim(tree: Tree, path: Match | None, live: Sequence[Entry]) -> Entry | Node | None:
    """The longest unused thing that the live path does not need: a checkpoint, or a leaf with a bare tail.

    `path`: tokens that must stay. `live`: its checkpoints.
    """
    on_path = set(live)
    entry = next((e for e in tree.oldest_entries() if not e.pins and not e.kept and e not in on_path), None)
    leaf = next((n for n in tree.oldest_nodes() if n.tail(path.keep(n) if path else 0)), None)
    if entry is None or leaf is None:
        return entry or leaf
    return leaf if leaf.last_used < entry.last_used else entry


def spare_segments(live: Sequence[Entry]) -> Node | None:
    """The deepest node of the live path with segments that no checkpoint off the path needs.

    `live`: the path's checkpoints, shallowest first.
    """
    if not live or live[-1].node is None:
        return None
    for node in live[-1].node.path():
        if node.weight > sum(e.position > node.start for e in live):
            return None
        if node.segments:
            return node
    return None


def ladder_victim(live: Sequence[Entry], incoming: int | None) -> Entry | None:
    """The checkpoint of the live path that is missed least.

    `live`: the path's checkpoints, shallowest first. `incoming`: position of the one room is made for; None:
    it is going to be the deepest. The first one (a system prompt's end: every later chat shares it) goes
    last, the deepest before it.
    """
    free = [e for e in live if not e.pins and not e.kept]
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
