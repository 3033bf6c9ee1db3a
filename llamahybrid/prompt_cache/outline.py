"""What a cache holds, to be looked at: conversations as a tree, where each part lies, what would go next.

Taken quickly under the locks, one after the other: edges are shared, not copied, and of many branches the
last used ones are taken and the others counted. RAM, disk and slots are put together afterwards, so that what
conversations have in common is there once. Looking makes nothing older or younger.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from llamahybrid.prompt_cache.base import Tokens
from llamahybrid.prompt_cache.blocks import Kind
from llamahybrid.prompt_cache.eviction import ValueEviction
from llamahybrid.prompt_cache.nodes import ID_BYTES, Match, Node
from llamahybrid.prompt_cache.tier import Placed
from llamahybrid.prompt_cache.tree import Tree, follow

if TYPE_CHECKING:
    from llamahybrid.prompt_cache.cache import PromptCache
    from llamahybrid.prompt_cache.store import RamStore

Tier: TypeAlias = Literal["ram", "disk"]

MOST_BRANCHES = 512
"""Of each tier."""

LOOK_SECONDS = 0.5
"""How long the disk may take to tell what lies there."""

LOOK_AT = 4
"""Times as many children of one node are looked at for the last used ones."""

NEXT = 3
"""Checkpoints that are told to go next."""


@dataclass(frozen=True)
class Kept:
    """What of one edge lies in RAM, or on disk."""

    checkpoints: int = 0
    prompts: int = 0
    """Those of them that have logits: a prompt ended there."""
    pinned: int = 0
    """Those of them that the user pinned."""
    attention: int = 0
    """Pieces of attention that end on it."""
    nbytes: int = 0
    """Bytes of all these."""

    def __add__(self, other: Kept) -> Kept:
        return Kept(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class Branch:
    """Tokens that conversations have in common, up to where they part."""

    parent: int
    """Index of the branch that it goes on from; -1: it begins a conversation."""
    namespace: str
    start: int
    """Tokens before it."""
    ids: bytes
    """Its tokens, see `nodes.ids_of`."""
    ram: Kept
    disk: Kept
    slots: tuple[int, ...] = ()
    """Live sequences that run along it, by number."""
    goes_next: tuple[Tier, ...] = ()
    """Tiers in which something here is what goes next, in the order in which it does."""
    idle: int | None = None
    """Requests since one came along it; None: none since the process began."""
    more: int = 0
    """Branches that go on from it and are not shown; at least, where tiers have different ones."""
    why: tuple[tuple[int, str], ...] = ()
    """Checkpoints on disk by position, and why each is kept."""

    @property
    def end(self) -> int:
        """Tokens up to its end."""
        return self.start + len(self.ids) // ID_BYTES


@dataclass(frozen=True)
class CacheOutline:
    """What a cache holds; each branch comes after the one that it goes on from."""

    branches: tuple[Branch, ...]
    more: int = 0
    """Conversations that share no first token with those shown, counted likewise."""


# -- under the lock --------------------------------------------------------------------------------


class _Mark(NamedTuple):
    """Something that is kept for tokens up to `end`: its rank (1: goes first; 0: not soon), and `Kept`."""

    end: int
    rank: int
    kept: tuple[int, int, int, int, int]
    why: str = ""
    """Of a checkpoint on disk: why it is kept, see `blocks.Why`."""


class _Edge(NamedTuple):
    """A node as it was."""

    parent: int
    namespace: str
    end: int
    ids: bytes
    idle: int | None
    children: int
    marks: tuple[_Mark, ...]


class _Glance(NamedTuple):
    """A tree as it was; edges after those that they go on from."""

    edges: list[_Edge]
    conversations: int


Shown: TypeAlias = Callable[[str], bool]
"""Whether a namespace is shown."""


def _glance(
    tree: Tree,
    shown: Shown,
    limit: int,
    marks: Callable[[Node], Iterable[_Mark]],
    first: Iterable[Node],
    *,
    used: bool,
) -> _Glance:
    """The branches used last, at most `limit`, and those that lead to the nodes of `first`.

    `used`: the tree tells when each was used.
    """
    edges, numbers, order = list[_Edge](), dict[Node | None, int](), count()
    wanted: dict[Node | None, dict[Node, None]] = {}
    for each in first:
        for node in each.path():
            wanted.setdefault(node.parent, {})[node] = None
    line: list[tuple[bool, int, int, Node, str]] = []

    def queue(parent: Node, namespace: str) -> None:
        soon = wanted.get(parent, {})
        for node in dict.fromkeys((*islice(reversed(parent.children.values()), LOOK_AT * limit), *soon)):
            heapq.heappush(line, (node not in soon, -node.last_used, next(order), node, namespace))

    names = [name for name in tree.namespaces() if shown(name)]
    for name in names:
        queue(tree.root(name), name)
    while line and len(edges) < limit:
        *_, node, name = heapq.heappop(line)
        numbers[node] = len(edges)
        idle = tree.requests - node.seen if used and node.seen else None
        parent, children = numbers.get(node.parent, -1), node.children
        edges.append(_Edge(parent, name, node.end, node.edge, idle, len(children), tuple(marks(node))))
        if children:
            queue(node, name)
    return _Glance(edges, sum(len(tree.root(name).children) for name in names))


def _glance_at_ram(store: RamStore, shown: Shown, limit: int) -> _Glance:
    eviction = store.eviction
    going = eviction.going_next(store.tree, NEXT) if isinstance(eviction, ValueEviction) else []
    ranks = {entry: rank for rank, entry in enumerate(going, 1)}

    def marks(node: Node) -> Iterator[_Mark]:
        for entry in node.entries.values():
            prompts = int(entry.checkpoint.logits is not None)
            kept = (1, prompts, int(entry.user_pinned), 0, entry.nbytes)
            yield _Mark(entry.position, ranks.get(entry, 0), kept)
        if node.segments:
            nbytes = sum(s.nbytes for s in node.segments)
            yield _Mark(node.segments[-1].end, 0, (0, 0, 0, len(node.segments), nbytes))

    first = [e.node for e in going if e.node is not None]
    return _glance(store.tree, shown, limit, marks, first, used=True)


def _glance_at_places(places: Sequence[Placed], shown: Shown, limit: int, going: bytes = b"") -> _Glance:
    """What lies on disk. `going`: the key of the record that goes next, where that is known."""
    tree = Tree()
    there = [each for each in places if shown(each[0])]
    for namespace, tokens, _ in reversed(there):
        tree.insert(namespace, tokens)
    marks = dict[Node, list[_Mark]]()
    first: list[Node] = []
    for namespace, tokens, place in there:
        node = tree.match(namespace, tokens).path[-1]
        for item in place.items:
            point, next_ = item.is_checkpoint, item.key == going
            kept = (int(point), int(item.kind == Kind.PROMPT), 0, int(not point), item.nbytes)
            why = item.why.name.lower() if point else ""
            marks.setdefault(node, []).append(_Mark(place.end, int(next_), kept, why))
            first += [node] if next_ else []
    return _glance(tree, lambda _: True, limit, lambda node: marks.get(node, ()), first, used=False)


# -- afterwards ------------------------------------------------------------------------------------


def outline(
    cache: PromptCache,
    live: Sequence[tuple[str, Tokens]] = (),
    shown: Shown = lambda _: True,
    limit: int = MOST_BRANCHES,
) -> CacheOutline:
    """What a cache holds now. `shown`: of which namespaces; `limit`: branches of RAM, and of the disk.

    `live`: the sequences in slots, (namespace, tokens). They only mark what is kept: none of their own tokens
    is shown, so that it does no harm where one of them was another tenant's just then.
    """
    glances: list[tuple[Tier, _Glance | None]] = [
        ("ram", cache.ram.look(lambda store: _glance_at_ram(store, shown, limit)))
    ]
    if cache.disk is not None:
        places, going = cache.disk.glance(LOOK_SECONDS, max(limit, MOST_BRANCHES))
        glances.append(("disk", _glance_at_places(places, shown, limit, going)))
    return _joined(glances, live)


def outline_of_places(places: Sequence[Placed], going: bytes, limit: int = MOST_BRANCHES) -> CacheOutline:
    """What lies at these places of a folder. `going`: the key of the record that goes next."""
    return _joined([("disk", _glance_at_places(places, lambda _: True, limit, going))], ())


@dataclass
class _Sums:
    """What is known of one edge so far."""

    kept: dict[Tier, Kept] = field(default_factory=lambda: {"ram": Kept(), "disk": Kept()})
    slots: list[int] = field(default_factory=list)
    going: dict[Tier, int] = field(default_factory=dict)
    idle: int | None = None
    why: dict[int, str] = field(default_factory=dict)
    branches: dict[int, int] = field(default_factory=dict)
    """How many go on in the tier that has most of them, by position."""

    def more(self, node: Node) -> int:
        """Those of them that are not shown."""
        shown = {node.end: len(node.children)}
        return sum(max(0, n - shown.get(at, 1)) for at, n in self.branches.items())


def _joined(
    glances: Sequence[tuple[Tier, _Glance | None]], live: Sequence[tuple[str, Tokens]]
) -> CacheOutline:
    tree = Tree()
    places: list[list[Node]] = []
    for _, glance in glances:
        nodes: list[Node] = []
        for edge in glance.edges if glance else ():
            if edge.parent < 0:
                match, before = tree.follow(edge.namespace, edge.ids), 0
            else:
                before = edge.end - len(edge.ids) // ID_BYTES
                match = follow(_at(nodes[edge.parent], before), before, edge.ids)
            nodes.append(_extended(tree, edge.namespace, match, edge.ids, before))
        places.append(nodes)
    sums: dict[Node, _Sums] = {}
    for (tier, glance), nodes in zip(glances, places, strict=True):
        for edge, node in zip(glance.edges if glance else (), nodes, strict=True):
            _count(sums, tier, edge, node)
    for number, (name, tokens) in enumerate(live):
        for node in tree.match(name, tokens).path:
            sums.setdefault(node, _Sums()).slots.append(number)
    begun = max((glance.conversations for _, glance in glances if glance), default=0)
    shown = sum(len(tree.root(name).children) for name in tree.namespaces())
    return CacheOutline(tuple(_in_order(tree, sums)), max(0, begun - shown))


def _extended(tree: Tree, namespace: str, match: Match, ids: bytes, before: int = 0) -> Node:
    """The node at the end of tokens, which are added behind what was matched of them; a root for none."""
    known = ID_BYTES * (match.length - before)
    if known < len(ids):
        match = tree.extend(namespace, match, ids[known:])
    return match.path[-1] if match.path else Node(None, 0, b"")


def _at(node: Node, position: int) -> Node:
    """The node whose edge covers a position, from one at or below it: edges are cut as others come."""
    while node.parent is not None and position <= node.start and node.parent.parent is not None:
        node = node.parent
    return node


def _count(sums: dict[Node, _Sums], tier: Tier, edge: _Edge, end: Node) -> None:
    """Note what an edge has at the nodes that cover it."""
    for mark in edge.marks:
        there = sums.setdefault(_at(end, mark.end), _Sums())
        there.kept[tier] += Kept(*mark.kept)
        if mark.why:
            there.why[mark.end] = mark.why
        if mark.rank:
            there.going[tier] = min(mark.rank, there.going.get(tier, mark.rank))
    if edge.children:
        last = sums.setdefault(_at(end, edge.end), _Sums()).branches
        last[edge.end] = max(edge.children, last.get(edge.end, 0))
    node: Node | None = end
    start = edge.end - len(edge.ids) // ID_BYTES
    while edge.idle is not None and node is not None and node.end > start:
        there = sums.setdefault(node, _Sums())
        there.idle = edge.idle if there.idle is None else min(there.idle, edge.idle)
        node = node.parent


def _in_order(tree: Tree, sums: dict[Node, _Sums]) -> Iterator[Branch]:
    """Branches, each after the one that it goes on from, and what is in use or was used last first."""

    def rank(node: Node) -> tuple[bool, float]:
        there = sums.get(node, _Sums())
        return not there.slots, float("inf") if there.idle is None else there.idle

    nothing, numbers = _Sums(), count()
    for name in tree.namespaces():
        ahead = [(-1, n) for n in sorted(tree.root(name).children.values(), key=rank, reverse=True)]
        while ahead:
            parent, node = ahead.pop()
            there, number = sums.get(node, nothing), next(numbers)
            yield Branch(
                parent,
                name,
                node.start,
                node.edge,
                there.kept["ram"],
                there.kept["disk"],
                tuple(there.slots),
                tuple(sorted(there.going, key=lambda tier: there.going[tier])),
                there.idle,
                there.more(node),
                tuple(sorted(there.why.items())),
            )
            ahead += [(number, n) for n in sorted(node.children.values(), key=rank, reverse=True)]
