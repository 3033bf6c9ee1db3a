"""A radix tree of evaluated token paths with their checkpoints and segments.

Edges are compressed: a node holds the tokens of its edge as bytes, which are compared all at once.
Checkpoints are indexed by position inside the edge that covers them, so a checkpoint never forces a split.
A segment lies inside one edge, is cut where its edge is, and is kept for the checkpoints behind its start.
Each namespace has a root of its own, so that state of another model or context shape can never match.

All its bytes count toward the budget of RAM.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamahybrid.prompt_cache.base import Checkpoint, Segment, Tokens, clipped
from llamahybrid.prompt_cache.guard import Pause
from llamahybrid.prompt_cache.nodes import (
    ENTRY_BYTES,
    ID_BYTES,
    IDS,
    NODE_BYTES,
    Entry,
    Match,
    Node,
    common_prefix,
    first_id,
    ids_of,
    token_at,
    tokens_to,
)


@dataclass(eq=False)
class Cut(Pause):
    """A segment is cut in two first: its bytes are copied."""

    namespace: str
    segment: Segment
    path: Tokens
    """The tokens before its end."""
    position: int

    def spend(self, store: Any) -> None:
        """Cut it, and have the store take the parts."""
        store.exchange_parts(self, self.parts())

    def parts(self) -> tuple[Segment, ...]:
        """The two parts; none of a damaged segment, nor where there is no memory for them."""
        whole = self.segment
        ranges = (whole.start, self.position), (self.position, whole.end)
        try:
            return tuple(whole.split.parts(whole, self.path, ranges)) if whole.split else ()
        except (ValueError, MemoryError):
            return ()


class Tree:
    """Token paths of every namespace with their checkpoints; keeps exact byte counts."""

    def __init__(self, damaged: int = 0) -> None:
        self._roots: dict[str, Node] = {}
        self._nodes: OrderedDict[Node, None] = OrderedDict()  # oldest use first
        self._entries: OrderedDict[Entry, None] = OrderedDict()  # the next to be looked at first
        self.requests = 0
        """Requests planned so far: the clock of values."""
        self.damaged = damaged
        """Segments that went because they could not be cut in two."""
        self.token_bytes = 0
        self.entry_bytes = 0
        self.segments = 0
        """Pieces of attention."""
        self.segment_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, node: Node) -> bool:
        return node in self._nodes

    def __del__(self) -> None:
        """Nodes and checkpoints name each other: their bytes would stay until Python looks for cycles."""
        for entry in getattr(self, "_entries", ()):  # an interrupt may come before there are any
            entry.node = None
        for node in getattr(self, "_nodes", ()):
            node.parent, node.children = None, {}

    @property
    def path_bytes(self) -> int:
        """Bytes of all nodes and their token ids."""
        return self.token_bytes + NODE_BYTES * len(self._nodes)

    @property
    def index_bytes(self) -> int:
        """Bytes of nodes, their token ids, and what the tree notes of checkpoints."""
        return self.path_bytes + ENTRY_BYTES * len(self)

    @property
    def nbytes(self) -> int:
        """Bytes of all that the tree holds."""
        return self.index_bytes + self.entry_bytes + self.segment_bytes

    def entries(self) -> Iterator[Entry]:
        """Checkpoints, the longest unused first, but for those that were moved to the end."""
        return iter(self._entries)

    def to_the_end(self, entries: Iterable[Entry]) -> None:
        """Move checkpoints behind all others."""
        for entry in entries:
            self._entries.move_to_end(entry)

    def oldest_nodes(self) -> Iterator[Node]:
        """Nodes, the longest unused first."""
        return iter(self._nodes)

    def newest_nodes(self) -> Iterator[Node]:
        """Nodes, the last used first."""
        return reversed(self._nodes)

    def match(self, namespace: str, tokens: Tokens) -> Match:
        """Follow `tokens` from the root of `namespace` as far as the tree knows them."""
        return self.follow(namespace, ids_of(tokens))

    def follow(self, namespace: str, ids: bytes) -> Match:
        """Match tokens as `ids_of` has them, edge by edge, as bytes: a path may have thousands of edges."""
        node, path, at = self._roots.get(namespace), list[Node](), 0
        while node is not None and ids.startswith(node.edge, at):
            at += len(node.edge)
            node = node.children.get(first_id(ids, at)[0]) if at < len(ids) else None
            path += [] if node is None else [node]
        length = at // ID_BYTES
        if node is not None:
            length += common_prefix(np.frombuffer(node.edge, IDS), np.frombuffer(ids, IDS, offset=at))
        return Match(length, tuple(path))

    def touch(self, match: Match) -> None:
        """Mark a matched path as used now."""
        for node in match.path:
            node.seen = self.requests
            self._nodes.move_to_end(node)

    def visit(self, match: Match, entries: Sequence[Entry]) -> None:
        """A request comes along a path with these checkpoints: the deepest one's, and passing the others."""
        self.requests += 1
        for entry in entries:
            entry.seen, entry.abandoned = self.requests, False
            entry.passes += 1
        if entries:
            entries[-1].passes -= 1
            entries[-1].hits += 1
        for entry in match.left_behind():
            entry.abandoned = True
        match.go_on()

    def insert(self, namespace: str, tokens: Tokens) -> Match:
        """Add a token path (the tokens are copied) and mark it as used now; returns the whole path."""
        match = self.match(namespace, tokens)
        if match.length < len(tokens):
            match = self.extend(namespace, match, ids_of(tokens[match.length :]))
        self.touch(match)
        return match

    def extend(self, namespace: str, match: Match, ids: bytes) -> Match:
        """Append tokens (see `ids_of`) where a match ended, to a leaf or as a branch; the whole path.

        No segment crosses the place of a branch: see `require_branch`.
        """
        length, path = match.length + len(ids) // ID_BYTES, match.path
        self.token_bytes += len(ids)
        if path:
            node = path[-1]
            if match.length < node.end:
                node = self._split(node, match.length)
                path = (*path[:-1], node)
            elif not node.children:
                node.edge += ids
                return Match(length, path)
        else:
            node = self._roots.setdefault(namespace, Node(None, 0, b""))
        child = Node(node, node.end, ids)
        node.children[token_at(ids)] = child
        self._nodes[child] = None
        return Match(length, (*path, child))

    def attach(self, match: Match, checkpoint: Checkpoint, marked: bool = False) -> Entry:
        """Index a checkpoint on an inserted path; its place must be free."""
        node = next(n for n in match.path if n.start < checkpoint.position <= n.end)
        entry = Entry(checkpoint, node, marked, born=self.requests, seen=self.requests)
        node.entries[checkpoint.position] = entry
        for above in node.path():
            above.weight += 1
        self._entries[entry] = None
        self.entry_bytes += entry.nbytes
        return entry

    def detach(self, entry: Entry) -> None:
        """Take a checkpoint out; its token path stays remembered until it is trimmed."""
        assert entry.node is not None
        del entry.node.entries[entry.position]
        for above in entry.node.path():
            above.weight -= 1
        entry.node = None
        del self._entries[entry]
        self.entry_bytes -= entry.nbytes

    def store(self, match: Match, *segments: Segment) -> bool:
        """Index segments on an inserted path; False unless all ranges are free, each within one edge.

        An edge on which they would overlap, or that they would leave, keeps what it has.
        """
        new = defaultdict[Node, list[Segment]](list)
        for segment in segments:
            at = bisect_right(match.path, segment.start, key=lambda node: node.start)
            if at:
                new[match.path[at - 1]].append(segment)
        stored = 0
        for node, added in new.items():
            together = sorted([*node.segments, *added], key=lambda s: s.start)
            ends = [*(s.start for s in together[1:]), node.end]
            if all(s.end <= end for s, end in zip(together, ends, strict=True)):
                self._replace(node, together)
                stored += len(added)
        return stored == len(segments)

    def fill(self, match: Match, path: Tokens, segments: Iterable[Segment]) -> None:
        """Store the parts of segments of a path that its edges lack; what cannot be cut counts as damaged."""
        missing, parts = match.missing(len(path)), list[Segment]()
        for segment in segments:
            for start, end in clipped(missing, segment.end, segment.start):
                try:
                    part = segment.part(path, start, end)
                except (ValueError, MemoryError):
                    self.damaged += 1
                    continue
                parts += [] if part is None else [part]
        self.store(match, *parts)

    def require_cut(self, namespace: str, match: Match, position: int) -> None:
        """Raise Cut where a segment of a path crosses a position of it."""
        for node in match.path:
            for segment in node.segments:
                if segment.start < position < segment.end:
                    raise Cut(namespace, segment, tokens_to(node)[: segment.end], position)

    def require_branch(self, namespace: str, match: Match, total: int) -> None:
        """Raise Cut where a path of `total` tokens leaves what is known of it inside a segment."""
        if match.length < total:
            self.require_cut(namespace, match, match.length)

    def exchange(self, cut: Cut, parts: Sequence[Segment]) -> None:
        """Replace a segment by its parts, as far as a checkpoint needs them; harmless if it is gone."""
        path = self.match(cut.namespace, cut.path).path
        node = next((node for node in path if cut.segment in node.segments), None)
        if node is not None:
            self.damaged += cut.segment.split is not None and not parts
            at = node.segments.index(cut.segment)
            self._replace(node, [*node.segments[:at], *parts, *node.segments[at + 1 :]])
            self._drop_bare(node)

    def path_of(self, entry: Entry) -> Tokens:
        """The tokens before a checkpoint that is in the tree, shape (position,)."""
        assert entry.node is not None
        return tokens_to(entry.node)[: entry.position]

    def namespaces(self) -> list[str]:
        """Return the namespaces that have any path."""
        return list(self._roots)

    def leaves(self, namespace: str) -> Iterator[Node]:
        """Yield the ends of the paths of a namespace."""
        ahead = [self._roots[namespace]] if namespace in self._roots else []
        while ahead:
            node = ahead.pop()
            ahead += node.children.values()
            if not node.children:
                yield node

    def root(self, namespace: str) -> Node:
        """Return the root of a namespace. Raises KeyError for one without paths."""
        return self._roots[namespace]

    def prune(self, node: Node) -> None:
        """Drop the segments without a checkpoint behind them, from `node` upward."""
        for above in node.path():
            self._drop_bare(above)
            if above.weight:
                break

    def shorten(self, node: Node) -> None:
        """Drop the deepest segment of a node."""
        self._replace(node, node.segments[:-1])

    def remove_segment(self, segment: Segment) -> bool:
        """Drop exactly this segment object; False if it is not there."""
        node = next((n for n in self._nodes if any(s is segment for s in n.segments)), None)
        if node is None:
            return False
        self._replace(node, [s for s in node.segments if s is not segment])
        return True

    def find(self, checkpoint: Checkpoint) -> Entry | None:
        """The entry that holds exactly this checkpoint object."""
        return next((e for e in self._entries if e.checkpoint is checkpoint), None)

    def trim(self, leaf: Node, needed: int = 0) -> None:
        """Cut the `tail` off a leaf; an empty leaf goes, and its parent closes up."""
        first, tail = token_at(leaf.edge), ID_BYTES * leaf.tail(needed)
        self.token_bytes -= tail
        if tail < len(leaf.edge):
            leaf.edge = leaf.edge[: len(leaf.edge) - tail]
            leaf.prompts = {p for p in leaf.prompts if p <= leaf.end}
            return
        parent = leaf.parent
        assert parent is not None
        del self._nodes[leaf]
        del parent.children[first]
        if parent.parent is None:
            self._roots = {name: root for name, root in self._roots.items() if root.children}
        elif len(parent.children) == 1:
            self._merge(parent)

    def _drop_bare(self, node: Node) -> None:
        if bare := node.bare():
            self._replace(node, node.segments[:-bare])

    def _replace(self, node: Node, segments: list[Segment]) -> None:
        """Give a node other segments, and count them."""
        self.segments += len(segments) - len(node.segments)
        self.segment_bytes += sum(s.nbytes for s in segments) - sum(s.nbytes for s in node.segments)
        node.segments = segments

    def _split(self, node: Node, position: int) -> Node:
        """Divide an edge at `position`; returns the new upper node, `node` keeps the lower part."""
        assert node.parent is not None
        cut = ID_BYTES * (position - node.start)
        upper = Node(node.parent, node.start, node.edge[:cut], seen=node.seen)
        upper.entries = {p: e for p, e in node.entries.items() if p <= position}
        for entry in upper.entries.values():
            entry.node = upper
        upper.segments = [s for s in node.segments if s.end <= position]
        node.segments = [s for s in node.segments if s.start >= position]
        upper.prompts = {p for p in node.prompts if p <= position}
        node.prompts -= upper.prompts
        upper.weight, node.weight = node.weight, node.weight - len(upper.entries)
        node.parent.children[token_at(upper.edge)] = upper
        node.entries = {p: e for p, e in node.entries.items() if p > position}
        node.edge = node.edge[cut:]
        node.start, node.parent = position, upper
        upper.children = {token_at(node.edge): node}
        self._nodes[upper] = None
        return upper

    def _merge(self, node: Node) -> None:
        """Join a node with its only child."""
        (child,) = node.children.values()
        node.edge += child.edge
        node.entries |= child.entries
        node.prompts |= child.prompts
        node.segments += child.segments
        for entry in child.entries.values():
            entry.node = node
        node.children = child.children
        for grandchild in node.children.values():
            grandchild.parent = node
        del self._nodes[child]
