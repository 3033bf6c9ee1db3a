"""What a folder may hold and a disk may do: nothing foreign is touched, nothing is lost to what passes."""

from __future__ import annotations

import errno
import io
import logging
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from llamahybrid.errors import FolderRefused, RecordError
from llamahybrid.prompt_cache import PromptCache, disk, disk_store, records
from llamahybrid.prompt_cache.disk import RecordStore
from llamahybrid.prompt_cache.disk_folder import FOLDER, old_files, remove_old
from llamahybrid.prompt_cache.records import SNAPSHOT, key_of, pack, path_digest
from tests.lab import disk_faults
from tests.lab.fake_engine import FakeEngine
from tests.lab.integrity import check_integrity

from .asking import SLOW, A, B, C, ask, everything, files

PASSING = [errno.EMFILE, errno.ESTALE, errno.EIO, errno.EACCES, errno.ENOMEM]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A cache's folder, with something of the user's beside it that nobody may touch."""
    outside = tmp_path / "home"
    (outside / "papers").mkdir(parents=True)
    (outside / "papers" / "thesis.tex").write_text("my only copy")
    before = everything(outside)
    yield tmp_path / "cache"
    assert everything(outside) == before


def filled(folder: Path) -> PromptCache:
    """A cache that has written three conversations."""
    cache = PromptCache(1 << 24, folder)
    for prompt in (A, B, C):
        ask(cache, prompt)
    assert cache.close()
    return cache


def counts(cache: PromptCache) -> dict[str, int]:
    return cache.stats().extra


# -- whose folder it is --------------------------------------------------------------------------------


def refused(folder: Path, caplog) -> None:
    """The cache goes on without the folder, says so once, and leaves it as it is."""
    before = everything(folder)
    with caplog.at_level(logging.WARNING):
        cache = PromptCache(1 << 24, folder)
    assert len(caplog.records) == 1
    assert ask(cache, A).cached == 0
    assert ask(cache, A).cached == len(A)
    assert cache.close()
    assert everything(folder) == before
    with pytest.raises(FolderRefused):
        RecordStore(folder)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702])
def test_a_folder_that_others_may_write_to_is_refused(folder: Path, caplog, mode: int) -> None:
    filled(folder)
    folder.chmod(mode)
    refused(folder, caplog)
    folder.chmod(0o755)
    assert ask(PromptCache(1 << 24, folder), A).source == "disk"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("which", ["", FOLDER])
def test_a_folder_of_another_user_is_refused(folder: Path, caplog, which: str) -> None:
    filled(folder)
    os.chown(folder / which, 65534, 65534)
    refused(folder, caplog)


def test_links_in_place_of_folders_are_not_followed(folder: Path, caplog) -> None:
    filled(folder)
    own, elsewhere = folder / FOLDER, folder.parent / "elsewhere"
    shard = files(folder)[0].parent
    shard.rename(elsewhere)
    shard.symlink_to(elsewhere)
    before = everything(elsewhere)
    cache = PromptCache(1 << 24, folder)
    cache.clear()
    assert everything(elsewhere) == before
    own.rename(folder.parent / "own")
    own.symlink_to(folder.parent / "own")
    caplog.clear()
    refused(folder, caplog)


def test_a_link_to_a_folder_of_ones_own_is_a_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    link = folder.parent / "link"
    link.symlink_to(folder)
    filled(link)
    assert ask(PromptCache(1 << 24, folder), A).source == "disk"


@pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="descriptors cannot be counted")
def test_random_histories_of_what_a_disk_may_do() -> None:
    done = disk_faults.histories(2, 0, 25)
    assert len(done) >= 10


# -- other programs, other versions --------------------------------------------------------------------


def test_another_programs_diskcache_is_refused_and_left_as_it_is(folder: Path, caplog) -> None:
    diskcache = pytest.importorskip("diskcache")
    with diskcache.Cache(str(folder)) as other:
        other[(1, 2, 3)] = b"x" * 100_000
        other["text"] = b"y" * 100
    folder.chmod(0o700)
    past = time.time() - 7200
    for path in folder.glob("*/*/*.val"):
        os.utime(path, (past, past))
    refused(folder, caplog)
    assert remove_old(folder) == (0, 0)
    with diskcache.Cache(str(folder)) as other:
        assert (len(other[(1, 2, 3)]), len(other["text"])) == (100_000, 100)


def old_folder(folder: Path) -> int:
    """What format 1 left: a diskcache with keys and records of its own; how many."""
    diskcache = pytest.importorskip("diskcache")

    class Files(diskcache.Disk):
        def put(self, key):
            return key, True

        def get(self, key, raw):
            return key

        def store(self, value, read, key=None):
            name, path = self.filename()
            os.makedirs(os.path.dirname(path), exist_ok=True)
            Path(path).write_bytes(value)
            return len(value), 2, name, None

    with diskcache.Cache(str(folder), disk=Files, eviction_policy="none", cull_limit=0) as cache:
        for n in range(1, 4):
            cache[f"{n:032x}-state-{n}-{n}"] = records.MAGIC + b"\1\0" + b"x" * 1000
    folder.chmod(0o700)
    return 3


def test_records_of_the_format_before_are_left_alone_and_removed_when_asked(folder: Path) -> None:
    count = old_folder(folder)
    before = everything(folder)
    filled(folder)
    after = everything(folder)
    assert {name: after[name] for name in before} == before
    assert ask(PromptCache(1 << 24, folder), A).source == "disk"
    stranger = folder / "aa" / "bb" / "notes.val"
    stranger.parent.mkdir(parents=True)
    stranger.write_text("not a record")
    assert len(list(old_files(folder))) == count
    assert remove_old(folder)[0] == count
    assert sorted(p.name for p in folder.iterdir()) == ["aa", "cache.db", FOLDER]
    stranger.unlink()
    assert remove_old(folder) == (0, 0)
    assert "cache.db" not in os.listdir(folder)
    assert ask(PromptCache(1 << 24, folder), C).source == "disk"


def test_a_folder_of_the_format_before_whose_process_was_killed_is_used(folder: Path) -> None:
    old_folder(folder)
    rows = sqlite3.connect(folder / "cache.db")
    rows.execute("UPDATE Cache SET access_count = 1")
    rows.commit()  # it lies in the log that a killed process leaves
    assert (folder / "cache.db-wal").stat().st_size
    assert filled(folder).disk is not None
    rows.close()


def test_versions_lie_side_by_side(folder: Path, monkeypatch) -> None:
    newer = folder / "llamahybrid-3" / "a"
    newer.mkdir(mode=0o700, parents=True)
    (newer / f"{'a' * 32}-state-5-5.record").write_bytes(records.MAGIC + b"\3\0 newer")
    before = everything(newer)
    filled(folder)
    cache = PromptCache(1 << 24, folder, 20_000)  # starved
    ask(cache, A)
    cache.clear()
    assert everything(newer) == before


# -- records that somebody made up ---------------------------------------------------------------------


def made_up(**change: object) -> tuple[str, bytes]:
    """(key, file) of a record whose checksums hold and whose fields do not."""
    ids = np.arange(4, dtype="<i4")
    fields = {
        "magic": records.MAGIC,
        "version": records.VERSION,
        "kind": 0,
        "start": 4,
        "end": 4,
        "base": 0,
        "logits": 0,
        "name": b"m",
        "written": 1,
        "size": 0,
        "base_digest": path_digest("m", ids[:0]),
        "digest": path_digest("m", ids),
        "own": xxhash.xxh3_64_intdigest(ids.tobytes()),
        "row": xxhash.xxh3_64_intdigest(b""),
        "payload": xxhash.xxh3_64_intdigest(b""),
    } | change
    body = records._BODY.pack(*fields.values())
    kind = "attention" if fields["kind"] else "state"
    key = f"{fields['digest'].hex()}-{kind}-{fields['start']}-{fields['end']}"  # type: ignore[attr-defined]
    return key, body + records._SEAL.pack(xxhash.xxh3_64_intdigest(body)) + ids.tobytes()


MADE_UP = {
    "no text": {"name": b"\xff\xfe"},
    "no range": {"kind": 1},
    "another kind": {"kind": 7},
    "huge": {"start": 2**32 - 1, "end": 2**32 - 1},
    "huge payload": {"size": 2**60},
    "huge logits": {"logits": 2**32 - 1},
    "base behind its end": {"base": 9},
    "another's prefix": {"base": 2, "base_digest": path_digest("model", np.array(A, np.int32))},
    "another's digest": {"digest": path_digest("model", np.array(A, np.int32))},
    "a newer version": {"version": 3},
}


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


# -- errors that pass ----------------------------------------------------------------------------------


@pytest.mark.parametrize("code", PASSING)
@pytest.mark.parametrize("where", ["opened", "os.scandir", "os.lstat", "read_record", "read_head"])
def test_an_error_that_passes_removes_nothing(folder: Path, monkeypatch, code: int, where: str) -> None:
    filled(folder)
    before = {path: path.read_bytes() for path in files(folder)}

    def fail(*_: object, **__: object) -> object:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(disk_store, "FIRST_BACKOFF_SECONDS", 0.0)
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


def test_a_disk_that_refused_is_left_alone_for_a_while(folder: Path, monkeypatch) -> None:
    filled(folder)
    clock = [1000.0]
    monkeypatch.setattr(disk_store.time, "monotonic", lambda: clock[0])
    rest = disk_store.Backoff()
    waits = []
    for _ in range(9):
        rest.failed()
        began = clock[0]
        while not rest.over():
            clock[0] += 0.5
        waits.append(clock[0] - began)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    rest.worked()
    rest.failed()
    clock[0] += 1
    assert rest.over()


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


def test_a_record_that_lies_about_the_prefix_it_goes_on_from_is_damaged() -> None:
    own = xxhash.xxh3_64_intdigest(np.arange(2, 4, dtype="<i4").tobytes())
    _, raw = made_up(base=2, own=own, base_digest=path_digest("m", np.array([5, 5], np.int32)))
    with pytest.raises(RecordError, match="lies"):
        records.read_record(io.BytesIO(raw), len(raw))


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
