"""Records by token path over any store of rows: look-up, storing, the order in which things go,
forgetting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeAlias

from llamahybrid.prompt_cache.base import Tokens
from llamahybrid.prompt_cache.blocks import (
    BLOCK,
    BLOCK_BYTES,
    MOST_LEADS,
    NO_PARENT,
    Item,
    Kind,
    Lead,
    Node,
    Place,
    Reach,
    Why,
    chain,
    digest_of,
    root_of,
    shared,
    whole_blocks,
)
from llamahybrid.prompt_cache.nodes import ID_BYTES, ids_of, token_at
from llamahybrid.prompt_cache.records import Record
from llamahybrid.prompt_cache.seen import Seen

MOST_FOLLOWERS = 2
BATCH = 1000
"""Rows that are read at once."""

Values: TypeAlias = "dict[bytes, bytes | None]"
Known: TypeAlias = "dict[bytes, tuple[bytes, bytes] | None]"
"""Parents and texts of blocks by their hashes; None for a missing or damaged one."""


class Busy(OSError):
    """Another process holds the lock, or the store is still being opened: it may be asked again."""


class Rows:
    """A place for rows of keys and values, and for records; its methods raise OSError for what it refuses.

    The methods that do nothing here are for a place that has to be opened, or that tells an order.
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

    def get(self, keys: Sequence[bytes], *, all_: bool = True) -> list[bytes | None]:
        """Values of rows; None for a missing one. `all_` False: the first missing one may be the last."""
        raise NotImplementedError

    def has(self, keys: Sequence[bytes]) -> set[bytes]:
        """Keys of records that are there."""
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

    def count(self) -> int:
        """The number of records; 0 where counting takes too long."""
        return 0

    def last_used(self, key: bytes) -> float:
        """When a record was used last, in seconds since 1970; 0 where that is not known, or there is none."""
        return 0.0

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


@dataclass
class Path:
    """The whole path of a place."""

    namespace: str
    ids: bytes
    """Its token ids."""
    blocks: list[bytes]
    """Hashes of its nodes, the deepest first, the root among them."""


class BlockStore:
    """Records by token path."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    # -- looking -----------------------------------------------------------------------------------

    def look(self, namespace: str, tokens: Tokens) -> Seen:
        """Look a prompt up; all tokens are compared."""
        ids = ids_of(tokens)
        hashes = chain(root_of(namespace), ids)
        nodes = self._nodes(hashes, ids)
        if not nodes:
            return Seen(len(tokens))
        ends = {
            digest_of(hashes[k], ids[BLOCK_BYTES * k : BLOCK_BYTES * k + ID_BYTES * offset]): (k, offset)
            for k, node in enumerate(nodes)
            for offset in node.offsets()
            if BLOCK * k + offset <= len(tokens)
        }
        behind, last = self._behind(hashes[len(nodes) - 1], nodes[-1]), BLOCK * (len(nodes) - 1)
        alike = {following: last + shared(text, ids[ID_BYTES * last :]) for following, text in behind.items()}
        passing: dict[tuple[bytes, int], int] = {}
        for k, node in enumerate(nodes):
            for lead in node.leads:
                end = alike.get(lead.next, BLOCK * k) if node is nodes[-1] else BLOCK * k
                if lead.digest not in ends and lead.start < min(lead.end, end):
                    passing[lead.digest, lead.start] = end
        places = self.places([*ends, *dict.fromkeys(digest for digest, _ in passing)])
        items: list[Item] = []
        borrowed: list[Reach] = []
        for digest, (k, offset) in ends.items():
            place, tail = places.get(digest), ids[BLOCK_BYTES * k :][: ID_BYTES * offset]
            if place is not None and (place.block, place.tail) == (hashes[k], tail):
                items += place.items
                borrowed += place.borrowed
        through = [
            Reach(item, end)
            for (digest, start), end in passing.items()
            for item in (places[digest].items if digest in places else ())
            if not item.is_checkpoint and item.start == start
        ]
        there = self.rows.has([i.key for i in (*items, *(r.item for r in (*borrowed, *through)))])
        items = sorted((i for i in items if i.key in there), key=lambda i: (i.end, i.kind))
        length = max([last, *alike.values(), *(i.end for i in items)])
        followers = {
            token_at(behind[following], length - last)
            for following, end in alike.items()
            if end == length and len(behind[following]) > ID_BYTES * (length - last)
        }
        return Seen(
            len(tokens),
            length,
            tuple(sorted(followers))[:MOST_FOLLOWERS],
            tuple(items),
            tuple(r for r in borrowed if r.item.key in there),
            tuple(r for r in through if r.item.key in there),
        )

    def _nodes(self, hashes: Sequence[bytes], ids: bytes) -> list[Node]:
        """The nodes along a path up to the first that is unknown."""
        nodes: list[Node] = []
        for k, raw in enumerate(self.rows.get([b"n" + h for h in hashes], all_=False)):
            node = Node.unpack(raw)
            if node is None or (k and node.text != ids[BLOCK_BYTES * (k - 1) : BLOCK_BYTES * k]):
                break
            nodes.append(node)
        return nodes

    def _behind(self, hash_: bytes, node: Node) -> dict[bytes, bytes]:
        """Token ids behind a node, as far as the leads to the next block tell, by `Lead.next`."""
        texts: dict[bytes, bytes] = {}
        blocks = list(dict.fromkeys(lead.next for lead in node.leads if lead.next != lead.digest))
        for following, raw in zip(blocks, self.rows.get([b"n" + each for each in blocks]), strict=True):
            child = Node.unpack(raw)
            if child is not None and child.parent == hash_:
                texts[following] = child.text
        tails = self.places([lead.digest for lead in node.leads if lead.next == lead.digest])
        return texts | {digest: place.tail for digest, place in tails.items() if place.block == hash_}

    def places(self, digests: Sequence[bytes]) -> dict[bytes, Place]:
        """The places of these digests that are there."""
        found = zip(digests, self.rows.get([b"p" + d for d in digests]), strict=True)
        places = ((digest, Place.unpack(digest, raw)) for digest, raw in found)
        return {digest: place for digest, place in places if place is not None}

    def path_of(self, place: Place, known: Known | None = None) -> Path | None:
        """The path of a place; None where a block of it is gone or damaged.

        `known`: blocks that were read already, and are not read again.
        """
        known = {} if known is None else known
        texts, hashes, hash_ = [place.tail], list[bytes](), place.block
        while True:
            if hash_ not in known:
                known[hash_] = _sound(hash_, self.rows.get([b"n" + hash_])[0])
            block = known[hash_]
            if block is None:
                return None
            hashes.append(hash_)
            hash_, text = block
            if hash_ == NO_PARENT:
                ids = b"".join(reversed(texts))
                namespace = text.decode("utf-8", "replace")
                return Path(namespace, ids, hashes) if len(ids) == ID_BYTES * place.end else None
            texts.append(text)

    def each(self) -> Iterator[tuple[bytes, Place, Path]]:
        """The digests of all places, with places and paths, in no order. All rows are read once."""
        known: Known = {hash_: _sound(hash_, raw) for hash_, raw in self.rows.rows(b"n")}
        for digest, raw in self.rows.rows(b"p"):
            place = Place.unpack(digest, raw)
            if place is not None and (path := self.path_of(place, known)) is not None:
                yield digest, place, path

    # -- storing -----------------------------------------------------------------------------------

    def link(self, namespace: str, tokens: Tokens, new: Item, borrowed: Sequence[Reach] = ()) -> None:
        """Make a written record known at the end of `tokens`.

        `borrowed`: attention of other paths that a checkpoint needs.
        """
        ids, last = ids_of(tokens), whole_blocks(len(tokens))
        hashes = chain(root_of(namespace), ids[: BLOCK_BYTES * last])
        tail = ids[BLOCK_BYTES * last :]

        def change(rows: Values) -> Values:
            old = Place.unpack(new.digest, rows[b"p" + new.digest])
            if old is None or (old.block, old.tail) != (hashes[-1], tail):
                old = Place(hashes[-1], new.end, tail, ())
            kept = (i for i in old.items if i.key != new.key and not _replaces(new, i))
            place = replace(old, items=(*kept, new), borrowed=tuple(borrowed) or old.borrowed)
            nodes = {h: Node.unpack(rows[b"n" + h]) for h in hashes}
            rows[b"p" + new.digest] = place.pack()
            following, begun = new.digest, True
            for k in range(last, -1, -1):
                text = ids[BLOCK_BYTES * (k - 1) : BLOCK_BYTES * k] if k else namespace.encode()
                parent = hashes[k - 1] if k else NO_PARENT
                node = nodes[hashes[k]] or Node(parent, text=text)
                node = replace(node, parent=parent, text=text)  # heals a damaged row
                if k == last:
                    node = replace(node, ends=node.ends | 1 << (new.end - 1) % BLOCK)
                rows[b"n" + hashes[k]] = _led(node, following, new, begun=begun, end=BLOCK * k).pack()
                begun, following = nodes[hashes[k]] is None, hashes[k]
            return rows

        self.rows.update([b"p" + new.digest, *(b"n" + h for h in hashes)], change)

    def unlink(self, items: Iterable[Item]) -> None:
        """Remove records, and what places say of them."""
        for item in items:
            self.rows.remove(item.key)
            key = b"p" + item.digest

            def change(rows: Values, key: bytes = key, item: Item = item) -> Values:
                place = Place.unpack(item.digest, rows[key])
                if place is None:
                    return {key: None}
                kept = tuple(i for i in place.items if i.key != item.key)
                return {key: replace(place, items=kept).pack() if kept else None}

            self.rows.update([key], change)

    # -- order of eviction -------------------------------------------------------------------------

    def used(self, namespace: str, tokens: Tokens, seen: Seen) -> None:
        """A path was used: its records, and then all that leads to them, go last.

        Of the path itself the shallow checkpoints go first, since a conversation goes on at its end; the end
        of its first message and branch points go after them, attention after all checkpoints that need it.
        """
        hashes = chain(root_of(namespace), ids_of(tokens))
        items = sorted(seen.items, key=_order)
        others = [r.item for r in (*seen.borrowed, *seen.through)]
        keys = dict.fromkeys(i.key for i in (*items, *others))
        digests = dict.fromkeys(i.digest for i in (*items, *others))
        self.rows.touch([*keys, *(b"p" + d for d in digests), *(b"n" + h for h in reversed(hashes))])


def _sound(hash_: bytes, raw: bytes | None) -> tuple[bytes, bytes] | None:
    """Parent and text of a row, if their hash is that of its key: rows never form a circle then."""
    node = Node.unpack(raw)
    return (node.parent, node.text) if node is not None and node.hash == hash_ else None


def _led(node: Node, following: bytes, new: Item, *, begun: bool, end: int) -> Node:
    """A node that leads to a new record. `begun`: it is the first on its way; `end`: of the node."""
    if new.is_checkpoint:
        known = any(lead.next == following for lead in node.leads)
        lead = Lead(following, new.digest, new.end, new.end)
        wanted = begun and not known
    else:
        lead = Lead(following, new.digest, new.start, new.end)
        wanted = begun or new.start < end
    if not wanted:
        return node
    return replace(node, leads=(lead, *(each for each in node.leads if each != lead))[:MOST_LEADS])


def _replaces(new: Item, old: Item) -> bool:
    """The state with logits says what the one without does."""
    return new.kind == Kind.PROMPT and old.kind == Kind.STATE


def _order(item: Item) -> tuple[int, int]:
    """The order in which records of one path go."""
    if not item.is_checkpoint:
        return 2, -item.end
    return int(item.why in (Why.SYSTEM, Why.BRANCH)), item.end
