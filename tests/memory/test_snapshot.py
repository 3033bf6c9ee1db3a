"""The envelope: nothing damaged, foreign or of other tokens gets through."""

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from llamahybrid.errors import SnapshotError
from llamahybrid.memory.snapshot import HEADER_BYTES, open_snapshot, seal

OWNER = bytes(range(16))
TOKENS = np.arange(7, dtype=np.int32)


def sealed(payload=b"state of seven tokens"):
    record = np.zeros(HEADER_BYTES + len(payload), dtype=np.uint8)
    record[HEADER_BYTES:] = np.frombuffer(payload, dtype=np.uint8)
    seal(record, fingerprint=OWNER, tokens=TOKENS, positions=(6, 6))
    return record


def test_a_sealed_record_opens_with_what_was_put_in():
    info = open_snapshot(sealed(), fingerprint=OWNER, tokens=TOKENS)
    assert info.payload.tobytes() == b"state of seven tokens"
    assert (info.position, info.pos_min, info.pos_max) == (7, 6, 6)


@given(data=st.data())
def test_no_flipped_bit_gets_through(data):
    record = sealed()
    bit = data.draw(st.integers(0, record.nbytes * 8 - 1))
    record[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(SnapshotError):
        open_snapshot(record, fingerprint=OWNER, tokens=TOKENS)


@given(length=st.integers(0, HEADER_BYTES + 20))
def test_no_truncated_record_gets_through(length):
    with pytest.raises(SnapshotError):
        open_snapshot(sealed()[:length], fingerprint=OWNER, tokens=TOKENS)


def test_a_record_with_trailing_bytes_is_refused():
    longer = np.concatenate([sealed(), np.zeros(1, dtype=np.uint8)])
    with pytest.raises(SnapshotError, match="truncated"):
        open_snapshot(longer, fingerprint=OWNER, tokens=TOKENS)


def test_another_models_record_is_refused():
    with pytest.raises(SnapshotError, match="another model"):
        open_snapshot(sealed(), fingerprint=bytes(16), tokens=TOKENS)


@pytest.mark.parametrize("at", [0, 8])
def test_another_format_or_version_is_refused_even_when_soundly_sealed(at):
    record = sealed()
    record[at] += 1
    record[HEADER_BYTES - 8 : HEADER_BYTES] = np.array(
        [xxhash.xxh3_64_intdigest(record[: HEADER_BYTES - 8].tobytes())], np.uint64
    ).view(np.uint8)
    with pytest.raises(SnapshotError, match="not a snapshot of format"):
        open_snapshot(record, fingerprint=OWNER, tokens=TOKENS)


@pytest.mark.parametrize("other", [lambda r: r.view(np.int8), lambda r: r.reshape(-1, 1)])
def test_what_is_no_row_of_bytes_is_refused(other):
    with pytest.raises(SnapshotError):
        open_snapshot(other(sealed()), fingerprint=OWNER, tokens=TOKENS)


@pytest.mark.parametrize("tokens", [TOKENS[:6], TOKENS + 1, np.arange(8, dtype=np.int32)])
def test_a_record_of_other_tokens_is_refused(tokens):
    with pytest.raises(SnapshotError, match="other tokens"):
        open_snapshot(sealed(), fingerprint=OWNER, tokens=tokens)
