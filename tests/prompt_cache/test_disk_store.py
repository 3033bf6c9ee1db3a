"""A folder and its index: what passes loses nothing, what is damaged goes once, what lies is not believed."""

from __future__ import annotations

import errno
import io
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamahybrid.errors import RecordError
from llamahybrid.prompt_cache import PromptCache, disk, records, refusals
from llamahybrid.prompt_cache.disk import RecordStore
from llamahybrid.prompt_cache.disk_store import WRITE, DiskStore
from llamahybrid.prompt_cache.records import SNAPSHOT, head_of, key_of, pack
from tests.lab import disk_faults
from tests.lab.fake_engine import FakeEngine
from tests.lab.integrity import check_integrity

from .asking import SLOW, A, B, C, ask, files, filled
from .test_disk import put
from .test_records import LOGITS, MADE_UP, PAYLOAD, TOKENS, made_up


def counts(cache: PromptCache) -> dict[str, int]:
    return cache.stats().extra


@pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="descriptors cannot be counted")
def test_random_histories_of_what_a_disk_may_do() -> None:
    done = disk_faults.histories(2, 0, 25)
    assert len(done) >= 10


def test_what_others_add_and_remove_is_noticed(tmp_path: Path) -> None:
    others, store = RecordStore(tmp_path), DiskStore(tmp_path, 1 << 30)
    keys = [put(others, TOKENS[:n]) for n in range(1, 20)]
    store.refresh()
    assert all(map(store.has, keys))
    others.delete(keys[3])
    store.refresh()
    assert [store.has(key) for key in keys] == [key != keys[3] for key in keys]
    assert store.counts.gone == 1
    check_integrity(store)


def test_a_record_that_another_writes_anew_while_it_is_found_gone_stays(tmp_path: Path, monkeypatch) -> None:
    others = RecordStore(tmp_path)
    key, load = put(others), RecordStore.load
    store = DiskStore(tmp_path, 1 << 30)
    others.delete(key)

    def just_before(*given: Any) -> Any:
        try:
            return load(*given)
        finally:
            put(others)

    monkeypatch.setattr(RecordStore, "load", just_before)
    assert store.load(key) is None
    monkeypatch.undo()
    assert store.counts.gone == 1
    store.refresh()
    assert store.load(key) is not None
    check_integrity(store)


def test_what_was_missed_while_reading_failed_is_noticed_later(tmp_path: Path, monkeypatch) -> None:
    for name in ("FIRST_BACKOFF_SECONDS", "UNREADABLE_SECONDS"):
        monkeypatch.setattr(refusals, name, 0.0)
    others, store = RecordStore(tmp_path), DiskStore(tmp_path, 1 << 30)
    key, now = put(others), time.time_ns()
    monkeypatch.setattr(disk.time, "time_ns", lambda: now + 10 * disk.RACY_NS)  # or it is looked at anyway

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(store.records, "opened", fail)
        store.refresh()
    assert not store.has(key)
    store.refresh()
    assert store.has(key)


def test_a_state_with_logits_takes_the_place_of_one_without(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 1 << 30)
    for logits in (None, LOGITS):
        parts = pack("model", SNAPSHOT, len(TOKENS), TOKENS, logits, PAYLOAD)
        head = head_of(parts[0])
        assert store.commit(store.records.prepare(head.key, parts), head, TOKENS, lambda: True)
        assert store.records.keys() == [head.key]
    check_integrity(store)


# -- records that somebody made up -----------------------------------------------------------------


@pytest.mark.parametrize("what", MADE_UP)
def test_a_made_up_record_raises_nowhere_and_costs_nothing_else(folder: Path, what: str) -> None:
    cache = filled(folder)
    key, raw = made_up(**MADE_UP[what])
    with pytest.raises(RecordError):
        records.read_record(io.BytesIO(raw), len(raw))
    path = cache.disk.store.records.folder / key[0] / f"{key}.record"  # type: ignore[union-attr]
    path.parent.mkdir(exist_ok=True, mode=0o700)
    for number, place in enumerate((cache, None)):
        path.write_bytes(raw)
        used = place or PromptCache(1 << 24, folder)
        assert ask(used, [*range(4), 900 + number]).cached <= 4
        assert ask(used, C).cached == len(C)
        assert used.close()
        check_integrity(used)
        assert counts(used)["disk_errors"] == 0


def test_a_record_that_lies_where_the_index_does_not_expect_it_is_left_alone(folder: Path) -> None:
    cache = filled(folder)
    store = cache.disk.store  # type: ignore[union-attr]
    before = {path: path.read_bytes() for path in files(folder)}
    offer = store.offer("model", np.array(A, np.int32), 0, len(A), [])
    assert offer is not None
    assert cache.disk.load(offer, np.array(C[:1] + A[1:], np.int32), None) is None  # type: ignore[union-attr]
    assert {path: path.read_bytes() for path in files(folder)} == before
    assert not store.has(offer.checkpoint)
    assert counts(cache)["disk_damaged"] == 0


# -- errors that pass ------------------------------------------------------------------------------


PASSING = [errno.EMFILE, errno.ESTALE, errno.EIO, errno.EACCES, errno.ENOMEM]


@pytest.mark.parametrize("code", PASSING)
@pytest.mark.parametrize("where", ["opened", "os.scandir", "os.lstat", "read_record", "read_head"])
def test_an_error_that_passes_removes_nothing(folder: Path, monkeypatch, code: int, where: str) -> None:
    filled(folder)
    before = {path: path.read_bytes() for path in files(folder)}

    def fail(*_: object, **__: object) -> object:
        raise OSError(code, os.strerror(code))

    for name in ("FIRST_BACKOFF_SECONDS", "UNREADABLE_SECONDS"):
        monkeypatch.setattr(refusals, name, 0.0)
    early = PromptCache(1 << 24, folder)
    with monkeypatch.context() as patch:
        patch.setattr(f"llamahybrid.prompt_cache.disk.{where}", fail)
        patch.setattr(RecordStore, "prepare", fail)
        late = PromptCache(1 << 24, folder) if where != "os.lstat" else early
        for cache in (early, late):
            for prompt in (A, B, C):
                ask(cache, prompt)
            cache.close()
    assert {path: path.read_bytes() for path in files(folder)} == before
    for cache in (early, late):
        cache.clear = None  # type: ignore[method-assign,assignment]
        cache.forget = None  # type: ignore[method-assign,assignment]
        again = PromptCache(1 << 24, folder)
        again.disk = cache.disk
        assert again.disk is not None
        assert FakeEngine(again, costs=SLOW).prefill([*A, 1]).source == "disk"
        assert counts(again)["disk_damaged"] == 0


def test_what_was_read_wrong_once_is_not_damaged(folder: Path, monkeypatch) -> None:
    filled(folder)
    reading, failed = disk.read_record, []

    def once(*arguments: object) -> object:
        if len(failed) < 1:
            failed.append(1)
            raise RecordError("a bit was read wrong")
        return reading(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(disk, "read_record", once)
    cache = PromptCache(1 << 24, folder)
    assert ask(cache, A).source == "disk"
    assert failed == [1]
    assert counts(cache)["disk_damaged"] == 0


# -- damage ----------------------------------------------------------------------------------------


def test_damage_behind_the_head_is_healed_once(folder: Path) -> None:
    filled(folder)
    for path in files(folder):
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
    cache = PromptCache(1 << 24, folder)
    for prompt in (A, B, C):
        assert ask(cache, prompt).source != "disk"
    assert cache.close()
    assert counts(cache)["disk_damaged"] > 0
    again = PromptCache(1 << 24, folder)
    for prompt in (A, B, C):
        assert ask(again, prompt).source == "disk"
    assert counts(again)["disk_damaged"] == 0


def test_a_record_that_cannot_be_removed_is_not_met_again(folder: Path, monkeypatch) -> None:
    cache = filled(folder)

    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(RecordStore, "delete", fail)
    assert not cache.disk.forget(np.array(A, np.int32))  # type: ignore[union-attr]
    cache.flush()
    asked = FakeEngine(cache, costs=SLOW, namespace="model")
    cache.ram.tree.splitters.clear()
    assert counts(cache)["disk_failed"] == 1
    assert asked.prefill(C).cached == len(C)
    key = key_of("model", SNAPSHOT, len(A), np.array(A, np.int32), logits=True)
    assert not cache.disk.store.has(key)  # type: ignore[union-attr]
    store = RecordStore(folder)
    store.write(
        key_of("x", SNAPSHOT, 1, np.array([1])),
        pack("x", SNAPSHOT, 1, np.array([1]), None, np.zeros(1, np.uint8)),
    )
    cache.disk.store.refresh()  # type: ignore[union-attr]
    assert not cache.disk.store.has(key)  # type: ignore[union-attr]


# -- single files that the disk refuses ----------------------------------------------------------------


@contextmanager
def refusing(
    method: str, error: type[OSError], code: int, concerned: Callable[[str], bool]
) -> Iterator[None]:
    """A method of `RecordStore` raises this for the keys that are `concerned`."""
    real = getattr(RecordStore, method)

    def refused(store: RecordStore, key: str, *rest: Any, **more: Any) -> Any:
        if concerned(key):
            raise error(code, "refused", key)
        return real(store, key, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordStore, method, refused)
        yield


def whole(key: str) -> bool:
    return True


def store_of(cache: PromptCache) -> DiskStore:
    assert cache.disk is not None
    return cache.disk.store


def tells_a(folder: Path) -> bool:
    """A's prompt is on disk."""
    key = key_of("model", SNAPSHOT, len(A), np.array(A, np.int32), logits=True)
    return key in {path.stem for path in files(folder)}


@pytest.mark.parametrize("again", [lambda c: c.disk.forget(np.array(A, np.int32)), lambda c: c.disk.clear()])
def test_what_could_not_be_forgotten_is_forgotten_when_it_is_asked_again(folder: Path, again) -> None:
    cache = filled(folder)
    assert cache.disk is not None
    with refusing("delete", PermissionError, errno.EPERM, whole):
        for _ in range(2):  # it is not taken for gone because it is not known any more
            assert not again(cache)
            there = {path.stem: path.stat().st_size for path in files(folder)}
            assert store_of(cache)._refused.nbytes == sum(
                there[key] for key in store_of(cache)._refused.stuck
            )
        assert tells_a(folder)
    assert again(cache)
    assert not tells_a(folder)
    assert store_of(PromptCache(1 << 24, folder)).known("model", np.array(A, np.int32))[0] <= 150


def test_what_cannot_be_removed_counts(folder: Path) -> None:
    filled(folder)
    limit = RecordStore(folder).nbytes
    cache = PromptCache(1 << 24, folder, limit)
    with refusing("delete", PermissionError, errno.EPERM, whole):
        for i in range(5):
            store_of(cache)._backoffs[WRITE] = refusals.Backoff()
            ask(cache, [*range(20 * i + 10_000, 20 * i + 10_250)])
            cache.flush()
            assert RecordStore(folder).nbytes <= limit
            assert len(store_of(cache)._refused.stuck) <= i + 1  # one a try, and not all that there is
    for i in range(5):
        store_of(cache)._backoffs[WRITE] = refusals.Backoff()
        ask(cache, [*range(20 * i + 20_000, 20 * i + 20_250)])
    assert cache.flush()
    assert not store_of(cache)._refused.stuck
    assert 0 < RecordStore(folder).nbytes <= limit
    check_integrity(cache)


@pytest.mark.parametrize("method", ["opened", "load"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_a_record_that_cannot_be_read_costs_no_other(
    folder: Path, monkeypatch, code: int, method: str
) -> None:
    filled(folder)
    unreadable = {path.stem for path in files(folder) if path.stem.endswith(f"-{len(C)}")}
    assert len(unreadable) < refusals.MOST_UNREADABLE
    before = {path: path.read_bytes() for path in files(folder)}
    with refusing(method, OSError, code, unreadable.__contains__):
        cache = PromptCache(1 << 24, folder, disk_write_bytes=0)
        for prompt in (C, A, B):
            assert FakeEngine(cache, costs=SLOW).prefill([*prompt, 1]).cached == (
                0 if prompt is C else len(prompt)
            )
        assert counts(cache)["disk_damaged"] == 0
        monkeypatch.setattr(refusals, "UNREADABLE_SECONDS", 0.0)
        assert not store_of(cache).remove_path(np.array([1], np.int32))  # whose is what cannot be read?
    assert {path: path.read_bytes() for path in files(folder)} == before
    store_of(cache)._refused = refusals.RefusedRecords()  # it is time to try again
    for shard in disk.SHARDS:
        store_of(cache).records.look_again(shard)
    cache.ram.clear()
    assert FakeEngine(cache, costs=SLOW).prefill([*C, 1]).cached == len(C)


def test_it_is_read_again_after_a_while(folder: Path, monkeypatch) -> None:
    filled(folder)
    clock = [1000.0]
    monkeypatch.setattr(refusals.time, "monotonic", lambda: clock[0])
    with refusing("opened", PermissionError, errno.EACCES, lambda key: key.endswith(f"-{len(C)}")):
        store = DiskStore(folder, 1 << 30)
    known = len(store._index)
    store.refresh()
    assert len(store._index) == known
    clock[0] += refusals.UNREADABLE_SECONDS
    store.refresh()
    assert len(store._index) > known
    check_integrity(store)


def test_a_disk_on_which_nothing_can_be_read_is_not_asked_for_each_record(folder: Path) -> None:
    filled(folder)
    asked: list[str] = []
    with refusing("opened", OSError, errno.EIO, lambda key: asked.append(key) is None):
        store = DiskStore(folder, 1 << 30)
        for _ in range(5):
            store.refresh()
    assert len(asked) == refusals.MOST_UNREADABLE


@pytest.mark.parametrize("how", ["link", "file"])
def test_what_is_no_folder_costs_one_shard(folder: Path, how: str, caplog) -> None:
    filled(folder)
    shard = files(folder)[0].parent
    lost = {path.stem for path in shard.iterdir()}
    shard.rename(folder / "elsewhere")
    shard.symlink_to(folder / "elsewhere") if how == "link" else shard.write_text("")
    store = DiskStore(folder, 1 << 30)
    assert len(store._index) == len(files(folder)) - (len(lost) if how == "link" else 0)
    store.refresh()
    assert caplog.text.count("cannot be read") == 1
    assert not store.clear()  # what is there cannot be told
    assert not [path for path in files(folder) if path.parent != shard]
    assert {path.stem for path in (folder / "elsewhere").iterdir()} == lost


def test_clearing_needs_nothing_to_be_read(folder: Path) -> None:
    filled(folder)
    with refusing("opened", PermissionError, errno.EACCES, whole):
        store = DiskStore(folder, 1 << 30)
        assert not len(store._index)
        store.clear()
    assert not files(folder)


def test_nothing_goes_for_what_cannot_come(folder: Path) -> None:
    filled(folder)
    before = files(folder)
    limit = max(path.stat().st_size for path in before)  # of one record; the next chat's has more
    for budget in (RecordStore(folder).nbytes, limit, 0):
        cache = PromptCache(1 << 24, folder, budget)
        ask(cache, range(5000))
        cache.pin(A)
        cache.flush()
        assert set(before) <= set(files(folder))
    assert counts(cache)["disk_evicted"] == 0
