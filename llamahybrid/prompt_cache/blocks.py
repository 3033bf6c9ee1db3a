"""The layout of a store: token paths as chains of hashed blocks, in rows of keys and values.

A *node* is a block of `BLOCK` tokens. Its key is the hash of all tokens up to its end; the first hash is that
of the namespace, so that each has a root of its own. Its row holds its parent, its tokens (compared: no hash
is trusted), the offsets in the next block at which records end, and a few *leads*: records that end farther
on. A *place* is the exact prefix where records end; its row names them and holds the tokens behind the last
whole block. A *record* is the state itself. Nothing is loaded at start; a look-up reads the rows of its own
path. Keys: `n` + hash, `p` + digest of the prefix, `r` + that digest + start + kind. Numbers are little
endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import xxhash

from llamahybrid.prompt_cache.nodes import ID_BYTES, IDS, common_prefix

BLOCK = 256
BLOCK_BYTES = BLOCK * ID_BYTES
HASH_BYTES = 16
NO_PARENT = bytes(HASH_BYTES)

MOST_LEADS = 8
"""Of one node: enough to know where paths part, and attention that runs on behind a block."""

_LEAD = struct.Struct(f"<{HASH_BYTES}s{HASH_BYTES}sII")
_ITEM = struct.Struct(f"<{HASH_BYTES}sIIIQBBI")
_PLACE = struct.Struct(f"<{HASH_BYTES}sIH")
_RECORD = struct.Struct("<IB")
_BITMAP_BYTES = BLOCK // 8
_NODE_BYTES = HASH_BYTES + _BITMAP_BYTES + 1


class Kind(IntEnum):
    """Kinds of records."""

    STATE = 0
    PROMPT = 1
    """A state with the logits of a prompt's end."""
    ATTENTION = 2


class Why(IntEnum):
    """Why a record is kept for later processes."""

    TIP = 0
    """A conversation ended there."""
    PROMPT = 1
    """A prompt asked for its answer there."""
    SYSTEM = 2
    """The first message ends there."""
    BRANCH = 3
    """Conversations have parted there."""
    RUNG = 4
    """A history that parts behind it goes on from there."""


@dataclass(frozen=True)
class Item:
    """A record, as its place names it."""

    digest: bytes
    """Of the prefix at whose end it lies."""
    start: int
    end: int
    nbytes: int
    kind: Kind
    why: Why
    written: int
    """Seconds since 1970."""

    @property
    def key(self) -> bytes:
        """The key of the record."""
        return b"r" + self.digest + _RECORD.pack(self.start, self.kind)

    @property
    def is_checkpoint(self) -> bool:
        """Return whether the record is no attention."""
        return self.kind != Kind.ATTENTION


@dataclass(frozen=True)
class Reach:
    """Attention of a record, and up to where its path is that of a prompt."""

    item: Item
    end: int


@dataclass(frozen=True)
class Lead:
    """A record that ends behind a node's block."""

    next: bytes
    """Hash of the next block on its path, or its own digest if it ends within that block."""
    digest: bytes
    start: int
    end: int


@dataclass(frozen=True)
class Node:
    """A block's row."""

    parent: bytes
    """Hash of the block before; `NO_PARENT`: this is a root."""
    ends: int = 0
    """Bit i: records end i + 1 tokens behind it."""
    leads: tuple[Lead, ...] = ()
    text: bytes = b""
    """Its token ids; of a root, its namespace."""

    @property
    def hash(self) -> bytes:
        """The hash that its key has, if its row is right."""
        return digest_of(b"" if self.parent == NO_PARENT else self.parent, self.text)

    def pack(self) -> bytes:
        """Its row."""
        leads = b"".join(_LEAD.pack(lead.next, lead.digest, lead.start, lead.end) for lead in self.leads)
        return (
            self.parent
            + self.ends.to_bytes(_BITMAP_BYTES, "little")
            + bytes([len(self.leads)])
            + leads
            + self.text
        )

    @classmethod
    def unpack(cls, raw: bytes | None) -> Node | None:
        """The node of a row; None for what is none."""
        if raw is None or len(raw) < _NODE_BYTES or raw[_NODE_BYTES - 1] > MOST_LEADS:
            return None
        text = _NODE_BYTES + raw[_NODE_BYTES - 1] * _LEAD.size
        if len(raw) < text:
            return None
        leads = tuple(Lead(*fields) for fields in _LEAD.iter_unpack(raw[_NODE_BYTES:text]))
        ends = int.from_bytes(raw[HASH_BYTES : _NODE_BYTES - 1], "little")
        return cls(raw[:HASH_BYTES], ends, leads, raw[text:])

    def offsets(self) -> list[int]:
        """Offsets behind the node at which records end, ascending."""
        found, bits = [], self.ends
        while bits:
            found.append((bits & -bits).bit_length())
            bits &= bits - 1
        return found


@dataclass(frozen=True)
class Place:
    """A prefix at whose end records lie."""

    block: bytes
    """Hash of its last whole block, of which `tail` is what follows."""
    end: int
    tail: bytes
    items: tuple[Item, ...]
    borrowed: tuple[Reach, ...] = ()
    """Attention of other paths that a checkpoint here needs, and up to where it is that of this one."""

    def pack(self) -> bytes:
        """Its row."""
        named = (*(Reach(i, i.end) for i in self.items), *self.borrowed)
        items = b"".join(
            _ITEM.pack(i.digest, i.start, i.end, r.end, i.nbytes, i.kind, i.why, i.written)
            for r in named
            for i in [r.item]
        )
        return _PLACE.pack(self.block, self.end, len(self.tail) // ID_BYTES) + self.tail + items

    @classmethod
    def unpack(cls, digest: bytes, raw: bytes | None) -> Place | None:
        """The place of a row; None for what is none."""
        if raw is None or len(raw) < _PLACE.size:
            return None
        block, end, n_tail = _PLACE.unpack_from(raw)
        at = _PLACE.size + ID_BYTES * n_tail
        sound = 0 < n_tail <= BLOCK and n_tail == (end - 1) % BLOCK + 1
        if not sound or len(raw) < at or (len(raw) - at) % _ITEM.size:
            return None
        try:
            named = [
                Reach(Item(of, start, until, nbytes, Kind(kind), Why(why), written), shared)
                for of, start, until, shared, nbytes, kind, why, written in _ITEM.iter_unpack(raw[at:])
            ]
        except ValueError:
            return None
        own = tuple(r.item for r in named if r.item.digest == digest and r.item.end == end)
        borrowed = tuple(r for r in named if r.item.digest != digest and r.end <= end)
        return cls(block, end, raw[_PLACE.size : at], own, borrowed)


def root_of(namespace: str) -> bytes:
    """The first hash of a namespace's paths."""
    return xxhash.xxh3_128_digest(namespace.encode())


def chain(root: bytes, ids: bytes) -> list[bytes]:
    """The root, and the hash behind each whole block of token ids."""
    hashes = [root]
    for at in range(0, len(ids) - BLOCK_BYTES + 1, BLOCK_BYTES):
        hashes.append(digest_of(hashes[-1], ids[at : at + BLOCK_BYTES]))
    return hashes


def digest_of(block: bytes, tail: bytes) -> bytes:
    """The hash of a prefix: that of its whole blocks, and the token ids behind them."""
    return xxhash.xxh3_128_digest(block + tail)


def digest_at(namespace: str, ids: bytes) -> bytes:
    """The digest of the prefix of these token ids."""
    whole = BLOCK_BYTES * whole_blocks(len(ids) // ID_BYTES)
    return digest_of(chain(root_of(namespace), ids[:whole])[-1], ids[whole:])


def whole_blocks(end: int) -> int:
    """Whole blocks before a place at `end`, behind which its tail has a token at least."""
    return (end - 1) // BLOCK


def shared(a: bytes, b: bytes) -> int:
    """The length of the common prefix of two rows of ids, in tokens."""
    n = min(len(a), len(b)) // ID_BYTES
    return common_prefix(np.frombuffer(a, IDS, n), np.frombuffer(b, IDS, n))
