"""The prefixes of stored records as a radix tree: lean, for tens of thousands of them.

A node ends where a record's prefix ends or where prefixes part. Ids are kept as bytes, 4 a token, once for
all that share them. Nothing here is locked, and nothing knows what a record is for.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from llamahybrid.prompt_cache.base import Tokens

ID_BYTES = 4
MOST_THROUGH = 16
"""More segments over the same tokens are of no use, and to go through them all would take its time."""


class Node:
    """An edge and what ends at its end; a root has an empty edge."""

    __slots__ = ("begun", "children", "digest", "edge", "parent", "records", "start", "through", "weight")

    def __init__(self, parent: Node | None, start: int, edge: bytes) -> None:
        self.parent = parent
        self.start = start
        """Tokens from the root to the start of this edge."""
        self.edge = edge
        self.children: dict[int, Node] = {}
        """By the first token of their edge."""
        self.records: list[Stored] = []
        """Those whose prefix ends here."""
        self.begun: dict[Stored, None] = {}
        """Segments that start within this edge."""
        self.through: list[Stored] = []
        """Segments that cover some of this edge, `MOST_THROUGH` of them; none ends inside of it."""
        self.weight = 0
        """Checkpoints here and below."""
        self.digest: bytes | None = None
        """`path_digest` of the prefix, while others may be read from here on."""

    @property
    def end(self) -> int:
        """Tokens from the root to the end of this edge."""
        return self.start + len(self.edge) // ID_BYTES

    def first(self) -> int:
        """The first token of the edge."""
        return _token(self.edge, 0)

    def up(self) -> Iterator[Node]:
        """This node and those above it, the root left out."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def below(self) -> Iterator[Node]:
        """This node and all under it, parents first."""
        nodes = [self]
        while nodes:
            node = nodes.pop()
            yield node
            nodes.extend(node.children.values())

    def ids(self) -> bytes:
        """The whole prefix."""
        return b"".join(reversed([node.edge for node in self.up()]))


class Found:
    """How far ids follow the tree from a root."""

    __slots__ = ("length", "nodes", "rest")

    def __init__(self, length: int, nodes: list[Node], rest: Node | None) -> None:
        self.length = length
        """Tokens in common."""
        self.nodes = nodes
        """Nodes that lie on the ids as a whole, root side first, the root left out."""
        self.rest = rest
        """The node whose edge the ids leave, or end inside of."""

    def touched(self) -> list[Node]:
        """Nodes with at least one token in common."""
        return self.nodes if self.rest is None else [*self.nodes, self.rest]


class Stored:
    """A record as the index knows it."""

    __slots__ = ("key", "kind", "logits", "nbytes", "node", "start")

    def __init__(self, key: str, kind: int, start: int, logits: bool, nbytes: int, node: Node) -> None:
        self.key = key
        self.kind = kind
        self.start = start
        self.logits = logits
        self.nbytes = nbytes
        self.node = node
        """Its prefix ends where this node ends."""

    @property
    def end(self) -> int:
        """Tokens the state belongs to."""
        return self.node.end


def match(root: Node, ids: bytes) -> Found:
    """Follow ids from a root as far as the tree knows them."""
    nodes: list[Node] = []
    node, at = root, 0
    while at < len(ids):
        child = node.children.get(_token(ids, at))
        if child is None:
            break
        if not ids.startswith(child.edge, at):
            return Found((at + _common(child.edge, ids, at)) // ID_BYTES, nodes, child)
        nodes.append(child)
        at += len(child.edge)
        node = child
    return Found(at // ID_BYTES, nodes, None)


def grow(node: Node, ids: bytes) -> Node:
    """The node that ends where `ids` behind `node` end; made if need be."""
    at = 0
    while at < len(ids):
        child = node.children.get(_token(ids, at))
        if child is None:
            child = Node(node, node.end, ids[at:])
            node.children[child.first()] = child
            return child
        common = len(child.edge) if ids.startswith(child.edge, at) else _common(child.edge, ids, at)
        if common < len(child.edge):
            child = _split(child, common)
        at += common
        node = child
    return node


def tidy(node: Node) -> None:
    """Remove what nothing needs from `node` upward: empty leaves, and joints that join only two edges."""
    while node.parent is not None and not node.records:
        parent = node.parent
        if not node.children:
            del parent.children[node.first()]
        elif len(node.children) == 1:
            (child,) = node.children.values()
            parent.children[node.first()] = child
            child.edge, child.start, child.parent = node.edge + child.edge, node.start, parent
            child.begun = {**node.begun, **child.begun}
        else:
            return
        node = parent


def _split(node: Node, cut: int) -> Node:
    """Divide an edge behind `cut` bytes; returns the new upper node."""
    assert node.parent is not None
    upper = Node(node.parent, node.start, node.edge[:cut])
    upper.weight = node.weight
    upper.through = [s for s in node.through if s.start < upper.end]
    upper.begun = {s: None for s in node.begun if s.start < upper.end}
    node.begun = {s: None for s in node.begun if s.start >= upper.end}
    upper.children[_token(node.edge, cut)] = node
    node.parent.children[node.first()] = upper
    node.parent, node.start, node.edge = upper, upper.end, node.edge[cut:]
    return upper


def ids_of(tokens: Tokens) -> bytes:
    """Tokens as the index has them."""
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()


def _token(ids: bytes, at: int) -> int:
    return int.from_bytes(ids[at : at + ID_BYTES], "little", signed=True)


def _common(edge: bytes, ids: bytes, at: int) -> int:
    """Bytes, a multiple of `ID_BYTES`, that an edge has in common with ids from `at` on."""
    n = min(len(edge), len(ids) - at) // ID_BYTES
    differs = np.frombuffer(edge, "<i4", n) != np.frombuffer(ids, "<i4", n, at)
    first = int(differs.argmax()) if n else 0
    return ID_BYTES * (first if n and differs[first] else n)
