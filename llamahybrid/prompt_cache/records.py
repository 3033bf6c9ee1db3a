"""The file of a record: what `blocks` says of it, logits, and the envelope of a state as RAM holds it.

Layout, little endian: a frame of 40 bytes, the envelope's header (`envelope`), logits (float32), the payload.

    magic 8s | logits u32 | pad 12 | logits xxh3-64 u64 | all before and header xxh3-64 u64

Token ids, and why it is kept, are in the rows of its path; the envelope's digest is of all ids.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import xxhash

from llamahybrid.errors import RecordError, SnapshotError
from llamahybrid.prompt_cache.base import Bytes, Logits
from llamahybrid.prompt_cache.envelope import HEADER_BYTES, Header, header_of
from llamahybrid.prompt_cache.ram import new_buffer

FORMAT = 5
"""Of the rows and files of a folder or a server."""

MAGIC = b"LLHREC05"
_FRAME = struct.Struct("<8sI12xQ")
_SEAL = struct.Struct("<Q")
_FRAME_BYTES = _FRAME.size + _SEAL.size
HEAD_BYTES = _FRAME_BYTES + HEADER_BYTES


@dataclass(frozen=True, eq=False)
class Head:
    """The head of a record."""

    header: Header
    """Of the envelope."""
    n_logits: int
    logits_digest: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole record."""
        return HEAD_BYTES + 4 * self.n_logits + self.header.payload_bytes


@dataclass(frozen=True, eq=False)
class Record:
    """A whole record, checked."""

    head: Head
    logits: Logits | None
    state: Bytes
    """The envelope."""


def pack(state: Bytes, logits: Logits | None) -> tuple[bytes, memoryview]:
    """A record of a sealed state in two parts, to be written one after the other; its payload is not copied.

    Raises RecordError where `state` is not sealed.
    """
    header = state[:HEADER_BYTES].tobytes()
    try:
        header_of(header)
    except SnapshotError as error:
        raise RecordError(str(error)) from None
    row = b"" if logits is None else np.ascontiguousarray(logits, dtype="<f4").tobytes()
    frame = _FRAME.pack(MAGIC, len(row) // 4, xxhash.xxh3_64_intdigest(row))
    seal = _SEAL.pack(xxhash.xxh3_64_intdigest(frame + header))
    return frame + seal + header + row, state[HEADER_BYTES:].data


def head_of(raw: bytes) -> Head:
    """Read the first HEAD_BYTES of a record. Raises RecordError when they are damaged."""
    frame, seal, header = raw[: _FRAME.size], raw[_FRAME.size : _FRAME_BYTES], raw[_FRAME_BYTES:HEAD_BYTES]
    if len(header) != HEADER_BYTES or _SEAL.unpack(seal)[0] != xxhash.xxh3_64_intdigest(frame + header):
        raise RecordError("a record's head is damaged")
    magic, n_logits, digest = _FRAME.unpack(frame)
    if magic != MAGIC:
        raise RecordError(f"not a record of format {FORMAT}")
    try:
        return Head(header_of(header), n_logits, digest)
    except SnapshotError as error:
        raise RecordError(str(error)) from None


def read_head(file: BinaryIO, file_bytes: int) -> Head:
    """Read the head of a record whose file has `file_bytes`. Raises RecordError when it is damaged."""
    head = head_of(file.read(HEAD_BYTES))
    if head.nbytes != file_bytes:
        raise RecordError("a record is truncated, or longer than it says")
    return head


def read_record(file: BinaryIO, file_bytes: int) -> Record:
    """Read and check a whole record from the start. Raises RecordError when it is damaged."""
    head = read_head(file, file_bytes)
    row = file.read(4 * head.n_logits)
    if xxhash.xxh3_64_intdigest(row) != head.logits_digest:
        raise RecordError("a record's logits are damaged")
    file.seek(_FRAME_BYTES)
    state = new_buffer(HEADER_BYTES + head.header.payload_bytes)
    _fill(file, state[:HEADER_BYTES])
    file.seek(HEAD_BYTES + len(row))
    payload = state[HEADER_BYTES:]
    _fill(file, payload)
    try:
        head.header.check(payload)
    except SnapshotError as error:
        raise RecordError(str(error)) from None
    logits = np.frombuffer(row, "<f4").astype(np.float32) if head.n_logits else None
    return Record(head, logits, state)


def _fill(file: BinaryIO, buffer: Bytes) -> None:
    """Fill a buffer from a file. Raises RecordError where there are fewer."""
    view = buffer.data
    while len(view):
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise RecordError("a record is truncated")
        view = view[count:]
