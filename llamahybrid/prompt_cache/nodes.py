"""Parts of the tree of token paths: edges, the checkpoints on them, and matches of prompts."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from llamahybrid.prompt_cache.base import Checkpoint, Outside, Segment, Tokens, same_start

LONGEST_TAIL = 32
"""Most tokens that ask for an answer (a role, a mark of thinking); a longer tail is text."""

FOLLOWING = 8
"""Tokens by which a text is known again: fewer occur by accident, more would reach into what changes."""

NODE_BYTES = 1024
"""Memory of a node besides its token ids: 0.8 to 1 KiB measured, with its tables and its places in others."""

ENTRY_BYTES = 1024
"""Memory of a checkpoint besides snapshot and logits, measured likewise."""

ID_BYTES = 4
IDS = np.dtype("<i4")
first_id = struct.Struct("<i").unpack_from
"""(ids, offset in bytes): the token there, in a tuple."""


def ids_of(tokens: Tokens) -> bytes:
    """Tokens as edges and records have them: `ID_BYTES` each, little endian."""
    return np.ascontiguousarray(tokens, dtype=IDS).tobytes()


def tokens_of(ids: bytes) -> Tokens:
    """The same as an array, shape (n,), of its own."""
    return np.frombuffer(ids, IDS).astype(np.int32)


def token_at(ids: bytes, at: int = 0) -> int:
    """The token before which there are `at`."""
    token: int = first_id(ids, ID_BYTES * at)[0]
    return token


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Length of the longest common prefix of two token arrays of shapes (n,) and (m,)."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def lies_on(path: Tokens, prefixes: Iterable[bytes]) -> bool:
    """Return whether a path is the beginning of one of these, given by their ids (`ids_of`)."""
    ids = ids_of(path)
    return any(each.startswith(ids) for each in prefixes)


def pinned_before(pinned: Sequence[Tokens], tokens: Tokens) -> int:
    """Length of the longest of the pinned prefixes that these tokens go on from; 0 if there is none."""
    return max((len(p) for p in pinned if len(p) < len(tokens) and same_start(p, tokens)), default=0)


@dataclass(eq=False, slots=True)
class Entry:
    """A checkpoint in the tree and its users."""

    checkpoint: Checkpoint
    node: Node | None
    """The node whose edge covers the position; None once it was taken out of the tree."""
    marked: bool = False
    """A message, or a marked part of one, starts here."""
    read_from: Outside | None = None
    """The tier from which it was read for a plan that is not made yet."""
    turns: int = 0
    """Prompts that had ended on its path when it was made, its own not among them."""
    born: int = 0
    """Number of the request that made it."""
    seen: int = 0
    """Number of the last request whose path it lay on."""
    hits: int = 0
    """Requests since then for which it was the deepest on their path."""
    passes: int = 0
    """Requests since then whose path went on to a deeper one."""
    abandoned: bool = False
    """A request came along its path and parted from it before here, for the first time there."""

    def take_over(self, old: Entry) -> None:
        """Take over the history of a checkpoint at the same place."""
        self.born, self.hits, self.passes, self.abandoned = old.born, old.hits, old.passes, old.abandoned
        self.turns = old.turns

    @property
    def shallower(self) -> int:
        """Position of the next shallower checkpoint on its path; 0 without one."""
        return 0 if self.node is None else self.node.shallower(self.position)

    @property
    def leads_on(self) -> bool:
        """Return whether a deeper checkpoint goes on from it."""
        node = self.node
        return node is not None and (node.weight > len(node.entries) or max(node.entries) > self.position)

    @property
    def lives(self) -> bool:
        """Return whether a later request came along its path, or its conversation had gone on before."""
        return self.turns > 0 or self.hits > 0 or self.passes > 0

    @property
    def position(self) -> int:
        """Tokens before the checkpoint."""
        return self.checkpoint.position

    @property
    def nbytes(self) -> int:
        """Bytes of snapshot and logits."""
        logits = self.checkpoint.logits
        return self.checkpoint.snapshot.nbytes + (0 if logits is None else logits.nbytes)


@dataclass(eq=False, slots=True)
class Node:
    """An edge and the branching point at its end; a root has an empty edge."""

    parent: Node | None
    start: int
    """Tokens from the root to the start of this edge."""
    edge: bytes
    """Its tokens, see `ids_of`."""
    children: dict[int, Node] = field(default_factory=dict)
    """By the first token of their edge."""
    entries: dict[int, Entry] = field(default_factory=dict)
    """By position, in (start, end]."""
    segments: list[Segment] = field(default_factory=list)
    """Ascending, disjoint, within [start, end)."""
    prompts: set[int] = field(default_factory=set)
    """Positions in (start, end] where prompts ended."""
    weight: int = 0
    """Checkpoints here and below."""
    seen: int = 0
    """Number of the last request whose path it lay on."""

    @property
    def end(self) -> int:
        """Tokens from the root to the end of this edge."""
        return self.start + len(self.edge) // ID_BYTES

    def tail(self, needed: int = 0) -> int:
        """Tokens of a leaf beyond all that is stored and beyond position `needed`; 0 for inner nodes."""
        if self.children or self.end in self.entries:  # asked of many nodes for each that goes
            return 0
        stored = self.segments[-1].end if self.segments else 0
        end = max(self.start, needed, max(self.entries, default=0), stored)
        return max(0, self.end - end)

    def shallower(self, position: int) -> int:
        """Position of the deepest checkpoint before another one, on this edge or those above it; else 0."""
        here = max((p for p in self.entries if p < position), default=0)
        return here or next((max(n.entries) for n in self.path() if n is not self and n.entries), 0)

    def bare(self) -> int:
        """Return the number of segments at the end of this edge without a checkpoint behind their start."""
        if not self.segments or self.weight > len(self.entries):
            return 0
        deepest = max(self.entries, default=self.start)
        return sum(s.start >= deepest for s in self.segments)

    def leaf(self) -> Node:
        """Return a leaf below this node, or the node itself if it has no children."""
        node = self
        while node.children:
            node = next(iter(node.children.values()))
        return node

    def path(self) -> Iterator[Node]:
        """This node and those above it, the root last and left out."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


@dataclass(frozen=True)
class Following:
    """The tokens, at most `FOLLOWING`, with which a known path goes on where a prompt left it."""

    ids: bytes
    """See `ids_of`."""
    ends: bool
    """A prompt ended behind them."""

    def place_in(self, ids: bytes) -> int | None:
        """Return the number of tokens before the last place where they occur; None if they do not.

        Tokens behind which a prompt ended occur at the end alone.
        """
        at = ids.rfind(self.ids)
        while at > 0 and at % ID_BYTES:  # between two tokens
            at = ids.rfind(self.ids, 0, at + len(self.ids) - 1)
        at_end = at + len(self.ids) == len(ids)
        return None if at < 0 or (self.ends and not at_end) else at // ID_BYTES


@dataclass(frozen=True)
class Match:
    """The part of a token array that the tree knows."""

    length: int
    path: tuple[Node, ...]
    """Nodes with at least one token in common, root side first; the last one may match in part."""

    def needs(self, node: Node) -> int:
        """Position up to which this path needs the tokens of `node`."""
        return self.length if node in self.path else 0

    def entries(self) -> list[Entry]:
        """Checkpoints on the matched path, shallowest first."""
        stored = (node.entries for node in self.path if node.entries)
        return [entries[p] for entries in stored for p in sorted(entries) if p <= self.length]

    def follower(self) -> int | None:
        """The token that is known to follow the match, of the last used path; None at a path's end."""
        if not self.path:
            return None
        node = self.path[-1]
        if self.length < node.end:
            return token_at(node.edge, self.length - node.start)
        child = max(reversed(node.children.values()), key=lambda c: c.seen, default=None)
        return None if child is None else token_at(child.edge)

    def own_edge(self, total: int) -> Node | None:
        """Return the last edge of the matched path; None if other paths share all of it.

        `total`: tokens of the path, whose end may be unknown: evicted, or never decoded.
        """
        if not self.path:
            return None
        node = self.path[-1]
        ends_here = self.length == node.end and not node.children
        return node if self.length == total or ends_here else None

    def growth(self, tokens: int) -> int:
        """Return the bytes that `tokens` more behind the match take in the tree."""
        if tokens <= 0:
            return 0
        last = self.path[-1] if self.path else None
        nodes = 1 if last is None else 2 if self.length < last.end else min(1, len(last.children))
        return ID_BYTES * tokens + NODE_BYTES * nodes

    def turns(self, before: int) -> int:
        """Return the number of prompts that ended on the matched path before a position."""
        return sum(p < before for node in self.path for p in node.prompts)

    def end_prompt(self, position: int) -> None:
        """Note that a prompt ends at a position of the matched path; 0, or one behind it: at none."""
        node = next((n for n in self.path if n.start < position <= n.end), None)
        if node is not None and position <= self.length:
            node.prompts.add(position)

    def go_on(self) -> None:
        """Note that a request goes on from here: a prompt that ended just behind has ended here.

        Only the tokens that asked for its answer, which the history of a chat may lack, lie in between. At a
        branch there are several short prompts instead, and none has ended.
        """
        node = self.path[-1] if self.path else None
        if node is None:
            return
        if self.branches():
            node.prompts.discard(self.length)
            return
        near = {p for p in node.prompts if 0 < p - self.length <= LONGEST_TAIL}
        if near:
            node.prompts = node.prompts - near | {self.length}

    def branches(self) -> bool:
        """Known paths part right where the match ends."""
        return bool(self.path) and self.length == self.path[-1].end and bool(self.path[-1].children)

    def chance(self) -> float:
        """Estimate the chance that a later history parts inside what a request has behind the match.

        From those before it, by the rule of succession: where paths part, the share of them on which another
        prompt went on; at a path's end, the share of its prompts that another one left. 1 where the request
        leaves a path half-way, which no earlier one did.
        """
        if self.branches():
            children = self.path[-1].children.values()
            left, known = sum(bool(c.children) or len(c.prompts) > 1 for c in children), len(children)
        elif self.path and self.length == self.path[-1].end:
            left, known = sum(len(node.children) > 1 for node in self.path), self.turns(self.length + 1)
        else:
            return 1.0
        return min(1.0, (left + 1) / (known + 2))  # prompts that another process answered are not known

    def segments(self) -> list[Segment]:
        """Segments that begin on the matched path, ascending; the last one may leave it."""
        stored = (node.segments for node in self.path if node.segments)
        return [s for segments in stored for s in segments if s.start < self.length]

    def left_behind(self) -> list[Entry]:
        """Checkpoints, shallowest first, of the one known path that goes on where this one parts from it.

        None where several go on: then the match is what they share.
        """
        if not self.path or self.length == self.path[-1].end:
            return []
        entries, nodes = list[Entry](), [self.path[-1]]
        while len(nodes) == 1:
            (node,) = nodes
            entries += [node.entries[p] for p in sorted(node.entries) if p > self.length]
            nodes = [child for child in node.children.values() if child.weight]
        return entries

    def parts_in_tail(self) -> bool:
        """Return whether this path leaves a known one inside the tokens that asked for an answer."""
        ends = (e.position for e in self.left_behind() if e.checkpoint.logits is not None)
        return 0 < next(ends, self.length) - self.length <= LONGEST_TAIL

    def following(self) -> Following | None:
        """The tokens with which the one known path goes on where this one parts from it.

        None where several go on, or where it ends before `FOLLOWING` tokens without an end of a prompt.
        """
        if not self.path:
            return None
        node, ids, last = self.path[-1], b"", self.length + FOLLOWING
        while True:
            start = max(self.length, node.start)
            ended = [p for p, e in node.entries.items() if p > start and e.checkpoint.logits is not None]
            end = min(last, node.end, *ended)
            ids += node.edge[ID_BYTES * (start - node.start) : ID_BYTES * (end - node.start)]
            if end == last or end in ended:
                return Following(ids, end in ended)
            if len(node.children) != 1:
                return None
            (node,) = node.children.values()

    def missing(self, end: int) -> list[tuple[int, int]]:
        """Ranges of [0, end) without a segment, ascending, each within one node."""
        ranges = []
        for node in self.path:
            at = node.start
            for start, stop in [*((s.start, s.end) for s in node.segments), (node.end, node.end)]:
                if at < min(start, end):
                    ranges.append((at, min(start, end)))
                at = stop
        return ranges


def tokens_to(node: Node) -> Tokens:
    """Return the tokens from the root to the end of a node's edge, shape (n,)."""
    return tokens_of(b"".join([n.edge for n in node.path()][::-1]))
