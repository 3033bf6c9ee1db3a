"""Records by token path over any store of rows: look-up, storing, the order in which things go."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeAlias

from llamahybrid.errors import RecordError
from llamahybrid.prompt_cache.base import Range, Tokens
from llamahybrid.prompt_cache.blocks import (
    BLOCK,
    BLOCK_BYTES,
    MOST_NEXT,
    NO_PARENT,
    Item,
    Node,
    Prefix,
    Seen,
    Why,
    chain,
    digest_of,
    shared,
    spans,
)
from llamahybrid.prompt_cache.envelope import Record
from llamahybrid.prompt_cache.nodes import ID_BYTES, ids_of, token_at

MOST_FOLLOWERS = 2
BATCH = 500
"""Rows that are read at once."""

FIRST = 8
"""Nodes of a path that are read at first: most prompts that are not known end among them."""

BEGUN_SECONDS = 600
"""Time in which a record may follow its row."""

Values: TypeAlias = "dict[bytes, bytes | None]"
Known: TypeAlias = "dict[bytes, Node | None]"
"""Nodes by their hashes; None for a missing or damaged one."""
Places: TypeAlias = "dict[bytes, tuple[Range, Node | None]]"
"""By the key of a record: tokens of attention; of a checkpoint its end, twice, and its node."""


class Busy(OSError):
    """Another process holds the lock, or the store is still being opened: it may be asked again."""


class Rows:
    """A store of rows of keys and values, and of records; its methods raise OSError for what it refuses.

    The methods that do nothing here are for a store that has to be opened, or that tells an order.
    """

    nbytes = 0
    """Bytes of all records, as seen last."""

    def open(self) -> None:
        """Make it ready; harmless when it is."""

    def is_open(self) -> bool:
        """Return whether a look-up can begin at once."""
        return True

    def fork(self) -> None:
        """In a process that was forked: nothing of its parent's is used."""

    def release(self) -> None:
        """A thread that used it ends."""

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Values of rows; None for a missing one."""
        raise NotImplementedError

    def sizes(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        """Keys of records that are there, with their bytes."""
        raise NotImplementedError

    def keys(self, kind: bytes) -> Iterator[bytes]:
        """All keys that begin with a letter, the newest first where an order is known."""
        raise NotImplementedError

    def rows(self, kind: bytes) -> Iterator[tuple[bytes, bytes]]:
        """All rows whose keys begin with a letter, which is left out."""
        keys = self.keys(kind)
        while some := list(islice(keys, BATCH)):
            found = zip(some, self.get(some), strict=True)
            yield from ((key[1:], value) for key, value in found if value is not None)

    def measure(self) -> int:
        """Bytes of all records now, those of other processes among them; notes them as `nbytes`."""
        return self.nbytes

    def free(self) -> int:
        """Bytes that records may still take, whatever their limit; below 0: bytes to be evicted."""
        return sys.maxsize

    def count(self) -> int:
        """The number of records; 0 where counting takes too long."""
        return 0

    def last_used(self, keys: Sequence[bytes]) -> dict[bytes, float]:
        """When records were used last, in seconds since 1970, as far as that is known."""
        return {}

    def update(self, keys: Sequence[bytes], change: Callable[[Values], Values]) -> None:
        """Replace rows by what `change(rows)` says of them, all at once; None removes one."""
        raise NotImplementedError

    def touch(self, keys: Sequence[bytes]) -> None:
        """Renew rows: they go last, each after the one before."""
        raise NotImplementedError

    def read(self, key: bytes) -> Record:
        """A whole record, checked. Raises RecordError for a damaged one, RecordGone where there is none."""
        raise NotImplementedError

    def write(self, key: bytes, parts: Sequence[bytes | memoryview]) -> None:
        """Write a record: it is whole, or not there."""
        raise NotImplementedError

    def remove(self, key: bytes) -> None:
        """Remove a record; harmless if it is gone."""
        raise NotImplementedError

    def make_room(self, n_bytes: int, limit: int) -> int | None:
        """Evict records until `n_bytes` fit; the number of evicted ones, None where the rest is too much."""
        raise NotImplementedError

    def clear(self) -> None:
        """Remove everything."""
        raise NotImplementedError

    def forgotten(self) -> None:
        """Erase the traces of removed rows."""


@dataclass(frozen=True)
class Stored:
    """A checkpoint as the rows have it; its records may be gone."""

    namespace: str
    ids: bytes
    """The token ids of its prefix."""
    node: Node
    hashes: tuple[bytes, ...]
    """Of the nodes of its path, the root first, its own last."""

    @property
    def keys(self) -> list[bytes]:
        """Keys of the records that it may have: of its checkpoint, and of attention."""
        return [b"r" + self.hashes[-1], *(b"a" + hash_ for hash_ in self.hashes[1:])]

    def items(self, sizes: dict[bytes, int]) -> list[Item]:
        """Its records. `sizes`: those that are there, see `Rows.sizes`."""
        end = len(self.ids) // ID_BYTES
        places = zip(self.keys, [(end, end), *spans(end)], strict=True)
        items = [Item(key, *span, sizes[key]) for key, span in places if key in sizes]
        return [replace(item, node=self.node) if item.is_checkpoint else item for item in items]


class BlockStore:
    """Records by token path."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    # -- looking -----------------------------------------------------------------------------------

    def look(self, namespace: str, tokens: Tokens) -> Seen:
        """Look a prompt up; all tokens are compared."""
        ids = ids_of(tokens)
        path = chain(namespace, ids[: len(ids) - len(ids) % BLOCK_BYTES])
        nodes = self._nodes(path)
        if not nodes:
            return Seen(len(tokens))
        places = self._checkpoints(path, nodes, ids)
        for prefix, span in zip(path[1 : len(nodes)], spans(len(tokens)), strict=False):
            places[b"a" + prefix.hash] = span, None
        last, rest = BLOCK * (len(nodes) - 1), ids[BLOCK_BYTES * (len(nodes) - 1) :]
        following = self._following(nodes[-1], path[len(nodes) - 1].hash)
        for hash_, node in following.items():
            if n := shared(node.text, rest):
                places.setdefault(b"a" + hash_, ((last, last + n), node))
        sizes = self.rows.sizes([*places])
        items = [Item(key, *places[key][0], n_bytes, places[key][1]) for key, n_bytes in sizes.items()]
        items.sort(key=lambda item: (item.end, item.is_checkpoint))
        texts = [node.text for node in following.values()]
        common = max([0, *(item.end - last for item in items), *(shared(text, rest) for text in texts)])
        at = ID_BYTES * common
        followers = {token_at(text[at:]) for text in texts if text[:at] == rest[:at] and text[at:]}
        return Seen(len(tokens), last + common, tuple(sorted(followers))[:MOST_FOLLOWERS], tuple(items))

    def _checkpoints(self, path: Sequence[Prefix], nodes: Sequence[Node], ids: bytes) -> Places:
        """Checkpoints on a path, and the attention that ends at them."""
        ends: dict[bytes, tuple[int, Prefix]] = {}
        for k, node in enumerate(nodes):
            for end in (BLOCK * k + offset for offset in node.offsets()):
                if ID_BYTES * end <= len(ids):
                    prefix = Prefix.behind(path[k].hash, ids[BLOCK_BYTES * k : ID_BYTES * end])
                    ends[prefix.hash] = end, prefix
        places: Places = {}
        for hash_, node in self.nodes([*ends]).items():
            end, prefix = ends[hash_]
            if prefix.is_of(node):
                places[b"r" + hash_] = (end, end), node
                places[b"a" + hash_] = spans(end)[-1], None
        return places

    def _following(self, node: Node, hash_: bytes) -> dict[bytes, Node]:
        """The nodes behind one, as far as it names them and their rows are right, by hash."""
        found = self.nodes(node.next).items()
        return {
            key: each
            for key, each in found
            if Prefix.behind(hash_, each.text) == (each.parent, each.text, key)
        }

    def _nodes(self, path: Sequence[Prefix]) -> list[Node]:
        """The nodes along a path up to the first that is unknown."""
        found: list[Node] = []
        for some in (path[:FIRST], path[FIRST:]):
            rows = self.rows.get([b"n" + prefix.hash for prefix in some])
            for prefix, raw in zip(some, rows, strict=True):
                node = Node.unpack(raw)
                if node is None or not prefix.is_of(node):
                    return found
                found.append(node)
        return found

    def read(self, namespace: str, tokens: Tokens, item: Item) -> Record:
        """Read a record of a path, twice if need be: a bit may be read wrong once, and another process may
        write a record anew between the look at its row and the opening of its file.

        Raises RecordError for a damaged one and for another's, RecordGone where there is none, and OSError.
        """
        try:
            return self._read(namespace, tokens, item)
        except RecordError:
            return self._read(namespace, tokens, item)

    def _read(self, namespace: str, tokens: Tokens, item: Item) -> Record:
        record = self.rows.read(item.key)
        if not record.header.is_of(namespace, item.tokens(tokens), item.start):
            raise RecordError("a record lies under the name of another")
        return record

    def nodes(self, hashes: Sequence[bytes]) -> dict[bytes, Node]:
        """The nodes of these hashes that are there."""
        found = zip(hashes, self.rows.get([b"n" + hash_ for hash_ in hashes]), strict=True)
        nodes = ((hash_, Node.unpack(raw)) for hash_, raw in found)
        return {hash_: node for hash_, node in nodes if node is not None}

    def newest(self) -> Iterator[Stored]:
        """All checkpoints, the newest first where an order is known; a path is read as it is asked for."""
        known: Known = {}
        for hash_, raw in self.rows.rows(b"n"):
            known.setdefault(hash_, Node.unpack(raw))
            if (stored := self._stored(hash_, known)) is not None:
                yield stored

    def each(self) -> Iterator[Stored]:
        """All checkpoints, in no order. All rows are read once."""
        known: Known = {hash_: Node.unpack(raw) for hash_, raw in self.rows.rows(b"n")}
        found = (self._stored(hash_, known) for hash_ in list(known))
        return (stored for stored in found if stored is not None)

    def _stored(self, hash_: bytes, known: Known) -> Stored | None:
        """The checkpoint at a node; None where there is none, or where its path is gone or damaged.

        `known`: nodes that were read already, and are not read again.
        """
        own, hashes, texts = known[hash_], list[bytes](), list[bytes]()
        if own is None or own.why is None:
            return None
        while hash_ != NO_PARENT:
            if hash_ not in known:
                known[hash_] = self.nodes([hash_]).get(hash_)
            node = known[hash_]
            if node is None or digest_of(node.parent, node.text) != hash_:  # no circle has such hashes
                return None
            hashes.append(hash_)
            texts.append(node.text)
            hash_ = node.parent
        *ids, namespace = texts
        if any(len(text) != BLOCK_BYTES for text in ids[1:]):
            return None
        return Stored(namespace.decode("utf-8", "replace"), b"".join(ids[::-1]), own, tuple(hashes[::-1]))

    # -- storing -----------------------------------------------------------------------------------

    def link(self, namespace: str, tokens: Tokens, why: Why) -> None:
        """Make a checkpoint known at the end of `tokens`, before its records are written."""
        path = chain(namespace, ids_of(tokens))

        def change(rows: Values) -> Values:
            for k, (parent, text, hash_) in enumerate(path):
                node = Node.unpack(rows[b"n" + hash_]) or Node(parent, text)
                node = replace(node, parent=parent, text=text)  # heals a damaged row
                if k == len(path) - 1:
                    node = replace(node, why=why, logits=False, written=int(time.time()))
                elif path[k + 1].hash not in node.next:
                    node = replace(node, next=(path[k + 1].hash, *node.next)[:MOST_NEXT])
                if k == len(path) - 2:
                    node = replace(node, ends=node.ends | 1 << (len(tokens) - 1) % BLOCK)
                rows[b"n" + hash_] = node.pack()
            return rows

        self.rows.update([b"n" + prefix.hash for prefix in path], change)

    def note_logits(self, hash_: bytes) -> None:
        """Note at a checkpoint's node that its record, which was written just now, has logits."""
        key = b"n" + hash_

        def change(rows: Values) -> Values:
            node = Node.unpack(rows[key])
            return {} if node is None else {key: replace(node, logits=True).pack()}

        self.rows.update([key], change)

    # -- eviction and removal --------------------------------------------------------------------------------

    def used(self, namespace: str, tokens: Tokens, seen: Seen) -> None:
        """A path was used: its records, and then all that leads to them, go last.

        Of the path itself the shallow checkpoints go first, since a conversation goes on at its end; the end
        of its first message and branch points go after them, attention after all checkpoints that need it.
        """
        items = sorted(seen.items, key=_order)
        rows = [b"n" + prefix.hash for prefix in reversed(chain(namespace, ids_of(tokens)))]
        ends = (b"n" + item.key[1:] for item in items)
        self.rows.touch([*(item.key for item in items), *dict.fromkeys((*ends, *rows))])

    def unneeded(self, tokens: Tokens | None = None, stays: int = 0) -> list[bytes]:
        """Keys of records and rows that no checkpoint needs; damaged and evicted rows leave such ones.

        `tokens`: a path that is to be forgotten, in any namespace: checkpoints that go on from it are not
        needed, nor those that lead only there. Checkpoints that other paths share are needed, and those that
        end within its first `stays` tokens; so is a path that another process has begun to write. Without
        `tokens`, such a path may be lost, which is a miss.
        """
        begun = math.inf if tokens is None else time.time() - BEGUN_SECONDS
        there = [key for kind in (b"r", b"a", b"n") for key in self.rows.keys(kind)]
        records, stored = set(there), list(self.each())
        gone = set() if tokens is None else _on_path(stored, ids_of(tokens), stays)
        needed = set[bytes]()
        for one in stored:
            written = one.keys[0] in records or one.node.written > begun
            if written and one.hashes[-1] not in gone:
                needed.update(one.keys, (b"n" + hash_ for hash_ in one.hashes))
        return [key for key in there if key not in needed]

    def remove_rows(self, keys: Sequence[bytes]) -> None:
        """Remove the rows among these keys, not the records."""
        rows = [key for key in keys if key.startswith(b"n")]
        for at in range(0, len(rows), BATCH):
            self.rows.update(rows[at : at + BATCH], dict.fromkeys)


def _on_path(stored: Sequence[Stored], ids: bytes, stays: int) -> set[bytes]:
    """Hashes of the checkpoints that go with a forgotten path."""
    gone, total = set[bytes](), len(ids) // ID_BYTES
    for namespace in {one.namespace for one in stored}:
        alike = [(one, shared(one.ids, ids)) for one in stored if one.namespace == namespace]
        near = [(one.hashes[-1], n, len(one.ids) // ID_BYTES) for one, n in alike if n]
        keep = max([stays, *(n for _, n, end in near if n < min(total, end))])
        gone |= {hash_ for hash_, n, end in near if n == total or (n == end and n > keep)}
    return gone


def _order(item: Item) -> tuple[int, int]:
    """The order in which records of one path go."""
    if item.node is None:
        return 2, -item.end
    return int(item.node.why in (Why.SYSTEM, Why.BRANCH)), item.end
