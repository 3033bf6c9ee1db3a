"""What lies on disk, by token path: what of it could serve a prompt, and what goes first.

Lean (under 1 KiB a record and 8 bytes a token), and nothing takes longer for there being more records: a
folder may have tens of thousands. Records are never changed; attention that a path leaves in its middle
serves up to there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from llamahybrid.errors import RecordError
from llamahybrid.prompt_cache.base import Range, Tokens, clipped
from llamahybrid.prompt_cache.disk_trie import (
    ID_BYTES,
    MOST_THROUGH,
    Found,
    Node,
    Stored,
    grow,
    ids_of,
    match,
    tidy,
)
from llamahybrid.prompt_cache.records import SEGMENT, SNAPSHOT, Head, parse_key

MOST_FOLLOWERS = 2
"""Enough to know that paths part."""


@dataclass(frozen=True)
class Piece:
    """The attention [start, end) that a record has."""

    key: str
    start: int
    end: int
    nbytes: int


@dataclass(frozen=True)
class Offer:
    """A restore point on disk for a prompt, with the attention that it needs from there."""

    position: int
    checkpoint: str
    """The key of its record."""
    nbytes: int
    """Bytes it takes in memory, about."""
    pieces: tuple[Piece, ...]
    """Ascending."""

    @property
    def keys(self) -> list[str]:
        """The records to read."""
        return list(dict.fromkeys([self.checkpoint, *(p.key for p in self.pieces)]))


class DiskIndex:
    """Records by token path. Not locked: that is its owner's."""

    def __init__(self) -> None:
        self._roots: dict[str, Node] = {}
        self._anchors: dict[bytes, Node] = {}  # prefixes where records end, by digest
        self._shards: dict[str, dict[str, Stored]] = {}  # by the first letter of the key, then by key
        self._checkpoints: OrderedDict[Stored, None] = OrderedDict()  # the longest unused first
        self._bare: OrderedDict[Stored, None] = OrderedDict()  # segments that no checkpoint is behind
        self.nbytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._shards.values()))

    def __contains__(self, key: str) -> bool:
        return key in self._shards.get(key[:1], ())

    def keys(self, shard: str) -> Iterable[str]:
        """Keys that begin with this letter."""
        return self._shards.get(shard, {}).keys()

    # -- what comes --------------------------------------------------------------------------------

    def knows(self, head: Head) -> bool:
        """A record's ids from its base on say it all: the prefix before is known."""
        return not head.base or head.base_digest in self._anchors

    def add(self, head: Head, ids: bytes, base: int) -> None:
        """Take note of a record; `ids`: those of [base, end), `base`: 0, or the head's where it `knows` it.

        Raises RecordError for one that contradicts what is known.
        """
        if base:
            root = self._anchors[head.base_digest]
            if root.end != base:
                raise RecordError("a record's prefix is not what it says")
        else:
            root = self._roots.setdefault(head.namespace, Node(None, 0, b""))
        node = grow(root, ids)
        if self._anchors.get(head.digest, node) is not node or node.digest not in (None, head.digest):
            tidy(node)
            raise RecordError("a record's prefix is not what it says")
        record = Stored(head.key, head.kind, head.start, head.n_logits > 0, head.nbytes, node)
        if node.digest is None:
            node.digest = head.digest
            self._anchors[head.digest] = node
        node.records.append(record)
        self._shards.setdefault(record.key[0], {})[record.key] = record
        self.nbytes += record.nbytes
        if record.kind == SNAPSHOT:
            self._checkpoints[record] = None
            self._weigh(node, 1)
            return
        top = node
        for above in node.up():
            if above.end <= record.start:
                break
            if len(above.through) < MOST_THROUGH:
                above.through.append(record)
            top = above
        top.begun[record] = None
        if not top.weight:
            self._bare[record] = None

    def base_of(self, namespace: str, ids: bytes) -> int:
        """Up to where ids are the prefix of some record: a new one need not be read from before there."""
        found = self._match(namespace, ids)
        return next((n.end for n in reversed(found.nodes) if n.digest and n.end * ID_BYTES < len(ids)), 0)

    def in_order_of_use(self, used: dict[str, float]) -> None:
        """These were used at these times, and behind all others."""
        for key in sorted(used, key=lambda key: used[key]):
            record = self._shards.get(key[:1], {}).get(key)
            if record is not None and record in self._checkpoints:
                self._touch(record)

    # -- what serves -------------------------------------------------------------------------------

    def offer(
        self, namespace: str, tokens: Tokens, above: int, limit: int, missing: Sequence[Range]
    ) -> Offer | None:
        """The deepest restore point for a prompt at a position in (above, limit], and mark it as used.

        `missing`: ascending ranges of the prompt whose attention would have to come from disk.
        """
        found = self._match(namespace, ids_of(tokens))
        points = [r for r in map(_best, found.nodes) if r is not None and r.end <= limit]
        points = [r for r in points if r.end < len(tokens) or r.logits]
        if points:  # wherever it is restored from, it is of use
            self._touch(points[-1])
        for point in reversed(points):
            if point.end <= above:
                break
            pieces = self._pieces(found, clipped(missing, point.end), point.end)
            if pieces is not None:
                self._touch(point)
                size = point.nbytes + sum(p.nbytes for p in pieces)
                return Offer(point.end, point.key, size, tuple(pieces))
        return None

    def known(self, namespace: str, tokens: Tokens) -> tuple[int, list[int]]:
        """How much of a prompt any record begins with, and the tokens that follow there, two at most."""
        found = self._match(namespace, ids_of(tokens))
        if found.rest is not None:
            edge = np.frombuffer(found.rest.edge, "<i4")
            return found.length, [int(edge[found.length - found.rest.start])]
        return found.length, list(islice(found.nodes[-1].children, MOST_FOLLOWERS)) if found.nodes else []

    def serves(self, namespace: str, path: Tokens, *, logits: bool, attention: bool) -> bool:
        """Whether the end of a path can be restored; with `logits`, with all its `attention`, if asked."""
        found = self._match(namespace, ids_of(path))
        if found.length < len(path) or found.rest is not None or not found.nodes:
            return False
        point = _best(found.nodes[-1])
        if point is None or point.logits < logits:
            return False
        return not attention or self._pieces(found, [(0, len(path))], len(path)) is not None

    def uncovered(self, namespace: str, path: Tokens) -> list[Range]:
        """Ranges of a path, ascending, whose attention is in no record."""
        found = self._match(namespace, ids_of(path))
        ranges, at = [], 0
        for piece in self._cover(found, 0, found.length):
            if at < piece.start:
                ranges.append((at, piece.start))
            at = piece.end
        return [*ranges, (at, len(path))] if at < len(path) else ranges

    def _pieces(self, found: Found, ranges: Sequence[Range], limit: int) -> list[Piece] | None:
        """Attention for ascending ranges of what was found; None if there is a hole."""
        pieces: list[Piece] = []
        for start, end in ranges:
            at = max(start, pieces[-1].end if pieces else 0)
            for piece in self._cover(found, at, min(end, limit)):
                if piece.start > at:
                    return None
                low = piece.start if not pieces else max(piece.start, pieces[-1].end)
                pieces.append(Piece(piece.key, low, min(piece.end, limit), piece.nbytes))
                at = piece.end
            if at < end:
                return None
        return pieces

    def _cover(self, found: Found, start: int, end: int) -> Iterator[Piece]:
        """Records' attention of what was found that overlaps [start, end), whole, the fewest, ascending."""
        at, path = start, set(found.touched())
        for node in found.touched():
            while at < min(node.end, end):
                here = [s for s in node.through if s.start <= at]
                if not here:
                    first = min((s.start for s in node.through if at < s.start < end), default=end)
                    here = [s for s in node.through if s.start == first]
                reach, best = max(
                    ((_shared(s, found, path), s) for s in here), key=_reach, default=(at, None)
                )
                if best is None or reach <= at:
                    at = max(at, min(node.end, end))
                    break
                size = best.nbytes * (reach - best.start) // (best.end - best.start)
                yield Piece(best.key, best.start, reach, size)
                at = reach

    # -- what goes ---------------------------------------------------------------------------------

    def remove(self, key: str) -> bool:
        """Forget a record; False if it is not known."""
        record = self._shards.get(key[:1], {}).get(key)
        if record is not None:
            self._remove(record)
        return record is not None

    def at(self, namespace: str, tokens: Tokens) -> list[str]:
        """Keys of the checkpoints at the end of these tokens."""
        found = self._match(namespace, ids_of(tokens))
        if found.rest is not None or found.length < len(tokens) or not found.nodes:
            return []
        return [r.key for r in found.nodes[-1].records if r.kind == SNAPSHOT]

    def on_path(self, tokens: Tokens) -> list[str]:
        """Keys of what belongs to a path, of any model: all that goes on from it, and what leads only there.

        What other paths share of it is not among them, but for attention that reaches into the path.
        """
        ids, keys = ids_of(tokens), []
        for root in self._roots.values():
            found = match(root, ids)
            if found.length < len(tokens) or not found.touched():
                continue
            top = found.touched()[-1]
            nodes = list(top.below())
            while (
                (parent := top.parent) is not None and parent.parent is not None and len(parent.children) == 1
            ):
                nodes.append(parent)
                top = parent
            keys += [r.key for node in nodes for r in node.records]
        return keys

    def victim(self, spared: Iterable[tuple[str | None, Tokens]]) -> str | None:
        """The key of what goes first: attention that nothing needs, then what was longest unused.

        `spared`: (namespace, or None for any; tokens) of paths whose records stay. None if all is spared.
        """
        nodes: set[Node] = set()
        segments: set[Stored] = set()
        for namespace, tokens in spared:
            for name in [namespace] if namespace is not None else list(self._roots):
                found = self._match(name, ids_of(tokens))
                nodes.update(found.nodes)
                segments.update(s for node in found.touched() for s in node.through)
        bare = next((s for s in self._bare if s not in segments), None)
        if bare is not None:
            return bare.key
        return next((r.key for r in self._checkpoints if r.node not in nodes), None)

    def _remove(self, record: Stored) -> None:
        node = record.node
        del self._shards[record.key[0]][record.key]
        self.nbytes -= record.nbytes
        node.records.remove(record)
        if record.kind == SNAPSHOT:
            del self._checkpoints[record]
            self._weigh(node, -1)
        else:
            self._bare.pop(record, None)
            for above in node.up():
                if above.end <= record.start:
                    break
                if record in above.through:
                    above.through.remove(record)
                above.begun.pop(record, None)
        if not node.records and node.digest is not None:
            del self._anchors[node.digest]
            node.digest = None
        tidy(node)

    def _weigh(self, node: Node, change: int) -> None:
        """A checkpoint came or went: what attention nothing is behind any more, or is again?"""
        for above in node.up():
            above.weight += change
            if above.weight == max(change, 0):
                for segment in above.begun:
                    if change > 0:
                        self._bare.pop(segment, None)
                    else:
                        self._bare[segment] = None

    def _touch(self, record: Stored) -> None:
        self._checkpoints.move_to_end(record)

    def _match(self, namespace: str, ids: bytes) -> Found:
        root = self._roots.get(namespace)
        return Found(0, [], None) if root is None else match(root, ids)

    # -- its own soundness -------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise AssertionError unless the tree is whole and every list names the same records."""
        records: list[Stored] = []
        for root in self._roots.values():
            own = (root.edge, root.records, root.through)
            assert own == (b"", [], []), "a root has something of its own"
            for node in root.below():
                records += node.records
                self._check_node(node)
        listed = {r.key: r for shard in self._shards.values() for r in shard.values()}
        assert {r.key: r for r in records} == listed, "keys and records disagree"
        assert len(records) == len(listed), "a record is there twice"
        assert self.nbytes == sum(r.nbytes for r in records), "bytes miscounted"
        assert set(self._checkpoints) == {r for r in records if r.kind == SNAPSHOT}, "checkpoints disagree"
        assert set(self._bare) == {r for r in records if r.kind == SEGMENT and not _needed(r)}, "bare ones"
        anchors = {r.node.digest: r.node for r in records}
        assert anchors == self._anchors, "anchors disagree"

    def _check_node(self, node: Node) -> None:
        for first, child in node.children.items():
            assert child.parent is node, "a child does not know its parent"
            assert child.start == node.end, "an edge does not start where its parent ends"
            assert child.edge, "an edge is empty"
            assert child.first() == first, "an edge is filed wrongly"
            assert child.records or len(child.children) > 1, "a joint joins nothing"
        own = sum(r.kind == SNAPSHOT for r in node.records)
        assert node.parent is None or node.weight == own + sum(c.weight for c in node.children.values()), (
            "checkpoints miscounted"
        )
        for record in node.records:
            assert record.node is node, "a record does not know its node"
            name = parse_key(record.key)
            assert name is not None, "no key"
            assert (name.digest, name.end) == (node.digest, node.end), "a foreign key"
            if record.kind == SEGMENT:
                crossed = [n for n in node.up() if n.end > record.start]
                assert record in crossed[-1].begun, "attention does not begin where it starts"
                lies = [n.through.count(record) for n in crossed if len(n.through) < MOST_THROUGH]
                assert max(lies, default=1) == 1, "attention lies somewhere twice"
        for record in (*node.through, *node.begun):
            above = list(record.node.up())
            assert node in above, "attention lies where its path does not"
            assert record.key in self._shards[record.key[0]], "attention without a record"
        assert all(node.start <= s.start < node.end for s in node.begun), "attention begins elsewhere"
        assert all(s.start < node.end for s in node.through), "attention lies where it does not reach"
        assert len(node.through) <= MOST_THROUGH, "more attention than is of use"


def _best(node: Node) -> Stored | None:
    """The checkpoint at a node's end; the one with logits, if there is one."""
    points = [r for r in node.records if r.kind == SNAPSHOT]
    return max(points, key=lambda r: r.logits, default=None)


def _shared(segment: Stored, found: Found, path: set[Node]) -> int:
    """Up to where a segment's prefix is that of what was found."""
    last = next((node for node in segment.node.up() if node in path), None)
    return 0 if last is None else min(last.end, found.length)


def _reach(one: tuple[int, Stored]) -> int:
    return one[0]


def _needed(segment: Stored) -> bool:
    """A checkpoint lies behind the start of a segment."""
    top = segment.node
    for above in segment.node.up():
        if above.end > segment.start:
            top = above
    return top.weight > 0
