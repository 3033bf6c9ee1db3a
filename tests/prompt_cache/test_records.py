"""The files of records: whatever is not right about one is refused."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from llamahybrid.errors import RecordError
from llamahybrid.prompt_cache.envelope import HEADER_BYTES, open_sealed, path_digest, sealed
from llamahybrid.prompt_cache.records import Record, pack, read_record

from .asking import A
from .test_envelope import made_up

TOKENS = np.arange(40, dtype=np.int32)
LOGITS = np.linspace(-1, 1, 11, dtype=np.float32)
PAYLOAD = np.arange(200, dtype=np.uint8)


def packed(logits: np.ndarray | None = LOGITS, start: int | None = None, of: np.ndarray = TOKENS) -> bytes:
    state = sealed(PAYLOAD, namespace="model", tokens=TOKENS, start=start)
    return b"".join(pack(state, logits, "model", of))


def read(raw: bytes) -> Record:
    return read_record(io.BytesIO(raw), len(raw))


@pytest.mark.parametrize(("logits", "start"), [(None, None), (LOGITS, None), (None, 7)])
def test_a_record_comes_back_as_it_was(logits: np.ndarray | None, start: int | None) -> None:
    record = read(packed(logits, start))
    payload = open_sealed(record.state, namespace="model", tokens=TOKENS, start=start)
    assert np.array_equal(payload, PAYLOAD)
    assert (logits is None) == (record.logits is None)
    assert logits is None or np.array_equal(record.logits, logits)


def test_no_damaged_byte_goes_unseen() -> None:
    raw = packed()
    for at in range(len(raw)):
        damaged = bytearray(raw)
        damaged[at] ^= 0x01
        with pytest.raises(RecordError):
            read(bytes(damaged))


@pytest.mark.parametrize("length", [0, 5, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 80, -1])
def test_a_truncated_record_is_refused(length: int) -> None:
    with pytest.raises(RecordError):
        read(packed()[:length])


def test_a_record_with_a_tail_is_refused() -> None:
    with pytest.raises(RecordError):
        read(packed() + b"x")


def test_logits_of_another_prompt_are_refused() -> None:
    with pytest.raises(RecordError, match="logits"):
        read(packed(of=TOKENS[1:]))


# -- records that somebody made up -----------------------------------------------------------------


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
