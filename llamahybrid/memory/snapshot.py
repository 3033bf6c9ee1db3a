"""The one binary format of state: an envelope around the library's bytes, of a snapshot or of a segment.

Layout, little endian, 96 bytes, then the payload:

    magic 8s | version u16 | kind u16 | position u32 | fingerprint 16s | tokens xxh3-128 16s
    pos_min i32 | pos_max i32 | payload bytes u64 | payload xxh3-64 u64 | reserved 16s
    header xxh3-64 u64

A blob that does not pass `open_snapshot` never reaches native code, which asserts or corrupts on bad input
(src/llama-memory-recurrent.cpp, state_read_meta; src/llama-context.cpp, state_seq_set_data).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import xxhash

from llamahybrid.errors import SnapshotError
from llamahybrid.prompt_cache.base import Bytes, Tokens

MAGIC = b"LLHSNAP\0"
VERSION = 1
_BODY = struct.Struct("<8sHHI16s16siiQQ16x")
_SEAL = struct.Struct("<Q")
HEADER_BYTES = _BODY.size + _SEAL.size

SNAPSHOT = 0
"""The PARTIAL state at `position`; (pos_min, pos_max) as the library gave them."""
SEGMENT = 1
"""Attention KV of positions [pos_min, pos_max] on the path of the tokens [0, position)."""


@dataclass(frozen=True)
class SnapshotInfo:
    """What an envelope says of its payload."""

    position: int
    """Tokens [0, position) were decoded when the state was saved."""
    pos_min: int
    pos_max: int
    payload: Bytes
    """A view of the library's bytes, shape (n,)."""


def tokens_digest(tokens: Tokens) -> bytes:
    """16 bytes that name a token prefix."""
    return xxhash.xxh3_128_digest(np.ascontiguousarray(tokens, dtype="<i4").data)


def seal(
    record: Bytes,
    *,
    fingerprint: bytes,
    tokens: Tokens,
    positions: tuple[int, int],
    kind: int = SNAPSHOT,
    checksum: int | None = None,
) -> None:
    """Fill in the header of `record`, whose payload already lies behind HEADER_BYTES.

    `fingerprint`: 16 bytes naming model, engine and the context parameters that shape the state.
    `tokens`: the whole prefix the state belongs to, shape (position,). `positions`: (pos_min, pos_max)
    when it was saved. `checksum`: xxh3-64 of the payload, where it was computed on the way.
    """
    payload = record[HEADER_BYTES:]
    body = _BODY.pack(
        MAGIC,
        VERSION,
        kind,
        len(tokens),
        fingerprint,
        tokens_digest(tokens),
        *positions,
        payload.nbytes,
        xxhash.xxh3_64_intdigest(payload.data) if checksum is None else checksum,
    )
    header = body + _SEAL.pack(xxhash.xxh3_64_intdigest(body))
    record[:HEADER_BYTES] = np.frombuffer(header, dtype=np.uint8)


def open_snapshot(record: Bytes, *, fingerprint: bytes, tokens: Tokens, kind: int = SNAPSHOT) -> SnapshotInfo:
    """Check an envelope against what it is about to be used for and give its payload.

    Raises SnapshotError when it is damaged, truncated, of another version, of another model, engine or
    context (`fingerprint`), of another `kind`, or of other tokens than `tokens`, shape (position,).
    """
    if record.dtype != np.uint8 or record.ndim != 1 or record.nbytes < HEADER_BYTES:
        raise SnapshotError(f"snapshot is truncated: {record.nbytes} bytes")
    body = record[: _BODY.size].tobytes()
    (sealed,) = _SEAL.unpack(record[_BODY.size : HEADER_BYTES].tobytes())
    if sealed != xxhash.xxh3_64_intdigest(body):
        raise SnapshotError("snapshot header is damaged")
    magic, version, sort, position, owner, digest, pos_min, pos_max, size, checksum = _BODY.unpack(body)
    if magic != MAGIC or version != VERSION:
        raise SnapshotError(f"not a snapshot of format {VERSION}")
    if sort != kind:
        raise SnapshotError("a snapshot was taken for a segment, or a segment for a snapshot")
    if owner != fingerprint:
        raise SnapshotError("snapshot belongs to another model, engine or context shape")
    if digest != tokens_digest(tokens):
        raise SnapshotError("snapshot belongs to other tokens")
    payload = record[HEADER_BYTES:]
    if payload.nbytes != size:
        raise SnapshotError(f"snapshot is truncated: {payload.nbytes} of {size} payload bytes")
    if xxhash.xxh3_64_intdigest(payload.data) != checksum:
        raise SnapshotError("snapshot payload is damaged")
    return SnapshotInfo(position, pos_min, pos_max, payload)
