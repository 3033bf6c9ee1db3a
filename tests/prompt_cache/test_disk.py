"""The folder that records lie in: what is damaged or gone is told from what is not."""

from __future__ import annotations

import os
import pickle
import shutil
import stat
import time
from pathlib import Path

import numpy as np
import pytest

from llamahybrid.errors import RecordError, RecordGone
from llamahybrid.prompt_cache import disk
from llamahybrid.prompt_cache.disk import RecordStore
from llamahybrid.prompt_cache.disk_folder import MARK
from llamahybrid.prompt_cache.records import SNAPSHOT, key_of, pack

from .test_records import LOGITS, PAYLOAD, TOKENS, packed


def put(store: RecordStore, tokens: np.ndarray = TOKENS) -> str:
    key = key_of("model", SNAPSHOT, len(tokens), tokens, logits=True)
    store.write(key, pack("model", SNAPSHOT, len(tokens), tokens, LOGITS, PAYLOAD))
    return key


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*/*.record"))


def test_a_store_gives_what_it_was_given(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "cache")
    key = put(store)
    record = store.load(key)
    assert np.array_equal(record.tokens, TOKENS)
    assert np.array_equal(record.payload, PAYLOAD)
    assert list(store.keys()) == [key]
    assert store.nbytes == len(packed())
    store.delete(key)
    store.delete(key)
    with pytest.raises(RecordGone):
        store.load(key)


def test_a_folder_that_did_not_change_is_not_listed_again(tmp_path: Path, monkeypatch) -> None:
    store = RecordStore(tmp_path)
    put(store)
    assert set(store.changed()) == set(disk.SHARDS)
    now = time.time_ns()
    monkeypatch.setattr(disk.time, "time_ns", lambda: now + 10 * disk.RACY_NS)
    assert len(list(store.changed())) == 1  # it had changed a moment before
    assert not list(store.changed())
    key = put(store, TOKENS[:5])
    assert list(store.changed()) == [key[0]]


def test_a_check_is_no_use(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    key = put(store)
    (path,) = files(tmp_path)
    os.utime(path, (1000, 1000))
    store.check(key)
    assert (store.head(key).key, path.stat().st_mtime) == (key, 1000)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(RecordError, match="payload"):
        store.check(key)


def test_a_shard_that_is_none_may_be_passed_over(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    key = put(store)
    (store.folder / next(s for s in disk.SHARDS if s != key[0])).touch()
    refused: list[OSError] = []
    assert store.keys(refused=refused.append) == [key]
    assert ["is no folder" in str(error) for error in refused] == [True]
    assert store.nbytes == store.size(key) == len(packed())
    with pytest.raises(OSError, match="is no folder"):
        store.keys()
    store.delete(key)
    assert store.size(key) == 0


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        folder = tmp_path / "new" / "cache"
        put(RecordStore(folder))
    finally:
        os.umask(mask)
    modes = {p: stat.S_IMODE(p.stat().st_mode) for p in (folder, *folder.rglob("*"))}
    assert len(modes) == 5
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in modes.items()), modes


@pytest.mark.parametrize("key", ["", "k", "../outside", "0" * 32 + "-state-05-5", pickle.dumps(1).hex()])
def test_only_keys_name_files(tmp_path: Path, key: str) -> None:
    store = RecordStore(tmp_path)
    for use in (lambda: store.write(key, [b""]), lambda: store.load(key), lambda: store.delete(key)):
        with pytest.raises(RecordError):
            use()


def test_a_record_under_another_name_is_damaged(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    key = put(store)
    other = key_of("model", SNAPSHOT, 5, TOKENS[:5], logits=True)
    store.write(other, pack("model", SNAPSHOT, 40, TOKENS, LOGITS, PAYLOAD))
    with pytest.raises(RecordError, match="name"):
        store.load(other)
    assert np.array_equal(store.load(key).tokens, TOKENS)


def test_parts_that_nobody_finished_are_swept_when_they_are_old(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    key = put(store)
    shard = files(tmp_path)[0].parent
    fresh, old, theirs = shard / f"{'a' * 16}.part", shard / f"{'b' * 16}.part", shard / "notes.part"
    past = time.time() - 2 * disk.ORPHAN_SECONDS
    for path in (fresh, old, theirs):
        path.write_bytes(b"half a reco")
    for path in (old, theirs, *files(tmp_path)):
        os.utime(path, (past, past))
    assert store.sweep() == 1
    assert [p.exists() for p in (fresh, old, theirs)] == [True, False, True]
    assert np.array_equal(store.load(key).payload, PAYLOAD)


def test_a_write_that_fails_leaves_no_file(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    key = key_of("model", SNAPSHOT, 40, TOKENS)
    with pytest.raises(TypeError):
        store.write(key, [b"begun", "no bytes"])  # type: ignore[list-item]
    (store.folder / key[0] / f"{key}.record").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        store.write(key, [b"whole"])
    assert not list(tmp_path.glob("*/*/*.part"))
    assert store.keys() == []


def test_a_folder_that_somebody_removes_is_made_again(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    for remove in (lambda: store.folder / put(store)[0], lambda: store.folder):
        path = remove()
        put(store)
        for file in sorted(path.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        path.rmdir()
        assert np.array_equal(store.load(put(store)).payload, PAYLOAD)
    assert (store.folder / MARK).is_file()


def test_a_folder_that_somebody_empties_is_marked_again(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    for _ in range(2):
        shutil.rmtree(store.folder / put(store)[0])
        (store.folder / MARK).unlink()
        (store.folder / "f").mkdir(mode=0o700, exist_ok=True)  # another writer was quicker
        put(store)
    assert RecordStore(tmp_path).keys() == store.keys()


def test_reading_a_record_marks_it_as_used(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    key = put(store)
    (path,) = files(tmp_path)
    os.utime(path, (1000, 1000))
    with store.opened(key) as (_, _, used):
        assert used == 1000
    store.load(key)
    with store.opened(key) as (_, _, used):
        assert used > 1000


def test_a_record_that_is_gone_is_told_from_one_that_cannot_be_read(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    key = put(store)
    (path,) = files(tmp_path)
    path.rename(path.with_suffix(".moved"))
    with pytest.raises(RecordGone):
        store.load(key)
    for place in (lambda: path.symlink_to(path.with_suffix(".moved")), lambda: os.mkfifo(path)):
        place()
        with pytest.raises(OSError, match=r"symbolic|no file"):
            store.load(key)
        assert store.keys() == []
        store.delete(key)
        assert os.path.lexists(path)  # what is no file is not ours to remove
        path.unlink()


def test_the_age_of_what_was_left_is_told_by_the_folder_s_own_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system has another machine's clock; ours may be hours off, either way."""
    store = RecordStore(tmp_path)
    put(store)
    shard = next(path for path in store.folder.iterdir() if path.is_dir())
    written = shard / f"{'0' * 16}.part"
    written.touch()
    real = time.time_ns
    for hours in (-5, 5):
        monkeypatch.setattr(disk.time, "time_ns", lambda hours=hours: real() + hours * 3600 * 10**9)
        monkeypatch.setattr(disk.time, "time", lambda hours=hours: real() / 1e9 + hours * 3600)
        assert store.sweep() == 0
        assert written.exists()
        list(store.changed())
        list(store.changed())
        assert store.folder.joinpath(shard.name).stat().st_mtime_ns
        assert shard.name in set(store.changed()), "it changed a moment ago"
    old = real() - 2 * 3600 * 10**9
    os.utime(written, ns=(old, old))
    assert store.sweep() == 1
