"""Records and the folder they lie in: data, never code; what is damaged or gone is told from what is not."""

from __future__ import annotations

import io
import os
import pickle
import sqlite3
import stat
import time
from pathlib import Path

import diskcache
import numpy as np
import pytest

from llamahybrid.errors import RecordError, RecordGone
from llamahybrid.prompt_cache import disk
from llamahybrid.prompt_cache.disk import RecordStore
from llamahybrid.prompt_cache.records import (
    HEAD_BYTES,
    SEGMENT,
    SNAPSHOT,
    key_of,
    pack,
    read_head,
    read_payload,
)

TOKENS = np.arange(40, dtype=np.int32)
LOGITS = np.linspace(-3, 3, 17, dtype=np.float32)
PAYLOAD = (np.arange(5000) % 251).astype(np.uint8)


def packed(logits: object = LOGITS) -> bytes:
    return b"".join(pack("model", SNAPSHOT, 40, TOKENS, logits, PAYLOAD))  # type: ignore[arg-type]


def read(raw: bytes) -> object:
    file = io.BytesIO(raw)
    head = read_head(file)
    return head, read_payload(file, head)


def put(store: RecordStore, tokens: np.ndarray = TOKENS) -> str:
    key = key_of("model", SNAPSHOT, len(tokens), tokens, logits=True)
    store.write(key, pack("model", SNAPSHOT, len(tokens), tokens, LOGITS, PAYLOAD))
    return key


def test_a_record_comes_back_as_it_was() -> None:
    file = io.BytesIO(packed())
    head = read_head(file)
    assert (head.namespace, head.kind, head.start, head.end) == ("model", SNAPSHOT, 40, 40)
    assert np.array_equal(head.tokens, TOKENS)
    assert np.array_equal(head.logits, LOGITS)
    assert head.nbytes == len(packed())
    assert np.array_equal(read_payload(file, head), PAYLOAD)


@pytest.mark.parametrize("logits", [LOGITS, None])
def test_no_damaged_byte_goes_unseen(logits: object) -> None:
    raw = packed(logits)
    for at in range(0, len(raw), 7):
        damaged = bytearray(raw)
        damaged[at] ^= 0x10
        with pytest.raises(RecordError):
            read(bytes(damaged))


@pytest.mark.parametrize("length", [0, 5, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 80, -1])
def test_a_truncated_record_is_refused(length: int) -> None:
    with pytest.raises(RecordError):
        read(packed()[:length])


def test_a_record_with_a_tail_is_refused() -> None:
    with pytest.raises(RecordError):
        read(packed() + b"x")


def test_keys_name_what_a_record_holds() -> None:
    keys = {
        key_of("model", SNAPSHOT, 40, TOKENS),
        key_of("model", SNAPSHOT, 40, TOKENS, logits=True),
        key_of("model", SEGMENT, 0, TOKENS),
        key_of("model", SEGMENT, 10, TOKENS),
        key_of("other", SNAPSHOT, 40, TOKENS),
        key_of("model", SNAPSHOT, 40, TOKENS + 1),
    }
    assert len(keys) == 6
    assert key_of("model", SEGMENT, 10, TOKENS.copy()) in keys


def test_a_long_namespace_is_refused_and_not_cut() -> None:
    with pytest.raises(ValueError, match="namespace"):
        pack("n" * 49, SNAPSHOT, 40, TOKENS, None, PAYLOAD)


def test_a_store_gives_what_it_was_given(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "cache")
    key = put(store)
    head, payload = store.load(key)
    assert np.array_equal(head.tokens, TOKENS)
    assert np.array_equal(payload, PAYLOAD)
    assert list(store.keys()) == [key]
    assert store.nbytes > len(packed())
    store.delete(key)
    store.delete(key)
    with pytest.raises(RecordGone):
        store.load(key)


def test_what_others_add_is_noticed_once_and_in_order(tmp_path: Path) -> None:
    store, other = RecordStore(tmp_path), RecordStore(tmp_path)
    first = put(store)
    assert other.fresh() == [first]
    assert other.fresh() == []
    second, third = put(store, TOKENS[:5]), put(other, TOKENS[:6])
    assert other.fresh() == [second, third]
    assert store.fresh() == [first, second, third]
    store.delete(third)  # the newest it knew is gone
    fourth = put(store, TOKENS[:7])
    assert fourth in other.fresh()


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        folder = tmp_path / "new" / "cache"
        put(RecordStore(folder))
    finally:
        os.umask(mask)
    modes = {p: stat.S_IMODE(p.stat().st_mode) for p in (folder, *folder.rglob("*"))}
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in modes.items()), modes


class Boom:
    def __reduce__(self) -> tuple[object, ...]:
        return (pytest.fail, ("something was unpickled",))


@pytest.mark.parametrize("as_key", [True, False])
def test_nothing_is_ever_unpickled(tmp_path: Path, as_key: bool) -> None:
    put(RecordStore(tmp_path))
    plain = diskcache.Cache(str(tmp_path))  # as another program would, with the library's own serializer
    key = key_of("model", SNAPSHOT, 3, TOKENS[:3])
    plain[Boom() if as_key else key] = Boom()
    plain.close()
    store = RecordStore(tmp_path)
    for found in (*store.keys(), *store.fresh(), key):
        if found != put(store):
            with pytest.raises(RecordError):
                store.load(found)


def test_only_data_goes_in(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        RecordStore(tmp_path).write(pickle.dumps(1), [b""])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["../outside.val", "/etc/hostname", "", "a/missing.val"])
def test_a_row_that_names_no_file_in_the_folder_is_a_miss(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "cache"
    (tmp_path / "outside.val").write_bytes(packed())
    store = RecordStore(folder)
    key = put(store)
    with sqlite3.connect(folder / "cache.db") as rows:
        rows.execute("UPDATE Cache SET filename = ?", (name,))
    with pytest.raises(RecordGone):
        store.load(key)


def test_a_damaged_index_starts_anew(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    put(store)
    store.close()
    for path in tmp_path.glob("cache.db*"):
        path.write_bytes(b"nonsense" * 4096)
    store = RecordStore(tmp_path)
    assert list(store.keys()) == []
    assert np.array_equal(store.load(put(store))[1], PAYLOAD)


def test_files_that_no_index_knows_are_swept_when_they_are_old(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    key = put(store)
    (tmp_path / "aa" / "bb").mkdir(parents=True)
    fresh, old = tmp_path / "aa" / "bb" / "fresh.val", tmp_path / "aa" / "bb" / "old.val"
    for path in (fresh, old):
        path.write_bytes(b"half a reco")
    past = time.time() - 2 * disk.ORPHAN_SECONDS
    for path in (old, *tmp_path.glob("*/*/*.val")):
        if path != fresh:
            os.utime(path, (past, past))
    assert store.sweep() == 1
    assert fresh.exists()
    assert not old.exists()
    assert np.array_equal(store.load(key)[1], PAYLOAD)


def test_a_write_that_fails_leaves_no_file(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)

    class Half:
        def __len__(self) -> int:
            raise OSError("no space left")

    with pytest.raises((OSError, TypeError)):
        store.write("k", [b"begun", Half()])  # type: ignore[list-item]
    assert not list(tmp_path.glob("*/*/*.val"))
    assert list(store.keys()) == []


def test_a_folder_that_another_process_removes_as_empty_is_made_again(tmp_path: Path, monkeypatch) -> None:
    store, made = RecordStore(tmp_path), os.open
    removed: list[object] = []

    def removing(path: object, *rest: object) -> int:
        if len(removed) < 3:
            removed.append(path)
            os.rmdir(os.path.dirname(path))  # type: ignore[call-overload]
        return made(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(disk.os, "open", removing)
    key = put(store)
    monkeypatch.undo()
    assert len(removed) == 3
    assert np.array_equal(store.load(key)[1], PAYLOAD)


def test_reading_a_record_marks_it_as_used(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    key = put(store)
    (path,) = tmp_path.glob("*/*/*.val")
    os.utime(path, (1000, 1000))
    assert store.head(key).used == 1000
    store.load(key)
    assert store.head(key).used > 1000
