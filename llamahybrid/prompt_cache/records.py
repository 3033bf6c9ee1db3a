"""The file of a record: the envelope of a state, as RAM holds it; behind it that of logits, if there are any.

Token ids, and why it is kept, are in the rows of its path; the digests in both envelopes are of all ids.
"""

from __future__ import annotations

from typing import BinaryIO, NamedTuple

import numpy as np

from llamahybrid.errors import RecordError, SnapshotError
from llamahybrid.prompt_cache.base import Bytes, Logits, Tokens
from llamahybrid.prompt_cache.envelope import HEADER_BYTES, Header, header_of, sealed
from llamahybrid.prompt_cache.ram import new_buffer

FORMAT = 5
"""Of the rows and files of a folder or a server."""


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
        _fill(file, envelope[HEADER_BYTES:])
        header.check(envelope[HEADER_BYTES:])
    except SnapshotError as error:
        raise RecordError(str(error)) from None
    return header, envelope


def _fill(file: BinaryIO, buffer: Bytes) -> None:
    """Fill a buffer from a file. Raises RecordError where there are fewer."""
    view = buffer.data
    while len(view):
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise RecordError("a record is truncated")
        view = view[count:]
