"""The records of the disk tier. Each stands for itself, so that whatever of them survives is of use.

Layout, little endian: a head of 176 bytes, the ids of the whole prefix (int32), logits (float32), payload.

    magic 8s | version u16 | kind u16 | start u32 | end u32 | base u32 | logits u32 | pad 4 | namespace 48s
    written u64 | payload bytes u64 | prefix [0, base) xxh3-128 | prefix [0, end) xxh3-128
    ids [base, end) xxh3-64 u64 | logits xxh3-64 u64 | payload xxh3-64 u64 | reserved 16s | head xxh3-64 u64

`base`: where another record's prefix ended when this one was written. Who knows that prefix reads the ids
from there on only, so that an index is read in time proportional to its distinct tokens. The payload is what
the RAM tier holds: an envelope of `memory/snapshot.py`, opaque here.
"""

from __future__ import annotations

import re
import struct
import time
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import xxhash

from llamahybrid.errors import RecordError
from llamahybrid.prompt_cache.base import Bytes, Logits, Tokens
from llamahybrid.prompt_cache.nodes import ids_of, tokens_of
from llamahybrid.prompt_cache.ram import new_buffer

MAGIC = b"LLHDISK\0"
VERSION = 2
SNAPSHOT, SEGMENT = 0, 1

_BODY = struct.Struct("<8sHHIIII4x48sQQ16s16sQQQ16x")
_SEAL = struct.Struct("<Q")
HEAD_BYTES = _BODY.size + _SEAL.size
NAMESPACE_BYTES = 48

KEY = re.compile(r"([0-9a-f]{32})-(attention|prompt|state)-(0|[1-9][0-9]{0,8})-([1-9][0-9]{0,8})")
"""Digest of the whole prefix, what it is, start, end."""


@dataclass(frozen=True, eq=False)
class Head:
    """What a record says of itself without its tokens; not checked against its name yet."""

    namespace: str
    kind: int
    start: int
    """Tokens before a segment; a snapshot's is its `end`."""
    end: int
    """Tokens the state belongs to."""
    base: int
    """Where the own range of ids begins."""
    n_logits: int
    written: int
    """Seconds since 1970."""
    payload_bytes: int
    base_digest: bytes
    """`path_digest` of [0, base)."""
    digest: bytes
    """`path_digest` of [0, end)."""
    own_digest: int
    logits_digest: int
    payload_digest: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole record."""
        return HEAD_BYTES + 4 * self.end + 4 * self.n_logits + self.payload_bytes

    @property
    def key(self) -> str:
        """The key that belongs to this record."""
        return _key(self.digest, self.kind, self.start, self.end, logits=bool(self.n_logits))


@dataclass(frozen=True, eq=False)
class Record:
    """A whole record, checked."""

    head: Head
    tokens: Tokens
    """The whole prefix [0, end)."""
    logits: Logits | None
    payload: Bytes


def path_digest(namespace: str, tokens: Tokens) -> bytes:
    """What tells one prefix from all others, 16 bytes."""
    hasher = xxhash.xxh3_128(namespace.encode())
    hasher.update(np.ascontiguousarray(tokens, dtype="<i4").data)
    return bytes(hasher.digest())


def key_of(namespace: str, kind: int, start: int, tokens: Tokens, *, logits: bool = False) -> str:
    """The name of a record: equal for equal state, whoever writes it."""
    return _key(path_digest(namespace, tokens), kind, start, len(tokens), logits=logits)


def _key(digest: bytes, kind: int, start: int, end: int, *, logits: bool) -> str:
    sort = "attention" if kind == SEGMENT else "prompt" if logits else "state"
    return f"{digest.hex()}-{sort}-{start}-{end}"


def pack(
    namespace: str,
    kind: int,
    start: int,
    tokens: Tokens,
    logits: Logits | None,
    payload: Bytes,
    base: int = 0,
) -> tuple[bytes, memoryview]:
    """A record in two parts, to be written one after the other; the payload is not copied.

    Raises ValueError when the namespace is longer than `NAMESPACE_BYTES`.
    """
    name = namespace.encode()
    if len(name) > NAMESPACE_BYTES:
        raise ValueError(f"a namespace may have {NAMESPACE_BYTES} bytes, this one has {len(name)}")
    ids = ids_of(tokens)
    row = b"" if logits is None else np.ascontiguousarray(logits, dtype="<f4").tobytes()
    body = _BODY.pack(
        MAGIC,
        VERSION,
        kind,
        start,
        len(tokens),
        base,
        len(row) // 4,
        name,
        int(time.time()),
        payload.nbytes,
        path_digest(namespace, tokens[:base]),
        path_digest(namespace, tokens),
        xxhash.xxh3_64_intdigest(ids[4 * base :]),
        xxhash.xxh3_64_intdigest(row),
        xxhash.xxh3_64_intdigest(payload.data),
    )
    return body + _SEAL.pack(xxhash.xxh3_64_intdigest(body)) + ids + row, payload.data


def head_of(raw: bytes) -> Head:
    """What the first bytes of a record say. Raises RecordError when they are damaged."""
    body, seal = raw[: _BODY.size], raw[_BODY.size : HEAD_BYTES]
    if len(seal) != _SEAL.size or _SEAL.unpack(seal)[0] != xxhash.xxh3_64_intdigest(body):
        raise RecordError("a record's head is damaged")
    magic, version, kind, start, end, base, n_logits, name, *rest = _BODY.unpack(body)
    if magic != MAGIC or version != VERSION:
        raise RecordError(f"not a record of format {VERSION}")
    try:
        namespace = name.rstrip(b"\0").decode()
    except UnicodeDecodeError:
        raise RecordError("a record's namespace is no text") from None
    sound = (start < end) if kind == SEGMENT else (kind == SNAPSHOT and start == end and end > 0)
    if not sound or base > end:
        raise RecordError("a record is of no range")
    return Head(namespace, kind, start, end, base, n_logits, *rest)


def read_head(file: BinaryIO, file_bytes: int) -> Head:
    """Read the head of a record whose file has so many bytes. Raises RecordError when it is damaged."""
    head = head_of(file.read(HEAD_BYTES))
    if head.nbytes != file_bytes:
        raise RecordError("a record is truncated, or longer than it says")
    return head


def read_ids(file: BinaryIO, head: Head, base: int = 0) -> bytes:
    """The ids [base, end) behind `read_head`, 4 bytes each; `base`: 0 or the head's own.

    Raises RecordError when they are damaged. From 0 on they are checked against all that the head says.
    """
    if base:
        file.seek(HEAD_BYTES + 4 * base)
    ids = file.read(4 * (head.end - base))
    own = ids[4 * (head.base - base) :]
    if len(ids) != 4 * (head.end - base) or xxhash.xxh3_64_intdigest(own) != head.own_digest:
        raise RecordError("a record's ids are damaged")
    if not base and path_digest(head.namespace, np.frombuffer(ids, "<i4")) != head.digest:
        raise RecordError("a record's ids are damaged")
    return ids


def read_record(file: BinaryIO, file_bytes: int) -> Record:
    """Read and check a whole record from the start. Raises RecordError when it is damaged."""
    head = read_head(file, file_bytes)
    tokens = tokens_of(read_ids(file, head))
    if path_digest(head.namespace, tokens[: head.base]) != head.base_digest:
        raise RecordError("a record lies about the prefix that it goes on from")
    row = file.read(4 * head.n_logits)
    if xxhash.xxh3_64_intdigest(row) != head.logits_digest:
        raise RecordError("a record's logits are damaged")
    payload = new_buffer(head.payload_bytes)
    read = file.readinto(payload.data)  # type: ignore[attr-defined]
    if read != payload.nbytes or file.read(1):
        raise RecordError("a record is truncated, or longer than it says")
    if xxhash.xxh3_64_intdigest(payload.data) != head.payload_digest:
        raise RecordError("a record's payload is damaged")
    logits = np.frombuffer(row, "<f4").astype(np.float32) if head.n_logits else None
    return Record(head, tokens, logits, payload)
