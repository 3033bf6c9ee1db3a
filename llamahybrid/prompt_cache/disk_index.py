"""What lies on disk, by token path: what of it could serve a prompt, and what goes first.

Lean (under 1 KiB a record and 8 bytes a token), and nothing takes longer for there being more records: a
folder may have tens of thousands. Records are never changed; attention that a path leaves in its middle
serves up to there.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from llamahybrid.errors import RecordError
from llamahybrid.prompt_cache.base import Range, Tokens, clipped
from llamahybrid.prompt_cache.nodes import ID_BYTES, Match, Node, OnDisk, Place, Stored, token_at
from llamahybrid.prompt_cache.records import Head
from llamahybrid.prompt_cache.tree import Tree, follow

MOST_FOLLOWERS = 2
"""Enough to know that paths part."""

MOST_THROUGH = 16
"""More segments over the same tokens are of no use, and to go through them all would take its time."""


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
    """The key of its record; "" where attention is all that is needed."""
    nbytes: int
    """Bytes it takes in memory, about."""
    pieces: tuple[Piece, ...]
    """Ascending."""

    @property
    def keys(self) -> list[str]:
        """The records to read."""
        first = [self.checkpoint] if self.checkpoint else []
        return list(dict.fromkeys([*first, *(p.key for p in self.pieces)]))


class DiskIndex:
    """Records by token path. Not locked: that is its owner's."""

    def __init__(self) -> None:
        self._tree = Tree()
        self._anchors: dict[bytes, Place] = {}  # prefixes where records end, by digest
        self._shards: dict[str, dict[str, Stored]] = {}  # by the first letter of the key, then by key
        self._checkpoints: OrderedDict[Stored, None] = OrderedDict()  # the longest unused first
        self._bare: OrderedDict[Stored, None] = OrderedDict()  # segments that no checkpoint is behind
        self.nbytes = 0

    @property
    def tree(self) -> Tree:
        """Its paths, with `OnDisk` at their edges."""
        return self._tree

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
        """Note a record; `ids`: those of [base, end), `base`: 0, or the head's where it `knows` it.

        Raises RecordError for one that contradicts what is known.
        """
        if base:
            anchor = self._anchors[head.base_digest]
            if anchor.position != base:
                raise RecordError("a record's prefix is not what it says")
            match = follow(anchor.node, base, ids)
        else:
            match = self._tree.follow(head.namespace, ids)
        if match.length < head.end:
            match = self._tree.extend(head.namespace, match, ids[ID_BYTES * (match.length - base) :])
        node = match.path[-1]
        here = on_disk(node)
        place = here.place(head.end)
        if self._anchors.get(head.digest) is not place:
            self._close_up(node)
            raise RecordError("a record's prefix is not what it says")
        if place is None:
            place = self._anchors[head.digest] = Place(node, head.end, head.digest)
            here.add(place)
        record = Stored(head.key, head.is_snapshot, head.start, head.n_logits > 0, head.nbytes, place)
        place.records.append(record)
        self._shards.setdefault(record.key[0], {})[record.key] = record
        self.nbytes += record.nbytes
        if record.is_checkpoint:
            self._checkpoints[record] = None
            self._weigh(node, 1)
            return
        for above in crossed(record):
            there, low = on_disk(above), max(record.start, above.start)
            along = there.through
            if len(along) >= MOST_THROUGH:
                along = tuple(s for s in along if s.start <= low < s.place.position)
            if len(along) < MOST_THROUGH:
                there.through = (*there.through, record)
        there.begun[record] = None
        if record.start >= there.deepest():
            self._bare[record] = None

    def base_of(self, namespace: str, tokens: Tokens) -> int:
        """Up to where tokens are the prefix of some record: a new one need not be read from before there."""
        match = self._tree.match(namespace, tokens)
        return max((p.position for p in _places(match) if p.position < len(tokens)), default=0)

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
        match = self._tree.match(namespace, tokens)
        points = [(p.position, r) for p in _places(match) if (r := p.best()) and p.position <= limit]
        points = [(end, r) for end, r in points if end < len(tokens) or r.logits]
        if points:  # wherever it is restored from, it is of use
            self._touch(points[-1][1])
        for end, point in reversed(points):
            if end <= above:
                break
            pieces = self._pieces(match, clipped(missing, end), end)
            if pieces is not None:
                self._touch(point)
                size = point.nbytes + sum(p.nbytes for p in pieces)
                return Offer(end, point.key, size, tuple(pieces))
        return None

    def offer_attention(
        self, namespace: str, tokens: Tokens, above: int, limit: int, missing: Sequence[Range]
    ) -> Offer | None:
        """The same where attention is all of the state, so that any position that it reaches will do."""
        match = self._tree.match(namespace, tokens)
        limit = min(limit, match.length)
        pieces, reach = self._covered(match, clipped(missing, limit), limit)
        if not pieces or reach <= above:
            return None
        place = self._shards[pieces[-1].key[0]][pieces[-1].key].place
        for point in (place.best(), *(p.best() for p in _places(match))):
            if point is not None:
                self._touch(point)
        return Offer(reach, "", sum(p.nbytes for p in pieces), tuple(pieces))

    def known(self, namespace: str, tokens: Tokens) -> tuple[int, list[int]]:
        """How much of a prompt any record begins with, and the tokens that follow there, two at most."""
        match = self._tree.match(namespace, tokens)
        if match.path and match.length < match.path[-1].end:
            return match.length, [token_at(match.path[-1].edge, match.length - match.path[-1].start)]
        return match.length, list(islice(match.path[-1].children, MOST_FOLLOWERS)) if match.path else []

    def serves(self, namespace: str, path: Tokens, *, logits: bool, attention: bool) -> bool:
        """Whether the end of a path can be restored; with `logits`, with all its `attention`, if asked."""
        match = self._tree.match(namespace, path)
        place = _place(match, len(path))
        point = None if place is None else place.best()
        if point is None or point.logits < logits:
            return False
        return not attention or self._pieces(match, [(0, len(path))], len(path)) is not None

    def uncovered(self, namespace: str, path: Tokens) -> list[Range]:
        """Ranges of a path, ascending, whose attention is in no record."""
        match = self._tree.match(namespace, path)
        ranges, at = [], 0
        for piece in _cover(match, 0, match.length):
            if at < piece.start:
                ranges.append((at, piece.start))
            at = piece.end
        return [*ranges, (at, len(path))] if at < len(path) else ranges

    def _pieces(self, match: Match, ranges: Sequence[Range], limit: int) -> list[Piece] | None:
        """Attention for ascending ranges of what was found; None if there is a hole."""
        pieces, reach = self._covered(match, ranges, limit)
        return pieces if reach == limit else None

    def _covered(self, match: Match, ranges: Sequence[Range], limit: int) -> tuple[list[Piece], int]:
        """Attention for ascending ranges of what was found, up to the first hole; its place, or `limit`."""
        pieces: list[Piece] = []
        for start, end in ranges:
            at = max(start, pieces[-1].end if pieces else 0)
            for piece in _cover(match, at, min(end, limit)):
                if piece.start > at:
                    return pieces, at
                low = piece.start if not pieces else max(piece.start, pieces[-1].end)
                pieces.append(Piece(piece.key, low, min(piece.end, limit), piece.nbytes))
                at = piece.end
            if at < end:
                return pieces, at
        return pieces, limit

    # -- what goes ---------------------------------------------------------------------------------

    def size(self, key: str) -> int:
        """Bytes of a record; 0 if it is not known."""
        record = self._shards.get(key[:1], {}).get(key)
        return 0 if record is None else record.nbytes

    def remove(self, key: str) -> bool:
        """Forget a record; False if it is not known."""
        record = self._shards.get(key[:1], {}).pop(key, None)
        if record is None:
            return False
        place = record.place
        self.nbytes -= record.nbytes
        place.records.remove(record)
        if record.is_checkpoint:
            del self._checkpoints[record]
            self._weigh(place.node, -1)
        else:
            self._bare.pop(record, None)
            for above in crossed(record):
                there = on_disk(above)
                there.begun.pop(record, None)
                there.through = tuple(s for s in there.through if s is not record)
        if not place.records:
            del self._anchors[place.digest]
            on_disk(place.node).places.remove(place)
            self._close_up(place.node)
        return True

    def at(self, namespace: str, tokens: Tokens) -> list[str]:
        """Keys of the checkpoints at the end of these tokens."""
        place = _place(self._tree.match(namespace, tokens), len(tokens))
        return [] if place is None else [r.key for r in place.records if r.is_checkpoint]

    def on_path(self, tokens: Tokens, stays: int = 0) -> list[str]:
        """Keys of what belongs to a path, of any model: all that goes on from it, and what leads only there.

        What other paths share of it is not among them, but for attention that reaches into the path; nor is
        what ends within its first `stays` tokens.
        """
        keys = []
        for namespace in self._tree.namespaces():
            top = self._tree.match(namespace, tokens).own_edge(len(tokens))
            nodes = [] if top is None else [top]
            while nodes:
                node = nodes.pop()
                keys += [r.key for p in on_disk(node).places for r in p.records if p.position > stays]
                nodes.extend(node.children.values())
        return keys

    def victim(self, spared: Iterable[tuple[str | None, Tokens]]) -> Stored | None:
        """What goes first: attention that nothing needs, then what was longest unused.

        `spared`: (namespace, or None for any; tokens) of paths whose records stay. None if all is spared.
        """
        places, segments = self._spared(spared)
        bare = next((s for s in self._bare if s not in segments), None)
        if bare is not None:
            return bare
        return next((r for r in self._checkpoints if r.place not in places), None)

    def evictable(self, spared: Iterable[tuple[str | None, Tokens]]) -> int:
        """Bytes of all that `victim` would ever name, one after the other."""
        places, segments = self._spared(spared)
        stay = segments.union(r for place in places for r in place.records if r.is_checkpoint)
        return self.nbytes - sum(record.nbytes for record in stay)

    def _spared(self, spared: Iterable[tuple[str | None, Tokens]]) -> tuple[set[Place], set[Stored]]:
        """Where checkpoints stay, and the attention that does."""
        places: set[Place] = set()
        segments: set[Stored] = set()
        for namespace, tokens in spared:
            for name in self._tree.namespaces() if namespace is None else [namespace]:
                match = self._tree.match(name, tokens)
                places.update(_places(match))
                segments.update(s for n in match.path for s in on_disk(n).through if s.start < match.length)
        return places, segments

    def _close_up(self, node: Node) -> None:
        """Remove tokens at the end of a path that no record needs."""
        if node.tail():
            self._tree.trim(node)

    def _weigh(self, node: Node, change: int) -> None:
        """A checkpoint came to this edge or went: what attention is nothing behind any more, or is again?"""
        here = on_disk(node)
        changed = [] if here.below else [here]
        for above in islice(node.path(), 1, None):
            here = on_disk(above)
            here.below += change
            if here.below == max(change, 0):
                changed.append(here)
        for here in changed:
            deepest = here.deepest()
            if change > 0:
                for segment in [s for s in here.begun.keys() & self._bare.keys() if s.start < deepest]:
                    del self._bare[segment]
            else:
                self._bare.update((s, None) for s in here.begun if s.start >= deepest)

    def _touch(self, record: Stored) -> None:
        self._checkpoints.move_to_end(record)


def on_disk(node: Node) -> OnDisk:
    """What lies on disk for a node's edge."""
    if node.disk is None:
        node.disk = OnDisk()
    return node.disk


def _places(match: Match) -> Iterator[Place]:
    """Where records end on a matched path, ascending."""
    for node in match.path:
        yield from (place for place in on_disk(node).places if place.position <= match.length)


def _place(match: Match, position: int) -> Place | None:
    """Where records end at a position, if a path is matched up to there."""
    if match.length < position or not match.path:
        return None
    return on_disk(match.path[-1]).place(position)


def crossed(segment: Stored) -> Iterator[Node]:
    """The nodes whose edges a segment covers some of, from its end up."""
    for node in segment.place.node.path():
        if node.end <= segment.start:
            return
        yield node


def _reach(segment: Stored, node: Node) -> int:
    """Up to where a segment that covers some of a node's edge does so, or goes on below it."""
    return segment.place.position if segment.place.node is node else node.end


def _cover(match: Match, start: int, end: int) -> Iterator[Piece]:
    """Records' attention of what was found that overlaps [start, end), whole, the fewest, ascending."""
    at, path = start, set(match.path)
    for node in match.path:
        stop = min(node.end, end)
        along = deque(sorted(on_disk(node).through, key=_start) if at < stop else ())
        reach, best = 0, None
        while at < stop:
            low = max(at, along[0].start) if along else stop
            if low >= stop:  # nothing more on this edge
                at = stop
                break
            while along and along[0].start <= low:
                segment = along.popleft()
                if (shared := _shared(segment, match, path)) > max(reach, low):
                    reach, best = shared, segment
            if best is not None and reach > low:
                at = reach
                size = best.nbytes * (at - best.start) // (best.place.position - best.start)
                yield Piece(best.key, best.start, at, size)


def _shared(segment: Stored, match: Match, path: set[Node]) -> int:
    """Up to where a segment's prefix is that of what was found."""
    last = next((node for node in segment.place.node.path() if node in path), None)
    return 0 if last is None else min(_reach(segment, last), match.length)


def _start(segment: Stored) -> int:
    return segment.start
