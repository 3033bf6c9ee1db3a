"""A view of a cache for people: conversations as a tree, their parts in RAM and on disk, the next evictions.

RAM and disk are read one after the other, each under its lock for a short time: edges are shared, not copied,
and of many branches the last used ones are taken and the others counted. Then both are put into one tree, so
that tokens which conversations share are shown once. Looking makes nothing older or younger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, takewhile
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from llamahybrid.prompt_cache.base import Tokens
from llamahybrid.prompt_cache.nodes import ID_BYTES, Node
from llamahybrid.prompt_cache.tier import Placed
from llamahybrid.prompt_cache.tree import Tree

if TYPE_CHECKING:
    from llamahybrid.prompt_cache.cache import PromptCache
    from llamahybrid.prompt_cache.store import RamStore

Tier: TypeAlias = Literal["ram", "disk"]

MOST_BRANCHES = 512
"""Of each tier."""

LOOK_SECONDS = 0.5
"""Longest wait for the disk."""

NEXT = 3
"""Checkpoints that are marked as the next to be evicted."""


@dataclass(frozen=True)
class Kept:
    """Contents of one edge in RAM, or on disk."""

    checkpoints: int = 0
    prompts: int = 0
    """Checkpoints with logits: a prompt ended there."""
    pinned: int = 0
    """Checkpoints that the user pinned."""
    attention: int = 0
    """Pieces of attention that end on it."""
    nbytes: int = 0
    """Bytes of all these."""

    def __add__(self, other: Kept) -> Kept:
        return Kept(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass
class Branch:
    """Tokens that conversations have in common, up to where they part."""

    namespace: str
    start: int
    """Tokens before it."""
    ids: bytes
    """Its tokens, see `nodes.ids_of`."""
    parent: int = -1
    """Index of the branch before it; -1: it begins a conversation."""
    ram: Kept = Kept()
    disk: Kept = Kept()
    slots: list[int] = field(default_factory=list)
    """Live sequences that run along it, by number."""
    going: dict[Tier, int] = field(default_factory=dict)
    """Tiers that evict something here next; 1: before all else."""
    idle: int | None = None
    """Requests since the last one along it; None: none since the process began."""
    hidden: dict[int, int] = field(default_factory=dict)
    """Branches that are not shown, by the position at which they begin, of the tier that has most of them."""
    why: dict[int, str] = field(default_factory=dict)
    """Checkpoints on disk by position, and why each is kept."""

    @property
    def end(self) -> int:
        """Tokens up to its end."""
        return self.start + len(self.ids) // ID_BYTES

    @property
    def goes_next(self) -> list[Tier]:
        """Tiers that evict something here next, in the order of eviction."""
        return sorted(self.going, key=lambda tier: self.going[tier])

    @property
    def more(self) -> int:
        """Branches behind it that are not shown; a lower bound where tiers have different ones."""
        return sum(self.hidden.values())


@dataclass(frozen=True)
class CacheOutline:
    """Branches of a cache, each after the one before it on its path."""

    branches: tuple[Branch, ...]
    more: int = 0
    """Further conversations, without a first token in common with those shown."""


class _Mark(NamedTuple):
    """Something stored for the tokens up to `end`."""

    end: int
    rank: int
    """1: evicted first; 0: not soon."""
    kept: Kept
    why: str = ""
    """Reason of a checkpoint on disk, see `blocks.Why`."""


class _Edge(NamedTuple):
    """A copy of a node."""

    namespace: str
    path: tuple[bytes, ...]
    """All edges up to its end."""
    start: int
    end: int
    idle: int | None
    children: int
    marks: tuple[_Mark, ...]


class _Glance(NamedTuple):
    """A copy of a tier's tree."""

    tier: Tier
    edges: list[_Edge]
    conversations: int


Shown: TypeAlias = Callable[[str], bool]
"""True for a namespace that is shown."""


def _glance(
    tier: Tier,
    tree: Tree,
    shown: Shown,
    limit: int,
    marks: Callable[[Node], Iterable[_Mark]],
    first: Iterable[Node],
) -> _Glance:
    """Return the branches used last, at most `limit`, those that lead to the nodes of `first` before all."""
    names: dict[Node | None, str] = {tree.root(name): name for name in tree.namespaces() if shown(name)}
    conversations = sum(len(root.children) for root in names if root is not None)
    taken = list[Node]()
    for end in chain(first, tree.newest_nodes()):
        path = list(takewhile(lambda node: node not in names, end.path()))
        if path and path[-1].parent in names:
            names.update(dict.fromkeys(path, names[path[-1].parent]))
            taken += reversed(path)
        if len(taken) >= limit:
            break
    edges = list[_Edge]()
    for node in taken[:limit]:
        ids = tuple(above.edge for above in node.path())[::-1]
        idle = tree.requests - node.seen if tier == "ram" and node.seen else None
        edges.append(
            _Edge(names[node], ids, node.start, node.end, idle, len(node.children), tuple(marks(node)))
        )
    return _Glance(tier, edges, conversations)


def _glance_at_ram(store: RamStore, shown: Shown, limit: int) -> _Glance:
    going = store.eviction.going_next(store.tree, NEXT)
    ranks = {entry: rank for rank, entry in enumerate(going, 1)}

    def marks(node: Node) -> Iterator[_Mark]:
        for entry in node.entries.values():
            prompts = int(entry.checkpoint.logits is not None)
            kept = Kept(1, prompts, int(entry.user_pinned), 0, entry.nbytes)
            yield _Mark(entry.position, ranks.get(entry, 0), kept)
        if node.segments:
            nbytes = sum(s.nbytes for s in node.segments)
            yield _Mark(node.segments[-1].end, 0, Kept(0, 0, 0, len(node.segments), nbytes))

    first = [e.node for e in going if e.node is not None]
    return _glance("ram", store.tree, shown, limit, marks, first)


def _glance_at_places(places: Sequence[Placed], shown: Shown, limit: int, going: bytes = b"") -> _Glance:
    """Copy the tree of the disk. `going`: key of the record that is evicted next, b"" if unknown."""
    tree = Tree()
    there = [each for each in places if shown(each[0])]
    for namespace, tokens, _ in reversed(there):
        tree.insert(namespace, tokens)
    marks, first = dict[Node, list[_Mark]](), dict[Node, None]()
    told = set[bytes]()  # attention of which several checkpoints have need
    for namespace, tokens, items in there:
        path = tree.match(namespace, tokens).path
        for item in (item for item in items if item.key not in told):
            told.add(item.key)
            node = next(node for node in path if item.end <= node.end)
            point, next_ = item.is_checkpoint, item.key == going
            kept = Kept(int(point), int(item.logits), 0, int(not point), item.nbytes)
            why = item.node.why.name.lower() if item.node and item.node.why is not None else ""
            marks.setdefault(node, []).append(_Mark(item.end, int(next_), kept, why))
            first |= {node: None} if next_ else {}
    return _glance("disk", tree, shown, limit, lambda node: marks.get(node, ()), first)


def outline(
    cache: PromptCache,
    live: Sequence[tuple[str, Tokens]] = (),
    shown: Shown = lambda _: True,
    limit: int = MOST_BRANCHES,
) -> CacheOutline:
    """Return the branches of a cache. `shown`: filter of namespaces; `limit`: branches of RAM, and of disk.

    `live`: the sequences in slots, (namespace, tokens). They only mark stored branches, and none of their own
    tokens is shown, which may belong to another tenant by now.
    """
    glances = [cache.look(lambda store: _glance_at_ram(store, shown, limit))]
    if cache.disk is not None:
        places, going = cache.disk.glance(LOOK_SECONDS, max(limit, MOST_BRANCHES))
        glances.append(_glance_at_places(places, shown, limit, going))
    return _joined([glance for glance in glances if glance is not None], live)


def outline_of_places(places: Sequence[Placed], going: bytes, limit: int = MOST_BRANCHES) -> CacheOutline:
    """Return the branches of a folder. `going`: key of the record that is evicted next."""
    return _joined([_glance_at_places(places, lambda _: True, limit, going)], ())


def _joined(glances: Sequence[_Glance], live: Sequence[tuple[str, Tokens]]) -> CacheOutline:
    """Put the trees of all tiers into one."""
    tree, ends = Tree(), list[tuple[Tier, _Edge, Node]]()
    for tier, edges, _ in glances:
        for edge in edges:
            ids = b"".join(edge.path)
            match = tree.follow(edge.namespace, ids)
            if ID_BYTES * match.length < len(ids):
                match = tree.extend(edge.namespace, match, ids[ID_BYTES * match.length :])
            ends.append((tier, edge, match.path[-1]))
    branches = {
        node: Branch(name, node.start, node.edge) for name in tree.namespaces() for node in tree.below(name)
    }
    for tier, edge, node in ends:
        _count(branches, tier, edge, node)
    for number, (name, tokens) in enumerate(live):
        for node in tree.match(name, tokens).path:
            branches[node].slots.append(number)
    begun = max((glance.conversations for glance in glances), default=0)
    shown = sum(len(tree.root(name).children) for name in tree.namespaces())
    return CacheOutline(tuple(_in_order(tree, branches)), max(0, begun - shown))


def _count(branches: dict[Node, Branch], tier: Tier, edge: _Edge, end: Node) -> None:
    """Add the contents of an edge to the branches that cover it; `end`: the node at or behind its end."""

    def at(position: int) -> Node:
        return next(node for node in end.path() if node.start < position)

    for mark in edge.marks:
        branch = branches[at(mark.end)]
        setattr(branch, tier, getattr(branch, tier) + mark.kept)
        if mark.why:
            branch.why[mark.end] = mark.why
        if mark.rank:
            branch.going[tier] = min(mark.rank, branch.going.get(tier, mark.rank))
    node = at(edge.end)
    shown = len(node.children) if node.end == edge.end else 1
    if edge.children > shown:
        hidden = branches[node].hidden
        hidden[edge.end] = max(edge.children - shown, hidden.get(edge.end, 0))
    for node in end.path():
        if edge.idle is not None and edge.start < node.end:
            branch = branches[node]
            branch.idle = edge.idle if branch.idle is None else min(branch.idle, edge.idle)


def _in_order(tree: Tree, branches: dict[Node, Branch]) -> Iterator[Branch]:
    """Yield branches, each after the one before it on its path; used ones first, then by last use."""

    def rank(node: Node) -> tuple[bool, float]:
        branch = branches[node]
        return not branch.slots, float("inf") if branch.idle is None else branch.idle

    numbers = count()
    for name in tree.namespaces():
        ahead = sorted(tree.root(name).children.values(), key=rank, reverse=True)
        while ahead:
            node, number = ahead.pop(), next(numbers)
            for child in node.children.values():
                branches[child].parent = number
            yield branches[node]
            ahead += sorted(node.children.values(), key=rank, reverse=True)
