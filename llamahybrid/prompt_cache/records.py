"""The records of the disk tier. Each stands for itself, so that whatever of them survives is of use.

A record is an envelope as RAM holds it (`envelope`) and, between its header and its payload, a frame of what
only a later process needs, the ids of the whole prefix (int32), and logits (float32). Layout of the frame,
little endian, 56 bytes:

    base u32 | logits u32 | written u64 | prefix [0, base) xxh3-128 | ids [base, end) xxh3-64 u64
    logits xxh3-64 u64 | header and frame xxh3-64 u64

`base`: where another record's prefix ended when this one was written. Who knows that prefix reads the ids
from there on only, so that an index is read in time proportional to its distinct tokens.
"""

from __future__ import annotations

import re
import struct
import time
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import xxhash

from llamahybrid.errors import RecordError, SnapshotError
from llamahybrid.prompt_cache.base import Bytes, Logits, Tokens
from llamahybrid.prompt_cache.envelope import HEADER_BYTES, Header, header_of, path_digest
from llamahybrid.prompt_cache.nodes import ids_of, tokens_of
from llamahybrid.prompt_cache.ram import new_buffer

_FRAME = struct.Struct("<IIQ16sQQ")
_SEAL = struct.Struct("<Q")
_SEALED_BYTES = HEADER_BYTES + _FRAME.size
HEAD_BYTES = _SEALED_BYTES + _SEAL.size

KEY = re.compile(r"([0-9a-f]{32})-(attention|prompt|state)-(0|[1-9][0-9]{0,8})-([1-9][0-9]{0,8})")
"""Digest of the whole prefix, what it is, start, end."""


@dataclass(frozen=True, eq=False)
class Head(Header):
    """What a record says of itself without its tokens; not checked against its name yet."""

    base: int
    """Where the own range of ids begins."""
    n_logits: int
    written: int
    """Seconds since 1970."""
    base_digest: bytes
    """`path_digest` of [0, base)."""
    own_digest: int
    logits_digest: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole record."""
        return HEAD_BYTES + 4 * self.end + 4 * self.n_logits + self.payload_bytes

    @property
    def key(self) -> str:
        """The key that belongs to this record."""
        return _key(self.digest, self.start, self.end, logits=bool(self.n_logits))


@dataclass(frozen=True, eq=False)
class Record:
    """A whole record, checked."""

    head: Head
    tokens: Tokens
    """The whole prefix [0, end)."""
    logits: Logits | None
    state: Bytes
    """The envelope."""


def key_of(namespace: str, start: int, tokens: Tokens, *, logits: bool = False) -> str:
    """The name of a record: equal for equal state, whoever writes it."""
    return _key(path_digest(namespace, tokens), start, len(tokens), logits=logits)


def _key(digest: bytes, start: int, end: int, *, logits: bool) -> str:
    sort = "attention" if start < end else "prompt" if logits else "state"
    return f"{digest.hex()}-{sort}-{start}-{end}"


def pack(state: Bytes, tokens: Tokens, logits: Logits | None, base: int = 0) -> tuple[bytes, memoryview]:
    """A record of a sealed state in two parts, to be written one after the other; its payload is not copied.

    `tokens`: the whole prefix, shape (end,). Raises RecordError where `state` is not sealed.
    """
    header = state[:HEADER_BYTES].tobytes()
    ids = ids_of(tokens)
    row = b"" if logits is None else np.ascontiguousarray(logits, dtype="<f4").tobytes()
    frame = _FRAME.pack(
        base,
        len(row) // 4,
        int(time.time()),
        path_digest(_header(header).namespace, tokens[:base]),
        xxhash.xxh3_64_intdigest(ids[4 * base :]),
        xxhash.xxh3_64_intdigest(row),
    )
    head = header + frame
    return head + _SEAL.pack(xxhash.xxh3_64_intdigest(head)) + ids + row, state[HEADER_BYTES:].data


def _header(raw: bytes) -> Header:
    try:
        return header_of(raw)
    except SnapshotError as error:
        raise RecordError(str(error)) from None


def head_of(raw: bytes) -> Head:
    """What the first bytes of a record say. Raises RecordError when they are damaged."""
    header = _header(raw[:HEADER_BYTES])
    seal = raw[_SEALED_BYTES:HEAD_BYTES]
    if len(seal) != _SEAL.size or _SEAL.unpack(seal)[0] != xxhash.xxh3_64_intdigest(raw[:_SEALED_BYTES]):
        raise RecordError("a record's head is damaged")
    head = Head(*vars(header).values(), *_FRAME.unpack(raw[HEADER_BYTES:_SEALED_BYTES]))
    if head.base > head.end:
        raise RecordError("a record is of no range")
    return head


def _sized(head: Head, file_bytes: int) -> Head:
    if head.nbytes != file_bytes:
        raise RecordError("a record is truncated, or longer than it says")
    return head


def read_head(file: BinaryIO, file_bytes: int) -> Head:
    """Read the head of a record whose file has so many bytes. Raises RecordError when it is damaged."""
    return _sized(head_of(file.read(HEAD_BYTES)), file_bytes)


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
    raw = file.read(HEAD_BYTES)
    head = _sized(head_of(raw), file_bytes)
    tokens = tokens_of(read_ids(file, head))
    if path_digest(head.namespace, tokens[: head.base]) != head.base_digest:
        raise RecordError("a record lies about the prefix that it goes on from")
    row = file.read(4 * head.n_logits)
    if xxhash.xxh3_64_intdigest(row) != head.logits_digest:
        raise RecordError("a record's logits are damaged")
    state = new_buffer(HEADER_BYTES + head.payload_bytes)
    state[:HEADER_BYTES] = np.frombuffer(raw, np.uint8, HEADER_BYTES)
    payload = state[HEADER_BYTES:]
    read = file.readinto(payload.data)  # type: ignore[attr-defined]
    if read != payload.nbytes or file.read(1):
        raise RecordError("a record is truncated, or longer than it says")
    try:
        head.check(payload)
    except SnapshotError as error:
        raise RecordError(str(error)) from None
    logits = np.frombuffer(row, "<f4").astype(np.float32) if head.n_logits else None
    return Record(head, tokens, logits, state)
