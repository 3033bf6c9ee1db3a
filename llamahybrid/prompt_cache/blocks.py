"""The layout of a store: token paths as chains of hashed blocks, in rows of keys and values.

A *node* is a prefix of a path: one lies at the end of each block of `BLOCK` tokens, and where a checkpoint
is. Its hash is of its parent's hash and of the tokens behind that; a root's is of the namespace. Its row
(key `n` + hash) holds its parent, these tokens (compared: no hash is trusted), the offsets behind it at
which checkpoints lie in the next block, and a few nodes that follow. A *record* is state: a checkpoint (`r`
+ hash of its node), or the attention of a node's tokens (`a` + hash), which all paths through that node
share. Nothing is loaded at start; a look-up reads the rows of its own path. Numbers are little endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import xxhash

from llamahybrid.prompt_cache.base import Range, Tokens, clipped
from llamahybrid.prompt_cache.nodes import ID_BYTES, IDS, common_prefix, tokens_of

FORMAT = 5
"""Of the rows and files of a folder or a server."""

BLOCK = 64
BLOCK_BYTES = BLOCK * ID_BYTES
HASH_BYTES = 16
NO_PARENT = bytes(HASH_BYTES)

MOST_NEXT = 8
"""Following nodes that a node names: enough to know where paths part."""

_NODE = struct.Struct(f"<{HASH_BYTES}s{BLOCK // 8}sBBBI")
_NO_CHECKPOINT = 255


class Why(IntEnum):
    """Why a checkpoint is kept for later processes."""

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
class Node:
    """A prefix's row."""

    parent: bytes
    """Hash of the prefix without `text`; `NO_PARENT`: this is a root."""
    text: bytes
    """The token ids behind its parent, of at most a block; of a root, its namespace."""
    ends: int = 0
    """Bit i: checkpoints lie i + 1 tokens behind it."""
    next: tuple[bytes, ...] = ()
    """Hashes of nodes that follow."""
    why: Why | None = None
    """Reason of the checkpoint that was written here; None: none was."""
    logits: bool = False
    """The checkpoint has the logits of a prompt's end."""
    written: int = 0
    """Seconds since 1970."""

    def pack(self) -> bytes:
        """Its row."""
        ends = self.ends.to_bytes(BLOCK // 8, "little")
        why = _NO_CHECKPOINT if self.why is None else self.why
        head = _NODE.pack(self.parent, ends, len(self.next), why, self.logits, self.written)
        return head + b"".join(self.next) + self.text

    @classmethod
    def unpack(cls, raw: bytes | None) -> Node | None:
        """The node of a row; None for what is none."""
        if raw is None or len(raw) < _NODE.size:
            return None
        parent, ends, n_next, why, logits, written = _NODE.unpack_from(raw)
        text = _NODE.size + n_next * HASH_BYTES
        known = why == _NO_CHECKPOINT or why < len(Why)
        if n_next > MOST_NEXT or not known or len(raw) < text:
            return None
        following = tuple(raw[at : at + HASH_BYTES] for at in range(_NODE.size, text, HASH_BYTES))
        reason = None if why == _NO_CHECKPOINT else Why(why)
        bits = int.from_bytes(ends, "little")
        return cls(parent, raw[text:], bits, following, reason, bool(logits), written)

    def offsets(self) -> list[int]:
        """Offsets behind the node at which checkpoints lie, ascending."""
        found, bits = [], self.ends
        while bits:
            found.append((bits & -bits).bit_length())
            bits &= bits - 1
        return found


@dataclass(frozen=True)
class Item:
    """A record that is there, for a path."""

    key: bytes
    start: int
    """Tokens before attention; of a checkpoint its `end`."""
    end: int
    """Tokens of the path to which it belongs."""
    nbytes: int
    node: Node | None = None
    """Of a checkpoint: its row. Of attention: that of a node of another path, which leaves this one behind
    `end`; else None."""

    @property
    def is_checkpoint(self) -> bool:
        """Return whether the record is no attention."""
        return self.key.startswith(b"r")

    def tokens(self, path: Tokens) -> Tokens:
        """The tokens before its end. `path`: those of the path, its `end` at least."""
        if self.node is None or self.is_checkpoint:
            return path[: self.end]
        return np.concatenate([path[: self.start], tokens_of(self.node.text)])

    @property
    def logits(self) -> bool:
        """True for a checkpoint with the logits of a prompt's end."""
        return self.node is not None and self.node.logits


@dataclass(frozen=True)
class Offer:
    """A restore point for a prompt, with the attention that is needed from there."""

    position: int
    checkpoint: Item | None
    """None where attention is all that is needed."""
    attention: tuple[Item, ...]
    """Ascending; the last one may reach beyond `position`."""

    @property
    def items(self) -> list[Item]:
        """The records to read."""
        return [*([self.checkpoint] if self.checkpoint else []), *self.attention]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in memory, about."""
        return sum(item.nbytes for item in self.items)


@dataclass(frozen=True)
class Seen:
    """The result of looking a prompt up in a store."""

    total: int = 0
    """Tokens of the prompt."""
    length: int = 0
    """Tokens of it with which any path begins."""
    followers: tuple[int, ...] = ()
    """Tokens that are known to follow there, two at most."""
    items: tuple[Item, ...] = ()
    """Records on its path, the shallowest first."""

    def serves(self, position: int, *, logits: bool, attention: bool) -> bool:
        """The path can be restored at a position, by a prompt that leaves it there, too; with its logits,
        with its attention, if asked."""
        points = [item for item in self.items if item.is_checkpoint and item.end == position]
        if not points or (logits and not points[0].logits):
            return False
        before = [item for item in self.items if item.end <= position and item.node is None]
        return not attention or cover(before, [(0, position)])[1] is None

    def offer(
        self, above: int, limit: int, missing: Sequence[Range], *, anywhere: bool = False
    ) -> Offer | None:
        """The deepest restore point at a position in (above, limit].

        `missing`: ascending ranges whose attention would have to come from here. `anywhere`: attention is all
        of the state, so that any position that it reaches will do.
        """
        if anywhere:
            attention, hole = cover(self.items, clipped(missing, limit))
            position = limit if hole is None else hole
            return Offer(position, None, tuple(attention)) if attention and position > above else None
        for item in reversed(self.items):
            serves = item.is_checkpoint and (item.end < self.total or item.logits)
            if serves and above < item.end <= limit:
                attention, hole = cover(self.items, clipped(missing, item.end))
                if hole is None:
                    return Offer(item.end, item, tuple(attention))
        return None


def cover(items: Iterable[Item], ranges: Iterable[Range]) -> tuple[list[Item], int | None]:
    """The attention for ascending ranges, up to the first hole; its position, None without one."""
    longest: dict[int, Item] = {}
    for item in items:
        if not item.is_checkpoint and (item.start not in longest or item.end > longest[item.start].end):
            longest[item.start] = item
    found: dict[Item, None] = {}
    for start, end in ranges:
        at = start
        while at < end:
            there = longest.get(at - at % BLOCK)
            if there is None or there.end <= at:
                return list(found), at
            found[there] = None
            at = there.end
    return list(found), None


class Prefix(NamedTuple):
    """A place for a node."""

    parent: bytes
    """Hash of the prefix before it; `NO_PARENT`: this is a root."""
    text: bytes
    hash: bytes

    @classmethod
    def behind(cls, parent: bytes, text: bytes) -> Prefix:
        """The prefix that has this text behind its parent."""
        return cls(parent, text, digest_of(parent, text))

    def is_of(self, node: Node | None) -> bool:
        """Return whether a row is that of this prefix: no hash is trusted."""
        return node is not None and (node.parent, node.text) == (self.parent, self.text)


def digest_of(parent: bytes, text: bytes) -> bytes:
    """The hash of a prefix: of that of its whole blocks, and of the token ids behind them."""
    return xxhash.xxh3_128_digest(parent + text)


def chain(namespace: str, ids: bytes) -> list[Prefix]:
    """The root, the prefixes at each whole block of token ids, and that of all of them."""
    path = [Prefix.behind(NO_PARENT, namespace.encode())]
    for at in range(0, len(ids), BLOCK_BYTES):
        path.append(Prefix.behind(path[-1].hash, ids[at : at + BLOCK_BYTES]))
    return path


def digest_at(namespace: str, ids: bytes) -> bytes:
    """The hash of the prefix of these token ids."""
    return chain(namespace, ids)[-1].hash


def spans(end: int) -> list[Range]:
    """The ranges of the nodes along a path of `end` tokens."""
    return [(at, min(at + BLOCK, end)) for at in range(0, end, BLOCK)]


def shared(a: bytes, b: bytes) -> int:
    """The length of the common prefix of two rows of ids, in tokens."""
    n = min(len(a), len(b)) // ID_BYTES
    return common_prefix(np.frombuffer(a, IDS, n), np.frombuffer(b, IDS, n))
