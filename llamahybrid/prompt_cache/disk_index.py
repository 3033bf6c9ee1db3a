"""What lies on disk: a tree like the RAM tier's, of stand-ins that have a size and take no memory.

Records are never changed. Where a path parts inside a segment, its stand-in is cut in two, and the record
goes when the last of its stand-ins has gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from llamahybrid.prompt_cache.base import Bytes, Checkpoint, Logits, Segment, Tokens
from llamahybrid.prompt_cache.nodes import Entry, Node
from llamahybrid.prompt_cache.records import SEGMENT, Head
from llamahybrid.prompt_cache.tree import Tree

Range = tuple[int, int]
"""Tokens [start, end)."""


@dataclass(frozen=True, eq=False)
class StoredCheckpoint(Checkpoint):
    """A checkpoint on disk; `snapshot` and `logits` only have its size."""

    key: str = ""


@dataclass(frozen=True, eq=False)
class StoredSegment(Segment):
    """The part [start, end) of a segment on disk; `record` only has its size."""

    key: str = ""


@dataclass(frozen=True, eq=False)
class Offer:
    """A restore point on disk for a prompt, with the attention that it needs from there."""

    position: int
    checkpoint: StoredCheckpoint
    segments: tuple[StoredSegment, ...]

    @property
    def keys(self) -> list[str]:
        """The records to read."""
        return list(dict.fromkeys([self.checkpoint.key, *(s.key for s in self.segments)]))

    @property
    def nbytes(self) -> int:
        """Bytes it takes in memory, about."""
        logits = self.checkpoint.logits
        row = 0 if logits is None else logits.nbytes
        return self.checkpoint.snapshot.nbytes + row + sum(s.nbytes for s in self.segments)


class DiskIndex:
    """Records by token path. Not locked: that is its owner's."""

    def __init__(self) -> None:
        self._tree = Tree()
        self._parts: Counter[str] = Counter()  # stand-ins of a record, by key
        self.dead: list[str] = []
        """Keys of records that nothing names any more: to be erased by the owner."""

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, key: str) -> bool:
        return key in self._parts

    def add(self, key: str, head: Head) -> None:
        """Take note of a record; one that adds nothing is dead at once."""
        self._tree.splitters.setdefault(head.namespace, self._split)
        match = self._tree.insert(head.namespace, head.tokens)
        if head.kind == SEGMENT:
            for start, end in clipped(match.missing(head.end), head.end, head.start):
                size = head.nbytes * (end - start) // (head.end - head.start)
                self._parts[key] += self._tree.store(match, StoredSegment(start, end, _sized(size), key))
            if not self._parts[key]:
                del self._parts[key]
                self.dead.append(key)
            return
        old = next((e for e in match.entries() if e.position == head.end), None)
        if old is not None and has_logits(old):
            self.dead.append(key)
            return
        if old is not None:
            self._tree.detach(old)
            self._gone(old.checkpoint)
        row: Logits | None = None
        if head.logits is not None:
            row = np.broadcast_to(np.zeros(1, np.float32), head.logits.shape)
        size = head.nbytes - (0 if row is None else row.nbytes)
        self._tree.attach(match, StoredCheckpoint(head.namespace, head.end, _sized(size), row, key))
        self._parts[key] += 1

    def offer(
        self, namespace: str, tokens: Tokens, above: int, limit: int, missing: Sequence[Range]
    ) -> Offer | None:
        """The deepest restore point for a prompt at a position in (above, limit], and mark its path as used.

        `missing`: ascending ranges of the prompt whose attention would have to come from disk.
        """
        match = self._tree.match(namespace, tokens)
        self._tree.touch(match)
        stored = [s for s in match.segments() if isinstance(s, StoredSegment)]
        entries = [e for e in match.entries() if e.position <= limit]
        entries = [e for e in entries if e.position < len(tokens) or has_logits(e)]
        if entries:  # wherever it is restored from, it is of use
            self._tree.touch_entry(entries[-1])
        for entry in reversed(entries):
            if entry.position <= above:
                break
            needed = clipped(missing, entry.position)
            chosen = tuple(s for s in stored if any(s.start < b and a < s.end for a, b in needed))
            if all(_covered(a, b, chosen) for a, b in needed):
                self._tree.touch_entry(entry)
                assert isinstance(entry.checkpoint, StoredCheckpoint)
                return Offer(entry.position, entry.checkpoint, chosen)
        return None

    def known(self, namespace: str, tokens: Tokens) -> tuple[int, list[int]]:
        """How much of a prompt any record begins with, and the tokens that follow there in records."""
        match = self._tree.match(namespace, tokens)
        if not match.path:
            return 0, []
        node = match.path[-1]
        if match.length < node.end:
            return match.length, [int(node.tokens[match.length - node.start])]
        return match.length, list(node.children)

    def lacks(
        self, namespace: str, path: Tokens, entries: Iterable[Entry], segments: Iterable[Segment]
    ) -> list[Entry | Segment]:
        """Which checkpoints and segments of a path are not here; segments first, as checkpoints need them."""
        match = self._tree.match(namespace, path)
        known = {e.position: has_logits(e) for e in match.entries()}
        bare = match.missing(match.length)
        new: list[Entry | Segment] = [
            s for s in segments if s.end > match.length or clipped(bare, s.end, s.start)
        ]
        return new + [e for e in entries if e.position not in known or known[e.position] < has_logits(e)]

    def adds(self, namespace: str, kind: int, start: int, path: Tokens, *, logits: bool) -> bool:
        """Whether a record of this path would hold anything that is not here."""
        match = self._tree.match(namespace, path)
        if kind == SEGMENT:
            known = clipped(match.missing(match.length), len(path), start)
            return match.length < len(path) or bool(known)
        there = [has_logits(e) for e in match.entries() if e.position == len(path)]
        return not there or there[0] < logits

    def remove_record(self, key: str) -> None:
        """Forget a record that does not prove right."""
        nodes = list(self._tree.oldest_nodes())
        self._cut([s for n in nodes for s in n.segments if _key(s) == key], nodes)
        for entry in [e for e in self._tree.oldest_entries() if _key(e.checkpoint) == key]:
            self._remove(entry)
        if key not in self.dead:
            self.dead.append(key)

    def remove_checkpoint(self, namespace: str, tokens: Tokens) -> bool:
        """Forget the checkpoint at the end of these tokens; False if there is none."""
        entries = self._tree.match(namespace, tokens).entries()
        if not entries or entries[-1].position != len(tokens):
            return False
        self._remove(entries[-1])
        return True

    def remove_path(self, tokens: Tokens) -> None:
        """Forget a path, of any model, and all that goes on from it."""
        for name in self._tree.namespaces():
            while (match := self._tree.match(name, tokens)).path and match.length == len(tokens):
                leaf = match.path[-1].leaf()  # one at a time: the tree closes up behind it
                entries = list(leaf.entries.values())
                self._cut(list(leaf.segments), [leaf])
                for entry in entries:
                    self._remove(entry)
                if not entries:
                    self._tree.trim(leaf)

    def evict(self, spared: Iterable[tuple[str | None, Tokens]]) -> bool:
        """Forget what was longest unused, except on the spared paths; False if there is nothing.

        `spared`: (namespace, or None for any; tokens).
        """
        matches = [
            self._tree.match(name, tokens)
            for namespace, tokens in spared
            for name in ([namespace] if namespace is not None else self._tree.namespaces())
        ]
        nodes = {node for match in matches for node in match.path}
        entries = {entry for match in matches for entry in match.entries()}
        bare = next((n for n in self._tree.oldest_nodes() if n.bare() and n not in nodes), None)
        if bare is not None:  # its checkpoints were never written, or were damaged
            self._cut(bare.segments[-bare.bare() :], [bare])
            return True
        oldest = next((e for e in self._tree.oldest_entries() if e not in entries), None)
        if oldest is not None:
            self._remove(oldest)
        return oldest is not None

    def check_integrity(self) -> None:
        """Raise AssertionError unless the tree is whole and every record is named as often as counted."""
        self._tree.check_integrity()
        found = Counter(_key(e.checkpoint) for e in self._tree.oldest_entries())
        for node in self._tree.oldest_nodes():
            found.update(_key(s) for s in node.segments)
        assert found == self._parts, "records and stand-ins disagree"

    def _split(self, segment: Segment, path: Tokens, at: int) -> tuple[Segment, Segment]:
        """Cut a stand-in in two; the record stays one."""
        key = _key(segment)
        self._parts[key] += 1
        size = segment.nbytes * (at - segment.start) // (segment.end - segment.start)
        return (
            StoredSegment(segment.start, at, _sized(size), key),
            StoredSegment(at, segment.end, _sized(segment.nbytes - size), key),
        )

    def _gone(self, what: Checkpoint | Segment) -> None:
        """A stand-in has left the tree."""
        key = _key(what)
        self._parts[key] -= 1
        if not self._parts[key]:
            del self._parts[key]
            self.dead.append(key)

    def _cut(self, segments: Sequence[Segment], nodes: Iterable[Node]) -> None:
        """Take segments out of the nodes they lie on."""
        for node in nodes:
            for segment in [s for s in node.segments if s in segments]:
                node.segments.remove(segment)
                self._tree.segment_bytes -= segment.nbytes
                self._gone(segment)

    def _remove(self, entry: Entry) -> None:
        """Take a checkpoint out, with the attention that only it needed and the tokens left over."""
        node = entry.node
        assert node is not None
        above = list(node.path())
        before = [s for n in above for s in n.segments]
        self._tree.detach(entry)
        self._gone(entry.checkpoint)
        self._tree.prune(node)
        left = {id(s) for n in above for s in n.segments}
        for segment in before:
            if id(segment) not in left:
                self._gone(segment)
        while node.parent is not None and node.tail():
            parent = node.parent
            self._tree.trim(node)
            node = parent


def has_logits(entry: Entry) -> bool:
    """The checkpoint has the logits of its last token."""
    return entry.checkpoint.logits is not None


def clipped(ranges: Iterable[Range], end: int, start: int = 0) -> list[Range]:
    """What of ascending ranges lies in [start, end)."""
    return [(max(a, start), min(b, end)) for a, b in ranges if a < end and start < b]


def _key(what: Checkpoint | Segment) -> str:
    assert isinstance(what, StoredCheckpoint | StoredSegment)
    return what.key


def _sized(n_bytes: int) -> Bytes:
    """An array that has a size and takes no memory."""
    zeros: Bytes = np.broadcast_to(np.zeros(1, np.uint8), (n_bytes,))
    return zeros


def _covered(start: int, end: int, segments: Sequence[Segment]) -> bool:
    """Ascending segments have all of [start, end)."""
    for segment in segments:
        if segment.start <= start < segment.end:
            start = segment.end
    return start >= end
