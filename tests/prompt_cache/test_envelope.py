"""Envelopes and records: nothing damaged, foreign or of other tokens gets through."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from llamahybrid.errors import RecordError, SnapshotError
from llamahybrid.prompt_cache.base import NOTHING, Bytes
from llamahybrid.prompt_cache.envelope import (
    _BODY,
    HEADER_BYTES,
    NAMESPACE_BYTES,
    Record,
    open_sealed,
    pack,
    path_digest,
    read_record,
    sealed,
)

from .asking import A

OWNER = "model+salt"
TOKENS = np.arange(7, dtype=np.int32)
PAYLOAD = np.frombuffer(b"state of seven tokens", np.uint8)


def state(start: int | None = None, payload: Bytes = PAYLOAD) -> Bytes:
    return sealed(payload, namespace=OWNER, tokens=TOKENS, start=start)


def opened(record: Bytes, start: int | None = None) -> Bytes:
    return open_sealed(record, namespace=OWNER, tokens=TOKENS, start=start)


def test_a_sealed_payload_opens_unchanged() -> None:
    assert np.array_equal(opened(state()), PAYLOAD)
    assert np.array_equal(opened(state(3), 3), PAYLOAD)
    assert opened(state(payload=NOTHING)).nbytes == 0


def test_a_payload_is_opened_in_place() -> None:
    record = state()
    assert np.shares_memory(opened(record), record)


@given(data=st.data())
def test_no_flipped_bit_gets_through(data: st.DataObject) -> None:
    record = state()
    bit = data.draw(st.integers(0, record.nbytes * 8 - 1))
    record[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(SnapshotError):
        opened(record)


@given(length=st.integers(0, HEADER_BYTES + 20))
def test_a_truncated_state_is_refused(length: int) -> None:
    with pytest.raises(SnapshotError):
        opened(state()[:length])


def test_trailing_bytes_are_refused() -> None:
    longer = np.concatenate([state(), np.zeros(1, dtype=np.uint8)])
    with pytest.raises(SnapshotError, match="truncated"):
        opened(longer)


@pytest.mark.parametrize("other", ["model", "model+other", "", "model+salt?"])
def test_another_models_state_is_refused(other: str) -> None:
    with pytest.raises(SnapshotError, match="another model"):
        open_sealed(state(), namespace=other, tokens=TOKENS)


@pytest.mark.parametrize("other", [lambda r: r.view(np.int8), lambda r: r.reshape(-1, 1)])
def test_an_array_of_another_shape_or_type_is_refused(other) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SnapshotError):
        opened(other(state()))


@pytest.mark.parametrize("tokens", [TOKENS[:6], TOKENS + 1, np.arange(8, dtype=np.int32)])
def test_a_state_of_other_tokens_is_refused(tokens: np.ndarray) -> None:
    with pytest.raises(SnapshotError, match="other tokens"):
        open_sealed(state(), namespace=OWNER, tokens=tokens)


@pytest.mark.parametrize(("given", "wanted"), [(None, 3), (3, None), (3, 2), (3, 4)])
def test_a_snapshot_is_no_segment_and_a_range_no_other(given: int | None, wanted: int | None) -> None:
    with pytest.raises(SnapshotError, match="segment"):
        opened(state(given), wanted)


def test_a_long_namespace_is_refused_and_not_cut() -> None:
    with pytest.raises(ValueError, match="namespace"):
        sealed(PAYLOAD, namespace="n" * (NAMESPACE_BYTES + 1), tokens=TOKENS)


# -- records -----------------------------------------------------------------------------------------


LOGITS = np.linspace(-1, 1, 11, dtype=np.float32)


def packed(logits: np.ndarray | None = LOGITS, start: int | None = None, of: np.ndarray = TOKENS) -> bytes:
    return b"".join(pack(state(start), logits, OWNER, of))


def read(raw: bytes) -> Record:
    return read_record(io.BytesIO(raw), len(raw))


@pytest.mark.parametrize(("logits", "start"), [(None, None), (LOGITS, None), (None, 3)])
def test_a_record_comes_back_as_it_was(logits: np.ndarray | None, start: int | None) -> None:
    record = read(packed(logits, start))
    assert np.array_equal(opened(record.state, start), PAYLOAD)
    assert (logits is None) == (record.logits is None)
    assert logits is None or np.array_equal(record.logits, logits)


def test_no_damaged_byte_goes_unseen() -> None:
    raw = packed()
    for at in range(len(raw)):
        damaged = bytearray(raw)
        damaged[at] ^= 0x01
        with pytest.raises(RecordError):
            read(bytes(damaged))


@pytest.mark.parametrize("length", [0, 5, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 8, -1])
def test_a_record_of_another_length_is_refused(length: int) -> None:
    for raw in (packed()[:length], packed() + b"x"):
        with pytest.raises(RecordError):
            read(raw)


def test_logits_of_another_prompt_are_refused() -> None:
    with pytest.raises(RecordError, match="logits"):
        read(packed(of=TOKENS[1:]))


# -- headers that somebody made up -----------------------------------------------------------------


def made_up(**change: object) -> bytes:
    """A header whose checksum holds, and whose fields may not."""
    fields = {
        "magic": b"LLHSTATE",
        "version": 3,
        "start": 4,
        "end": 4,
        "name": b"m",
        "digest": path_digest("m", np.arange(4)),
        "size": 0,
        "payload": xxhash.xxh3_64_intdigest(b""),
    } | change
    body = _BODY.pack(*fields.values())
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


MADE_UP: dict[str, dict[str, Any]] = {
    "no text": {"name": b"\xff\xfe"},
    "no range": {"start": 5},
    "huge": {"start": 2**32 - 1, "end": 2**32 - 1},
    "huge payload": {"size": 2**60},
    "another's digest": {"digest": path_digest("model", np.array(A[:4], np.int32))},
    "an older version": {"version": 2},
    "a newer version": {"version": 4},
    "another format": {"magic": b"LLHSTATF"},
}


@pytest.mark.parametrize("what", [w for w in MADE_UP if w not in ("another's digest", "huge")])
def test_made_up_records_are_refused(what: str) -> None:
    with pytest.raises(RecordError):
        read(made_up(**MADE_UP[what]))
