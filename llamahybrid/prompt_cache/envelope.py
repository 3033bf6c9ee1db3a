"""The one binary format of state: an envelope around the library's bytes, of a snapshot or of a segment.

The format is the same in RAM, in a file and on a server. A *record* is a file's content: an envelope, and
that of logits behind it, if there are any. Token ids are in the rows of its path; digests are of all ids.
Layout, little endian, 128 bytes, then the payload, which only `memory/` makes and reads:

    magic 8s | version u16 | pad 2 | start u32 | end u32 | pad 4 | namespace 64s
    namespace and ids [0, end) xxh3-128 | payload bytes u64 | payload xxh3-64 u64 | header xxh3-64 u64

A segment is attention KV of the tokens [start, end); a snapshot is the state at `end`, where it starts, too.
A blob that does not pass `open_sealed` never reaches native code, which asserts or corrupts on bad input
(src/llama-memory-recurrent.cpp, state_read_meta; src/llama-context.cpp, state_seq_set_data).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

import numpy as np
import xxhash

from llamahybrid.errors import RecordError, SnapshotError
from llamahybrid.prompt_cache.base import Bytes, Logits, Tokens
from llamahybrid.prompt_cache.ram import new_buffer

MAGIC = b"LLHSTATE"
VERSION = 3
"""Of envelopes and records alike."""

NAMESPACE_BYTES = 64

_BODY = struct.Struct(f"<8sHxxII4x{NAMESPACE_BYTES}s16sQQ")
_SEAL = struct.Struct("<Q")
HEADER_BYTES = _BODY.size + _SEAL.size


@dataclass(frozen=True, eq=False)
class Header:
    """The header of an envelope."""

    start: int
    """Tokens before a segment; a snapshot's is its `end`."""
    end: int
    """Tokens the state belongs to."""
    namespace: str
    """Model, engine, and parameters that the state is valid for."""
    digest: bytes
    """`path_digest` of [0, end)."""
    payload_bytes: int
    payload_digest: int

    def is_of(self, namespace: str, tokens: Tokens, start: int) -> bool:
        """Return whether it belongs to these tokens, the prefix up to its end. `start`: of a segment."""
        range_ = (self.start, self.end) == (start, len(tokens))
        return range_ and self.digest == path_digest(namespace, tokens)

    def check(self, payload: Bytes) -> None:
        """Raise SnapshotError unless this is the payload that was sealed."""
        if payload.nbytes != self.payload_bytes:
            raise SnapshotError(f"the state is truncated: {payload.nbytes} of {self.payload_bytes} bytes")
        if xxhash.xxh3_64_intdigest(payload.data) != self.payload_digest:
            raise SnapshotError("the state's payload is damaged")


def path_digest(namespace: str, tokens: Tokens) -> bytes:
    """Return the digest that identifies a prefix, 16 bytes."""
    hasher = xxhash.xxh3_128(namespace.encode())
    hasher.update(np.ascontiguousarray(tokens, dtype="<i4").data)
    return bytes(hasher.digest())


def seal(record: Bytes, *, namespace: str, tokens: Tokens, start: int | None = None) -> None:
    """Fill in the header of `record`, whose payload already lies behind HEADER_BYTES.

    `tokens`: the whole prefix the state belongs to, shape (end,). `start`: of a segment.
    Raises ValueError when the namespace is longer than `NAMESPACE_BYTES`.
    """
    name, end, payload = namespace.encode(), len(tokens), record[HEADER_BYTES:]
    if len(name) > NAMESPACE_BYTES:
        raise ValueError(f"a namespace may have {NAMESPACE_BYTES} bytes, this one has {len(name)}")
    body = _BODY.pack(
        MAGIC,
        VERSION,
        end if start is None else start,
        end,
        name,
        path_digest(namespace, tokens),
        payload.nbytes,
        xxhash.xxh3_64_intdigest(payload.data),
    )
    header = body + _SEAL.pack(xxhash.xxh3_64_intdigest(body))
    record[:HEADER_BYTES] = np.frombuffer(header, dtype=np.uint8)


def sealed(payload: Bytes, *, namespace: str, tokens: Tokens, start: int | None = None) -> Bytes:
    """A payload that lies elsewhere, copied into an envelope; see `seal`."""
    record = np.concatenate([np.empty(HEADER_BYTES, np.uint8), payload])
    seal(record, namespace=namespace, tokens=tokens, start=start)
    return record


def header_of(raw: bytes) -> Header:
    """Read the first HEADER_BYTES of an envelope. Raises SnapshotError when they are damaged."""
    body, own = raw[: _BODY.size], raw[_BODY.size : HEADER_BYTES]
    if len(own) != _SEAL.size or _SEAL.unpack(own)[0] != xxhash.xxh3_64_intdigest(body):
        raise SnapshotError("the state's header is damaged")
    magic, version, start, end, name, *rest = _BODY.unpack(body)
    if magic != MAGIC or version != VERSION:
        raise SnapshotError(f"not a state of format {VERSION}")
    try:
        namespace = name.rstrip(b"\0").decode()
    except UnicodeDecodeError:
        raise SnapshotError("the state's namespace is no text") from None
    if start > end or not end:
        raise SnapshotError("the state is of no range")
    return Header(start, end, namespace, *rest)


def open_sealed(record: Bytes, *, namespace: str, tokens: Tokens, start: int | None = None) -> Bytes:
    """Check an envelope against what it is about to be used for; a view of its payload, shape (n,).

    Raises SnapshotError when it is damaged, truncated, of another version, of another model, engine or
    context (`namespace`), of other tokens than `tokens`, shape (end,), or of another `start` (see `seal`).
    """
    if record.dtype != np.uint8 or record.ndim != 1:
        raise SnapshotError("a state is no row of bytes")
    header = header_of(record[:HEADER_BYTES].tobytes())
    if header.namespace != namespace:
        raise SnapshotError("the state belongs to another model, engine or context shape")
    if header.digest != path_digest(namespace, tokens):
        raise SnapshotError("the state belongs to other tokens")
    if (header.start, header.end) != (len(tokens) if start is None else start, len(tokens)):
        raise SnapshotError("a snapshot was taken for a segment, or a segment for another range")
    payload = record[HEADER_BYTES:]
    header.check(payload)
    return payload


class Record(NamedTuple):
    """A whole record, checked."""

    header: Header
    state: Bytes
    """The envelope."""
    logits: Logits | None


def pack(state: Bytes, logits: Logits | None, namespace: str, tokens: Tokens) -> list[memoryview]:
    """A record in parts, to be written one after the other; the sealed state of `tokens` is not copied."""
    if logits is None:
        return [state.data]
    row = np.ascontiguousarray(logits, dtype="<f4").view(np.uint8)
    return [state.data, sealed(row, namespace=namespace, tokens=tokens).data]


def read_record(file: BinaryIO, file_bytes: int) -> Record:
    """Read and check a whole record from the start. Raises RecordError when it is damaged."""
    header, state = _read_envelope(file, file_bytes)
    rest = file_bytes - state.nbytes
    if not rest:
        return Record(header, state, None)
    other, row = _read_envelope(file, rest)
    if other.digest != header.digest or row.nbytes != rest or row.nbytes % 4:
        raise RecordError("a record's logits are damaged")
    return Record(header, state, row[HEADER_BYTES:].view("<f4").astype(np.float32))


def _read_envelope(file: BinaryIO, most: int) -> tuple[Header, Bytes]:
    """Read and check an envelope. `most`: bytes that the file still has."""
    try:
        head = file.read(HEADER_BYTES)
        header = header_of(head)
        if HEADER_BYTES + header.payload_bytes > most:
            raise RecordError("a record is truncated")
        envelope = new_buffer(HEADER_BYTES + header.payload_bytes)
        envelope[:HEADER_BYTES] = np.frombuffer(head, np.uint8)
        if file.readinto(envelope[HEADER_BYTES:].data) != header.payload_bytes:  # type: ignore[attr-defined]
            raise RecordError("a record is truncated")
        header.check(envelope[HEADER_BYTES:])
    except SnapshotError as error:
        raise RecordError(str(error)) from None
    return header, envelope
