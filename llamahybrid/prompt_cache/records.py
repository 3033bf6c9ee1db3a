"""The records of the disk tier. Each stands for itself, so that whatever of them survives is of use.

Layout, little endian: a head of 128 bytes, the ids of the whole prefix (int32), logits (float32), payload.

    magic 8s | version u16 | kind u16 | start u32 | end u32 | logits u32 | namespace 48s | written u64
    payload bytes u64 | ids and logits xxh3-64 u64 | payload xxh3-64 u64 | reserved 16s | head xxh3-64 u64

The payload is what the RAM tier holds: an envelope of `live/snapshot.py`, opaque here.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import xxhash

from llamahybrid.errors import RecordError
from llamahybrid.prompt_cache.base import Bytes, Logits, Tokens
from llamahybrid.prompt_cache.ram import new_buffer

MAGIC = b"LLHDISK\0"
VERSION = 1
SNAPSHOT, SEGMENT = 0, 1

_BODY = struct.Struct("<8sHHIII48sQQQQ16x")
_SEAL = struct.Struct("<Q")
HEAD_BYTES = _BODY.size + _SEAL.size
NAMESPACE_BYTES = 48


@dataclass(frozen=True, eq=False)
class Head:
    """What a record says of itself; its checksums hold, the payload was not looked at."""

    namespace: str
    kind: int
    start: int
    """Tokens before a segment; a snapshot's is its `end`."""
    tokens: Tokens
    """The whole prefix [0, end)."""
    logits: Logits | None
    written: int
    """Seconds since 1970."""
    payload_bytes: int
    payload_digest: int
    used: float = 0.0
    """When the record was read last, or written, in seconds since 1970; 0: not known."""

    @property
    def end(self) -> int:
        """Tokens the state belongs to."""
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole record."""
        logits = 0 if self.logits is None else self.logits.nbytes
        return HEAD_BYTES + self.tokens.nbytes + logits + self.payload_bytes


def key_of(namespace: str, kind: int, start: int, tokens: Tokens, *, logits: bool = False) -> str:
    """The name of a record: equal for equal state, whoever writes it."""
    hasher = xxhash.xxh3_128(namespace.encode())
    hasher.update(np.ascontiguousarray(tokens, dtype="<i4").data)
    sort = "attention" if kind == SEGMENT else "prompt" if logits else "state"
    return f"{hasher.hexdigest()}-{sort}-{start}-{len(tokens)}"


def pack(
    namespace: str, kind: int, start: int, tokens: Tokens, logits: Logits | None, payload: Bytes
) -> tuple[bytes, memoryview]:
    """A record in two parts, to be written one after the other; the payload is not copied.

    Raises ValueError when the namespace is longer than `NAMESPACE_BYTES`.
    """
    name = namespace.encode()
    if len(name) > NAMESPACE_BYTES:
        raise ValueError(f"a namespace may have {NAMESPACE_BYTES} bytes, this one has {len(name)}")
    ids = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    row = b"" if logits is None else np.ascontiguousarray(logits, dtype="<f4").tobytes()
    body = _BODY.pack(
        MAGIC,
        VERSION,
        kind,
        start,
        len(tokens),
        len(row) // 4,
        name,
        int(time.time()),
        payload.nbytes,
        xxhash.xxh3_64_intdigest(ids + row),
        xxhash.xxh3_64_intdigest(payload.data),
    )
    return body + _SEAL.pack(xxhash.xxh3_64_intdigest(body)) + ids + row, payload.data


def read_head(file: BinaryIO) -> Head:
    """Read a record up to its payload. Raises RecordError when it is damaged or of another version."""
    raw = file.read(HEAD_BYTES)
    if len(raw) != HEAD_BYTES or _SEAL.unpack(raw[_BODY.size :])[0] != xxhash.xxh3_64_intdigest(
        raw[: _BODY.size]
    ):
        raise RecordError("a record's head is damaged")
    magic, version, kind, start, end, n_logits, name, written, size, digest, payload = _BODY.unpack(
        raw[: _BODY.size]
    )
    if magic != MAGIC or version != VERSION:
        raise RecordError(f"not a record of format {VERSION}")
    body = file.read(4 * (end + n_logits))
    if len(body) != 4 * (end + n_logits) or xxhash.xxh3_64_intdigest(body) != digest:
        raise RecordError("a record's ids are damaged")
    ids = np.frombuffer(body, "<i4", end).astype(np.int32)
    row = np.frombuffer(body, "<f4", n_logits, 4 * end).astype(np.float32) if n_logits else None
    return Head(name.rstrip(b"\0").decode(), kind, start, ids, row, written, size, payload)


def read_payload(file: BinaryIO, head: Head, out: Bytes | None = None) -> Bytes:
    """Read the payload behind `read_head`, shape (payload_bytes,). Raises RecordError when it is damaged."""
    payload = new_buffer(head.payload_bytes) if out is None else out
    read = file.readinto(payload.data)  # type: ignore[attr-defined]
    if read != payload.nbytes or file.read(1):
        raise RecordError("a record is truncated, or longer than it says")
    if xxhash.xxh3_64_intdigest(payload.data) != head.payload_digest:
        raise RecordError("a record's payload is damaged")
    return payload
