"""Records: data, never code; no damaged byte of one goes unseen."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import xxhash

from llamahybrid.errors import RecordError
from llamahybrid.prompt_cache import records
from llamahybrid.prompt_cache.envelope import HEADER_BYTES, open_sealed, path_digest
from llamahybrid.prompt_cache.records import (
    HEAD_BYTES,
    Record,
    head_of,
    key_of,
    pack,
    read_record,
)

from . import test_envelope as envelopes
from .asking import A, record_of

TOKENS = np.arange(40, dtype=np.int32)
LOGITS = np.linspace(-3, 3, 17, dtype=np.float32)
PAYLOAD = (np.arange(5000) % 251).astype(np.uint8)


def packed(logits: object = LOGITS, base: int = 0) -> bytes:
    return b"".join(record_of("model", 40, TOKENS, logits, PAYLOAD, base))  # type: ignore[arg-type]


def read(raw: bytes) -> Record:
    return read_record(io.BytesIO(raw), len(raw))


def test_a_record_comes_back_as_it_was() -> None:
    record = read(packed())
    head = record.head
    assert (head.namespace, head.start, head.end) == ("model", 40, 40)
    assert head.nbytes == len(packed())
    assert head.key == key_of("model", 40, TOKENS, logits=True)
    state = open_sealed(record.state, namespace="model", tokens=TOKENS)
    for found, given in ((record.tokens, TOKENS), (record.logits, LOGITS), (state, PAYLOAD)):
        assert np.array_equal(found, given)  # type: ignore[arg-type]


@pytest.mark.parametrize("logits", [LOGITS, None])
def test_no_damaged_byte_goes_unseen(logits: object) -> None:
    raw = packed(logits)
    for at in range(0, len(raw), 7):
        damaged = bytearray(raw)
        damaged[at] ^= 0x10
        with pytest.raises(RecordError):
            read(bytes(damaged))


@pytest.mark.parametrize("base", [0, 30])
def test_no_damaged_byte_of_a_head_or_a_prefix_goes_unseen(base: int) -> None:
    raw = packed(base=base)
    for at in range(HEAD_BYTES + 4 * len(TOKENS)):
        damaged = bytearray(raw)
        damaged[at] ^= 0x01
        with pytest.raises(RecordError):
            read(bytes(damaged))


@pytest.mark.parametrize("length", [0, 5, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 80, -1])
def test_a_truncated_record_is_refused(length: int) -> None:
    with pytest.raises(RecordError):
        read(packed()[:length])


def test_a_record_with_a_tail_is_refused() -> None:
    with pytest.raises(RecordError):
        read(packed() + b"x")


def test_bytes_without_a_seal_make_no_record() -> None:
    with pytest.raises(RecordError, match="header"):
        pack(PAYLOAD, TOKENS, None)


def test_a_damaged_prefix_before_the_base_is_seen_when_all_is_read() -> None:
    raw = packed(base=30)
    other = TOKENS.copy()
    other[3] = 999
    lies = record_of("model", 40, other, LOGITS, PAYLOAD, 30)[0]
    swapped = raw[:HEAD_BYTES] + lies[HEAD_BYTES : HEAD_BYTES + 160] + raw[HEAD_BYTES + 160 :]
    with pytest.raises(RecordError, match="ids"):
        read(swapped)


# -- records that somebody made up -----------------------------------------------------------------


def made_up(**change: Any) -> tuple[str, bytes]:
    """(key, file) of a record whose checksums hold and whose fields do not."""
    ids = np.arange(4, dtype="<i4")
    frame = {
        "base": 0,
        "logits": 0,
        "written": 1,
        "base_digest": path_digest("m", ids[:0]),
        "own": xxhash.xxh3_64_intdigest(ids.tobytes()),
        "row": xxhash.xxh3_64_intdigest(b""),
    }
    named = {"start": 4, "end": 4, "digest": path_digest("m", ids)} | change
    own = {name: change[name] for name in frame.keys() & change}
    rest = {name: value for name, value in change.items() if name not in frame}
    head = envelopes.made_up(**rest) + records._FRAME.pack(*(frame | own).values())
    kind = "attention" if named["start"] < named["end"] else "state"
    key = f"{named['digest'].hex()}-{kind}-{named['start']}-{named['end']}"
    return key, head + records._SEAL.pack(xxhash.xxh3_64_intdigest(head)) + ids.tobytes()


MADE_UP: dict[str, dict[str, Any]] = {
    "no text": {"name": b"\xff\xfe"},
    "no range": {"start": 5},
    "huge": {"start": 2**32 - 1, "end": 2**32 - 1},
    "huge payload": {"size": 2**60},
    "huge logits": {"logits": 2**32 - 1},
    "base behind its end": {"base": 9},
    "another's prefix": {"base": 2, "base_digest": path_digest("model", np.array(A, np.int32))},
    "another's digest": {"digest": path_digest("model", np.array(A, np.int32))},
    "an older version": {"version": 2},
    "a newer version": {"version": 4},
}


def test_a_record_that_lies_about_the_prefix_it_goes_on_from_is_damaged() -> None:
    own = xxhash.xxh3_64_intdigest(np.arange(2, 4, dtype="<i4").tobytes())
    _, raw = made_up(base=2, own=own, base_digest=path_digest("m", np.array([5, 5], np.int32)))
    with pytest.raises(RecordError, match="lies"):
        records.read_record(io.BytesIO(raw), len(raw))


def test_a_frame_belongs_to_its_header() -> None:
    """Heads of two records were mixed: each part is sound by itself."""
    other = b"".join(record_of("model", 3, TOKENS))
    with pytest.raises(RecordError, match="head"):
        head_of(packed()[:HEADER_BYTES] + other[HEADER_BYTES:])
