"""A view of a cache for people: conversations as a tree, their parts in RAM and on disk, the next evictions.

RAM and disk are read one after the other, each under its lock for a short time: edges are shared, not copied,
and of many branches the last used ones are taken. Then both are put into one tree, so that tokens which
conversations share are shown once. Looking makes nothing older or younger.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, groupby, islice
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from llamahybrid.prompt_cache.base import Tokens
from llamahybrid.prompt_cache.nodes import ID_BYTES, Node, tokens_of
from llamahybrid.prompt_cache.tier import Placed
from llamahybrid.prompt_cache.tree import Tree

if TYPE_CHECKING:
    from llamahybrid.prompt_cache.cache import PromptCache
    from llamahybrid.prompt_cache.store import RamStore

Tier: TypeAlias = Literal["ram", "disk"]

MOST_BRANCHES = 512
"""Of an outline, and of the branches in RAM that are looked at for one."""

LOOK_SECONDS = 0.5
"""Longest time in which the disk is read for an outline."""

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
    goes_next: list[Tier] = field(default_factory=list)
    """Tiers that evict something here next."""
    idle: int | None = None
    """Requests since the last one along it; None: none since the process began."""
    more: int = 0
    """Branches right behind it that were looked at and are not shown."""
    why: dict[int, str] = field(default_factory=dict)
    """Checkpoints on disk by position, and why each is kept."""

    @property
    def end(self) -> int:
        """Tokens up to its end."""
        return self.start + len(self.ids) // ID_BYTES


@dataclass(frozen=True)
class CacheOutline:
    """Branches of a cache, each after the one before it on its path."""

    branches: tuple[Branch, ...]
    more: int = 0
    """Further conversations, without a first token in common with those shown."""


class _Piece(NamedTuple):
    """Something stored for the tokens of a path up to `end`; or only the path."""

    tier: Tier
    namespace: str
    edges: tuple[bytes, ...]
    """The token ids of the path, those behind `end` among them."""
    end: int
    kept: Kept = Kept()
    goes: bool = False
    """Evicted next."""
    why: str = ""
    """Reason of a checkpoint on disk, see `blocks.Why`."""
    idle: int | None = None
    """See `Branch.idle`."""


Shown: TypeAlias = Callable[[str], bool]
"""True for a namespace that is shown."""


def outline(
    cache: PromptCache,
    live: Sequence[tuple[str, Tokens]] = (),
    shown: Shown = lambda _: True,
    limit: int = MOST_BRANCHES,
) -> CacheOutline:
    """Return the branches of a cache, at most `limit`. `shown`: filter of namespaces.

    `live`: the sequences in slots, (namespace, tokens). They only mark stored branches, and none of their own
    tokens is shown, which may belong to another tenant by now.
    """
    in_ram, conversations = cache.look(lambda store: _in_ram(store, shown))
    placed, going = ([], b"") if cache.disk is None else cache.disk.glance(MOST_BRANCHES, LOOK_SECONDS)
    on_disk = _on_disk([each for each in placed if shown(each[0])], going)
    return _outline([*on_disk, *in_ram], limit, live, conversations)


def outline_of_places(places: Sequence[Placed], going: bytes, limit: int = MOST_BRANCHES) -> CacheOutline:
    """Return the branches of a folder, the newest place first. `going`: key of the record that goes next."""
    return _outline(_on_disk(places, going), limit)


def _in_ram(store: RamStore, shown: Shown) -> tuple[list[_Piece], int]:
    """Return pieces of the branches used last, those that go next at the end; the number of conversations."""
    tree, going = store.tree, store.eviction.going_next(store.tree, store.held(), NEXT)
    roots: dict[Node | None, str] = {tree.root(name): name for name in tree.namespaces() if shown(name)}

    def pieces_of(node: Node) -> Iterator[_Piece]:
        path = list(node.path())[::-1]
        if path[0].parent in roots:
            name, edges = roots[path[0].parent], tuple(above.edge for above in path)
            for entry in node.entries.values():
                prompts, pinned = int(entry.checkpoint.logits is not None), int(entry in store.kept)
                kept = Kept(1, prompts, pinned, 0, entry.nbytes)
                yield _Piece("ram", name, edges, entry.position, kept, entry in going)
            attention = Kept(attention=len(node.segments), nbytes=sum(s.nbytes for s in node.segments))
            idle = tree.requests - node.seen if node.seen else None
            yield _Piece("ram", name, edges, node.end, attention, idle=idle)

    first = [entry.node for entry in going if entry.node is not None]
    newest = (list(pieces_of(node)) for node in dict.fromkeys(chain(first, tree.newest_nodes())))
    found = list(islice((pieces for pieces in newest if pieces), MOST_BRANCHES))
    begun = sum(len(root.children) for root in roots if root is not None)
    return list(chain.from_iterable(reversed(found))), begun


def _on_disk(places: Sequence[Placed], going: bytes) -> Iterator[_Piece]:
    """Yield pieces of places, the newest of which are given first and come last."""
    told = set[bytes]()  # attention of which several checkpoints have need
    for namespace, ids, items in sorted(
        reversed(places), key=lambda place: going in {i.key for i in place[2]}
    ):
        for item in (item for item in items if item.key not in told):
            told.add(item.key)
            point = int(item.is_checkpoint)
            kept = Kept(point, int(item.logits), 0, 1 - point, item.nbytes)
            why = item.node.why.name.lower() if item.node and item.node.why is not None else ""
            yield _Piece("disk", namespace, (ids,), item.end, kept, item.key == going, why)


def _outline(
    pieces: Iterable[_Piece],
    limit: int,
    live: Sequence[tuple[str, Tokens]] = (),
    conversations: int = 0,
) -> CacheOutline:
    """Put pieces of all tiers into one tree, and return its branches that lead to the last ones."""
    tree, paths = Tree(), list[tuple[str, bytes, list[_Piece]]]()
    for (name, edges), same in groupby(pieces, key=lambda piece: (piece.namespace, piece.edges)):
        paths.append((name, b"".join(edges), list(same)))
        tree.insert(name, tokens_of(paths[-1][1]))
    names: dict[Node | None, str] = {tree.root(name): name for name in tree.namespaces()}
    taken: dict[Node | None, Branch] = {}
    for node in tree.newest_nodes():
        *_, top = path = list(node.path())
        for above in reversed(path):
            if above not in taken and len(taken) < limit:
                taken[above] = Branch(names[top.parent], above.start, above.edge)
    for name, ids, same_path in paths:
        nodes = tree.follow(name, ids).path
        for piece in same_path:
            _count(taken, piece, nodes[: bisect_left(nodes, piece.end, key=lambda node: node.start)])
    for number, (name, tokens) in enumerate(live):
        for branch in (taken[node] for node in tree.match(name, tokens).path if node in taken):
            branch.slots.append(number)
    roots = [child for name in tree.namespaces() for child in tree.root(name).children.values()]
    shown = sum(root in taken for root in roots)
    return CacheOutline(tuple(_in_order(roots, taken)), max(conversations, len(roots)) - shown)


def _count(branches: dict[Node | None, Branch], piece: _Piece, path: Sequence[Node]) -> None:
    """Add a piece to the branches of its path."""
    for branch in (branches[node] for node in path if node in branches):
        if piece.idle is not None:
            branch.idle = piece.idle if branch.idle is None else min(branch.idle, piece.idle)
    if (end := branches.get(path[-1])) is None:
        return
    setattr(end, piece.tier, getattr(end, piece.tier) + piece.kept)
    if piece.why:
        end.why[piece.end] = piece.why
    if piece.goes and piece.tier not in end.goes_next:
        end.goes_next.append(piece.tier)


def _in_order(roots: Sequence[Node], branches: dict[Node | None, Branch]) -> Iterator[Branch]:
    """Yield branches, each after the one before it on its path; used ones first, then by last use."""

    def ranked(nodes: Iterable[Node]) -> list[Node]:
        """The shown ones, the first to be yielded last."""

        def rank(node: Node) -> tuple[bool, float]:
            branch = branches[node]
            return not branch.slots, float("inf") if branch.idle is None else branch.idle

        return sorted((node for node in nodes if node in branches), key=rank, reverse=True)

    ahead, numbers = ranked(roots), count()
    while ahead:
        node, number = ahead.pop(), next(numbers)
        below = ranked(node.children.values())
        branches[node].more = len(node.children) - len(below)
        for child in below:
            branches[child].parent = number
        yield branches[node]
        ahead += below
