"""The order of eviction when the budget is full: the least worth per byte (`value`) first.

A segment is evicted with the last checkpoint that needs it, a pinned entry never.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import TypeAlias

from llamahybrid.prompt_cache.nodes import ENTRY_BYTES, ID_BYTES, NODE_BYTES, Entry, Match, Node
from llamahybrid.prompt_cache.tree import Tree
from llamahybrid.prompt_cache.value import ReuseValue

LOOKS = 64
"""Checkpoints compared for one eviction; all of a smaller cache."""

WORST = 16
"""The least worth of these, which are compared again at the next eviction."""

TOKENS_SHARE = 16
"""Tokens without a checkpoint stay while all tokens take at most this part of the stored bytes: they show
which paths return, and where they diverge."""

OLDEST_PATHS = 128
"""Paths compared for tokens without a checkpoint that can be evicted in place of one."""


Victim: TypeAlias = Entry | Node
"""A checkpoint, or a leaf whose last tokens no checkpoint needs."""


class Eviction:
    """An order of eviction: the least value first, among a few checkpoints that are compared in turn."""

    def __init__(self) -> None:
        self.value = ReuseValue()

    def learn(self, tree: Tree, match: Match, entries: Sequence[Entry]) -> None:
        """Note a request, before it follows this path with these checkpoints, shallowest first."""
        self.value.learn(tree, match, entries)

    def victim(self, tree: Tree, path: Match | None, keep: Collection[Entry]) -> Victim | None:
        """Return the next victim; None if nothing may be evicted.

        `path`: tokens that must stay. `keep`: checkpoints; the result is None if there are no others.
        """
        entry = self._least(tree, keep)
        return bare_leaf(tree, path, entry) or entry

    def going_next(self, tree: Tree, count: int) -> list[Entry]:
        """Return the least worth of the checkpoints compared next, without a change."""
        return self._ranked(tree, islice(tree.entries(), LOOKS))[:count]

    def _ranked(self, tree: Tree, line: Iterable[Entry]) -> list[Entry]:
        """Return the checkpoints of a line that may be evicted, the least worth first."""
        free = (e for e in line if not e.in_use and not e.user_pinned)
        return sorted(free, key=lambda entry: self.value.of(entry, tree.requests))

    def _least(self, tree: Tree, keep: Collection[Entry]) -> Entry | None:
        """The least worth of those looked at; None if none may go."""
        for _ in range(0, len(tree), LOOKS - WORST):  # the worst are looked at again
            line = list(islice(tree.entries(), LOOKS))
            ranked = self._ranked(tree, line)
            if len(tree) > LOOKS:
                tree.to_the_end(e for e in line if e not in ranked[:WORST])
            if not all(e in keep for e in ranked):
                return ranked[0]
        return None


def bare_leaf(tree: Tree, path: Match | None, entry: Entry | None) -> Node | None:
    """The longest unused leaf with tokens that nothing needs, if they are to go before `entry`."""
    nodes = tree.oldest_nodes()
    if entry is not None:
        if tree.path_bytes * TOKENS_SHARE <= tree.entry_bytes + tree.segment_bytes:
            return None
        nodes = islice(nodes, OLDEST_PATHS)
    for node in nodes:
        if entry is not None and node.last_used >= entry.last_used:
            break
        if node.ends_bare() and node.tail(path.needs(node) if path else 0):
            return node
    return None


def bytes_to_stay(entries: Iterable[Entry], path: Match | None) -> int:
    """Bytes that stay when all has gone that may: these checkpoints with what leads to them, and a path's
    tokens."""
    tokens: dict[Node, int] = {} if path is None else {n: min(n.end, path.length) for n in path.path}
    attention: dict[Node, int] = {}
    n_bytes = 0
    for entry in entries:
        n_bytes += entry.nbytes + (0 if entry.node is None else ENTRY_BYTES)
        for node in () if entry.node is None else entry.node.path():
            end = min(node.end, entry.position)
            if attention.get(node, 0) >= end:
                break  # whoever needs this needs all above
            attention[node] = end
            tokens[node] = max(tokens.get(node, 0), end)
    for node, end in attention.items():
        for segment in (s for s in node.segments if s.start < end):
            n_bytes += segment.nbytes
            tokens[node] = max(tokens[node], segment.end)
    ids = sum(end - node.start for node, end in tokens.items())
    return n_bytes + ID_BYTES * ids + NODE_BYTES * len(tokens)
