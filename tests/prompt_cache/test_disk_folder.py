"""A cache's folder: whose it is, what lies beside it, and a disk that fails or wears."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diskcache
import numpy as np
import pytest

from llamahybrid.prompt_cache import PromptCache
from llamahybrid.prompt_cache import folder as folders
from llamahybrid.prompt_cache.base import Segment, Tokens
from llamahybrid.prompt_cache.block_store import Busy
from llamahybrid.prompt_cache.blocks import BLOCK, FORMAT, Node, Offer, spans
from llamahybrid.prompt_cache.bytes_disk import key_of
from llamahybrid.prompt_cache.disk import SPARE_BYTES, DiskRows
from llamahybrid.prompt_cache.envelope import HEADER_BYTES, header_of
from llamahybrid.prompt_cache.folder import FOLDER, FOREIGN, MARK
from llamahybrid.prompt_cache.outline import outline
from llamahybrid.prompt_cache.tier import Tier
from llamahybrid.prompt_cache.worker import Late
from llamahybrid.prompt_cache.writer import Job
from tests.lab.disk_fuzz import stored
from tests.lab.fake_engine import FakeAttention, FakeEngine
from tests.lab.waiting import wait_until

from .asking import SLOW, A, B, C, ask, everything, files, filled
from .stores import DEADLINE
from .test_stores import chat, planned

HOURS_AGO = 7200


def refused(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The cache goes on without the folder, says so once, and leaves it as it is."""
    before = everything(folder)
    with caplog.at_level(logging.WARNING):
        cache = PromptCache(1 << 24, folder)
    assert len(caplog.records) == 1
    assert "cannot be used" in caplog.text
    assert not cache.leaves_process
    assert ask(cache, A).cached == 0
    assert ask(cache, A).cached == len(A)
    assert cache.close()
    assert everything(folder) == before


# -- whose folder it is --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
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


def test_links_and_pipes_in_place_of_records_are_neither_read_nor_removed(folder: Path) -> None:
    filled(folder)
    for number, path in enumerate(files(folder)):
        moved = path.rename(path.with_suffix(".moved"))
        path.symlink_to(moved) if number % 2 else os.mkfifo(path)
    paths = files(folder)
    cache = PromptCache(1 << 24, folder, disk_write_bytes=0)
    assert ask(cache, A).cached == 0
    cache.clear()
    assert all(os.path.lexists(path) for path in paths)


def test_a_link_to_a_folder_of_ones_own_is_a_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    link = folder.parent / "link"
    link.symlink_to(folder)
    filled(link)
    assert ask(PromptCache(1 << 24, folder), A).source == "disk"


def test_a_folder_that_is_no_cache_is_refused(folder: Path, caplog) -> None:
    own = folder / FOLDER
    own.mkdir(mode=0o700, parents=True)
    folder.chmod(0o700)
    (own / "thesis.tex").write_text("mine")
    refused(folder, caplog)
    caplog.clear()
    (own / MARK).write_text("something else\n")
    refused(folder, caplog)


@pytest.mark.parametrize("name", ["~nobody-has-this-name/cache", "cache\0", "file/cache"])
def test_a_name_that_no_folder_can_have_costs_the_disk_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        cache = PromptCache(1 << 20, name)
    assert "cannot be used" in caplog.text
    assert ask(cache, A).cached == 0
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_only_the_owner_may_read(folder: Path) -> None:
    mask = os.umask(0)
    try:
        filled(folder)
    finally:
        os.umask(mask)
    for path in (folder, *folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


# -- other programs, other versions --------------------------------------------------------------------


@pytest.mark.parametrize("which", ["", FOLDER])
@pytest.mark.parametrize("empty", [False, True])
def test_another_programs_diskcache_is_refused_and_left_as_it_is(
    folder: Path, caplog, which: str, empty: bool
) -> None:
    with diskcache.Cache(str(folder / which)) as other:
        if not empty:
            other[(1, 2, 3)] = b"x" * 100_000
    folder.chmod(0o700)
    past = time.time() - HOURS_AGO
    for path in folder.rglob("*.val"):
        os.utime(path, (past, past))
    refused(folder, caplog)
    with diskcache.Cache(str(folder / which)) as other:
        assert empty or len(other[(1, 2, 3)]) == 100_000
        assert other.eviction_policy == "least-recently-stored"


@pytest.mark.parametrize("marked", [False, True])
def test_another_programs_diskcache_that_replaces_ours_is_left_as_it_is(
    folder: Path, caplog, marked: bool
) -> None:
    cache, own = filled(folder), folder / FOLDER
    mark = (own / MARK).read_bytes()
    shutil.rmtree(own)
    with diskcache.Cache(str(own)) as other:
        other[(1, 2, 3)] = b"x" * 100_000
    if marked:
        (own / MARK).write_bytes(mark)
    before = everything(own)
    assert ask(cache, [*A, 1]).cached == len(A), "RAM serves on"
    cache.flush()
    cache.clear()
    assert ask(cache, A).cached == 0
    cache.close()
    assert everything(own) == before
    with diskcache.Cache(str(own)) as other:
        assert len(other[(1, 2, 3)]) == 100_000
        assert other.eviction_policy == "least-recently-stored"
    assert "another program" in caplog.text


def test_a_database_of_no_diskcache_is_left_as_it_is(folder: Path, caplog) -> None:
    own = folder / FOLDER
    own.mkdir(mode=0o700, parents=True)
    folder.chmod(0o700)
    with closing(sqlite3.connect(own / FOREIGN)) as other, other:
        other.execute("CREATE TABLE images (name)")
    refused(folder, caplog)
    with closing(sqlite3.connect(own / FOREIGN)) as other:
        assert other.execute("SELECT name FROM sqlite_master").fetchall() == [("images",)]


def test_a_folder_whose_maker_was_killed_is_used(folder: Path, tmp_path: Path) -> None:
    """The journal of a change that did not come to its end lies beside the index."""
    filled(folder)
    index = folder / FOLDER / FOREIGN
    with closing(sqlite3.connect(index)) as database:
        for pragma in ("journal_mode = DELETE", "cache_size = 1"):
            database.execute(f"PRAGMA {pragma}")
        database.execute("UPDATE Cache SET value = zeroblob(4096)")
        begun = [shutil.copy(path, tmp_path) for path in (index, f"{index}-journal")]
    for path in begun:
        shutil.copy(path, index.parent)
    assert ask(PromptCache(1 << 24, folder), A).source == "disk"


@pytest.mark.parametrize("version", [FORMAT - 1, FORMAT + 1])
def test_versions_lie_side_by_side(folder: Path, caplog, version: int) -> None:
    other = folder / f"llamahybrid-{version}" / "a"
    other.mkdir(mode=0o700, parents=True)
    (other / f"{'a' * 32}-state-5-5.record").write_bytes(b"LLHSTATE of another format")
    before = everything(other)
    with caplog.at_level(logging.WARNING):
        filled(folder)
        cache = PromptCache(1 << 24, folder, 20_000)  # starved
    ask(cache, A)
    cache.clear()
    assert everything(other) == before
    assert len(caplog.records) == (version < FORMAT), "said once, of an older one"


# -- a folder that changes, a disk that fails ----------------------------------------------------------


@pytest.mark.parametrize("which", ["records", "own folder", "folder"])
def test_a_folder_that_is_removed_is_made_again(folder: Path, which: str) -> None:
    cache = filled(folder)
    if which == "records":
        for path in files(folder):
            path.unlink()
    else:
        shutil.rmtree(folder if which == "folder" else folder / FOLDER)
    cache.ram_bytes = 0
    cache.ram_bytes = 1 << 24
    assert ask(cache, [*A, 1]).cached == 0
    assert ask(cache, C).cached == 0
    assert cache.flush()
    assert ask(PromptCache(1 << 24, folder), C).source == "disk"


@pytest.mark.parametrize("names", [(MARK,), (MARK, FOREIGN)])
def test_a_folder_that_was_removed_in_part_is_used_again(folder: Path, names: tuple[str, ...]) -> None:
    """Another process wrote a record while its mark and its index were removed."""
    filled(folder)
    for name in names:
        (folder / FOLDER / name).unlink()
    cache = filled(folder)
    assert ask(cache, A).cached == len(A)
    assert ask(PromptCache(1 << 24, folder), A).source == "disk"


def test_a_disk_that_is_full_at_the_start_is_used_once_it_has_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr("llamahybrid.prompt_cache.disk.claim", full)
        cache = PromptCache(1 << 24, folder)
        assert ask(cache, A).cached == 0
    assert "No space left" in caplog.text
    assert ask(cache, [*A, 1]).cached == len(A)
    assert cache.close()
    assert ask(PromptCache(1 << 24, folder), A).source == "disk"


@pytest.mark.parametrize("others", [0, 1 << 30])
def test_records_leave_room_on_a_disk_for_their_index(
    folder: Path, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """An open index has a journal. `others`: bytes that another program takes in the end."""
    room, taken = SPARE_BYTES + 60_000, 0

    def usage(_: object) -> Any:
        return SimpleNamespace(free=max(0, room - taken - sum(path.stat().st_size for path in files(folder))))

    monkeypatch.setattr(shutil, "disk_usage", usage)
    cache = PromptCache(1 << 24, folder, 1 << 30)
    for number in range(10):
        ask(cache, chat(number))
        assert cache.flush()
    assert usage(folder).free >= SPARE_BYTES
    assert (folder / FOLDER / f"{FOREIGN}-wal").stat().st_size < SPARE_BYTES
    assert cache.stats().extra["disk_evicted"]
    taken, before = others, files(folder)
    ask(cache, chat(10))
    assert cache.flush()
    assert (files(folder) == before) == (others > 0), "nothing goes that is not enough"
    assert cache.close()
    assert ask(PromptCache(1 << 24, folder), chat(9 if others else 10)).source == "disk"


@pytest.mark.parametrize("free", [0, 1 << 40])
def test_an_index_that_a_full_disk_keeps_shut_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    """SQLite's own words are a disk I/O error."""

    def failing(_: DiskRows) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    rows = DiskRows(folder)
    monkeypatch.setattr(DiskRows, "_opened", failing)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(Busy) as told:
        rows.open()
    assert ("the disk is full" in str(told.value)) is (free == 0)


def test_files_of_a_killed_process_are_swept_when_they_are_old(folder: Path) -> None:
    filled(folder)
    shard = files(folder)[0].parent
    names = (f"{'a' * 30}-r-00000000.val", f"{'b' * 30}-a-00000000.val", "notes.val")
    fresh, old, theirs = (shard / name for name in names)
    past = time.time() - HOURS_AGO
    for path in (fresh, old, theirs):
        path.write_bytes(b"half a reco")
    for path in (old, theirs, *set(files(folder)) - {fresh}):
        os.utime(path, (past, past))
    rows = DiskRows(folder)
    rows.open()
    assert sum(rows.sweep(number) for number in range(256)) == 1
    assert [path.exists() for path in (fresh, old, theirs)] == [True, False, True]
    assert ask(PromptCache(1 << 24, folder), A).source == "disk"


# -- what the database may do --------------------------------------------------------------------------


def database(folder: Path) -> sqlite3.Connection:
    """Another connection to a folder's database, as of another process."""
    return sqlite3.connect(folder / FOLDER / FOREIGN, isolation_level=None)


def test_a_row_that_names_a_foreign_file_is_a_miss_and_the_file_stays(folder: Path) -> None:
    filled(folder)
    other = database(folder)
    for name in ("../../home/papers/thesis.tex", str(folder.parent / "home" / "papers" / "thesis.tex")):
        other.execute("UPDATE Cache SET filename = ? WHERE filename IS NOT NULL", (name,))
        cache = PromptCache(1 << 24, folder)
        assert ask(cache, A).cached == 0
        cache.clear()
        cache.close()
        filled(folder)
    other.close()


@pytest.mark.parametrize("at", [0, 5, 17, -1])
def test_a_flipped_bit_of_a_row_brings_nothing_wrong(folder: Path, at: int) -> None:
    filled(folder)
    other = database(folder)
    for rowid, value in other.execute("SELECT rowid, value FROM Cache WHERE filename IS NULL").fetchall():
        flipped = bytearray(value)
        flipped[at % len(value)] ^= 1
        other.execute("UPDATE Cache SET value = ? WHERE rowid = ?", (bytes(flipped), rowid))
        cache = PromptCache(1 << 24, folder, disk_write_bytes=0)
        for prompt in (A, B, C):
            ask(cache, [*prompt, 1])  # the engine's state shows every wrong restore
        cache.close()
        other.execute("UPDATE Cache SET value = ? WHERE rowid = ?", (value, rowid))
    other.close()


def test_records_under_the_names_of_others_are_misses(folder: Path) -> None:
    """Two chats of one length have exchanged their records, each of which is sound."""
    cache = PromptCache(1 << 24, folder)
    for number in (1, 2):
        ask(cache, chat(number))
    assert cache.close()
    alike = defaultdict[tuple[int, int], list[Path]](list)
    for path in files(folder):
        header = header_of(path.read_bytes()[:HEADER_BYTES])
        alike[header.start, header.end].append(path)
    for first, second in alike.values():
        raw = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(raw)
    cache = PromptCache(1 << 24, folder)
    before = files(folder)
    assert [planned(cache, [*chat(number), 1]) for number in (1, 2)] == [0, 0]
    assert cache.stats().extra["disk_damaged"] > 0
    assert cache.close()
    assert len(files(folder)) < len(before), "they are removed"


def test_a_pickled_row_is_never_unpickled(folder: Path) -> None:
    filled(folder)
    trap = folder.parent / "sprung"
    raw = pickle.dumps(_Trap(str(trap)))
    other = database(folder)
    other.execute("UPDATE Cache SET mode = 4, value = ?, filename = NULL", (raw,))
    other.execute(
        "INSERT INTO Cache(key, raw, mode, value, expire_time) VALUES (?, 0, 4, ?, 9e12)", (raw, raw)
    )
    other.close()
    cache = PromptCache(1 << 24, folder)
    assert ask(cache, A).cached == 0
    cache.forget(A)
    cache.clear()
    assert cache.close()
    assert not trap.exists()
    assert ask(PromptCache(1 << 24, folder), A).cached == 0


class _Trap:
    """Makes a file where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return os.mkdir, (self.path,)


def test_a_lock_held_elsewhere_while_opening_holds_up_no_request(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr("llamahybrid.prompt_cache.tier.FIRST_SECONDS", 0.05)
    filled(folder)
    other = database(folder)
    other.execute("BEGIN IMMEDIATE")
    cache = PromptCache(1 << 24, folder)
    assert ask(cache, A).cached == 0
    assert ask(cache, [*A, 1]).cached == len(A), "RAM serves on"
    assert cache.stats().extra["disk_late"] > 0
    other.execute("ROLLBACK")
    other.close()
    wait_until(lambda: planned(cache, [*C, 1]) == len(C))


def test_a_lock_held_elsewhere_does_not_stop_reads(folder: Path) -> None:
    filled(folder)
    cache = PromptCache(1 << 24, folder)
    assert planned(cache, [*B, 1]) == len(B)
    other = database(folder)
    other.execute("BEGIN EXCLUSIVE")
    assert ask(cache, A).source == "disk"
    other.execute("ROLLBACK")
    other.close()
    assert cache.flush()


def test_a_damaged_index_is_made_anew(folder: Path, caplog) -> None:
    filled(folder)
    (folder / FOLDER / FOREIGN).write_bytes(b"no database at all" * 1000)
    cache = PromptCache(1 << 24, folder)
    assert "made anew" in caplog.text
    assert ask(cache, A).cached == 0
    assert cache.close()
    assert ask(PromptCache(1 << 24, folder), A).source == "disk"


def test_an_index_that_is_damaged_while_it_is_in_use_is_made_anew(folder: Path, caplog) -> None:
    cache, index = filled(folder), folder / FOLDER / FOREIGN
    raw = index.read_bytes()
    index.write_bytes(raw[:4096] + b"x" * (len(raw) - 4096))
    cache.ram_bytes = 0
    cache.ram_bytes = 1 << 24
    assert ask(cache, A).cached == 0
    wait_until(cache.flush)
    assert "made anew" in caplog.text
    assert ask(PromptCache(1 << 24, folder), A).source == "disk"


@pytest.mark.parametrize("system", ["nfs4", "cifs", "fuse.sshfs"])
def test_a_folder_on_a_shared_file_system_is_refused(folder: Path, caplog, monkeypatch, system: str) -> None:
    filled(folder)
    mounts = folder.parent / "mounts"
    mounts.write_text(f"none / ext4 rw 0 0\nhost:/x {folder} {system} rw 0 0\nnone /elsewhere ext4 rw 0 0\n")
    monkeypatch.setattr(folders, "MOUNTS", mounts)
    refused(folder, caplog)
    assert system in caplog.text


def test_a_view_that_fails_does_not_pause_reading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(folder)
    cache = PromptCache(1 << 24, folder)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "the disk does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(DiskRows, "rows", fail)
        assert outline(cache).branches == ()
    assert planned(cache, [*A, 1]) == len(A)
    assert cache.stats().extra["disk_errors"] == 0


def test_a_long_view_of_all_records_delays_no_look_up(folder: Path) -> None:
    filled(folder)
    cache = PromptCache(1 << 24, folder)
    tier = cache.disk
    assert tier is not None
    real, begun, go_on = DiskRows.rows, threading.Event(), threading.Event()
    looks: list[bytes] = []

    def slowly(rows: DiskRows, kind: bytes) -> Iterator[tuple[bytes, bytes]]:
        looks.append(kind)
        begun.set()
        assert go_on.wait(DEADLINE)
        return real(rows, kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskRows, "rows", slowly)
        viewer = threading.Thread(target=tier.glance, args=(10, DEADLINE))
        viewer.start()
        assert begun.wait(DEADLINE)
        seen = tier.look(FakeEngine(cache).view().namespace, np.array(A, np.int32))
        assert tier.glance(10, 0.0) == ([], b""), "another view waits no longer than it may"
        assert len(looks) == 1, "views read one at a time"
        go_on.set()
        viewer.join()
    assert seen is not None
    assert seen.length == len(A)


def test_a_view_ends_in_its_time_with_what_was_read(folder: Path) -> None:
    filled(folder)
    tier = PromptCache(1 << 24, folder).disk
    assert tier is not None
    everything, going = tier.glance(100, DEADLINE)
    assert len(everything) > 1
    assert going
    some, unknown = tier.glance(100, 0.0)
    assert [place[0] for place in some] == [everything[0][0]]
    assert not unknown
    assert len(tier.glance(100, DEADLINE)[0]) == len(everything)


def test_records_are_counted_without_a_look_at_each_file(folder: Path, monkeypatch) -> None:
    filled(folder)
    cache, records, real = PromptCache(1 << 24, folder), len(files(folder)), os.stat
    looks: list[object] = []
    monkeypatch.setattr(os, "stat", lambda *path, **more: looks.append(path) or real(*path, **more))
    assert cache.stats().extra["disk_records"] == records
    assert len(looks) < records
    monkeypatch.undo()


def test_a_clock_that_was_ahead_does_not_keep_what_was_written_then(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + 13 * 365 * 86400)
        cache = filled(folder)
    limit = cache.stats().extra["disk_bytes"]
    cache = PromptCache(1 << 24, folder, limit)
    ask(cache, chat(0))
    assert cache.close()
    assert ask(PromptCache(1 << 24, folder, limit), chat(0)).cached == len(chat(0))


@pytest.mark.parametrize("damaged", ["9e999", "'x'", "x'00'"])
def test_a_damaged_time_of_use_makes_no_other_row_the_last_for_ever(folder: Path, damaged: str) -> None:
    filled(folder)
    with closing(sqlite3.connect(folder / FOLDER / FOREIGN)) as database, database:
        database.execute(f"UPDATE Cache SET expire_time = {damaged} WHERE rowid = 1")
    rows = DiskRows(folder)
    rows.open()
    key = next(iter(rows.keys(b"r")))
    rows.touch([key])
    assert rows.last_used([key])[key] < time.time() + 60


def test_records_written_while_the_clock_stood_at_its_beginning_serve_and_go(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: 1000.0)
        filled(folder)
    records, cache = len(files(folder)), PromptCache(1 << 24, folder)
    assert planned(cache, [*A, 1]) == len(A)
    assert cache.stats().extra["disk_gone"] == 0
    cache.forget(A[:1])
    assert planned(PromptCache(1 << 24, folder), A) == 0
    assert len(files(folder)) < records


def test_pinned_records_stay_where_another_process_fills_the_folder(folder: Path) -> None:
    cache = PromptCache(1 << 24, folder, 60_000)
    ask(cache, C)
    assert cache.flush()
    cache.pin(C)
    other = PromptCache(1 << 24, folder, 1 << 30)
    for number in range(8):
        ask(other, chat(number))
    assert other.flush()
    assert other.stats().extra["disk_bytes"] > 60_000
    ask(cache, chat(100))
    assert cache.flush()
    assert planned(PromptCache(1 << 24, folder, 60_000), C) == len(C)


def test_a_full_disk_costs_one_warning_and_damages_nothing(folder: Path) -> None:
    """In a process whose files may not grow beyond a limit."""
    code = f"""
import random, resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from tests.lab import disk_fuzz
from llamahybrid.prompt_cache.cache import PromptCache
cache, rng = PromptCache(1 << 26, {str(folder)!r}, 1 << 40), random.Random(5)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for _ in range(30):
    disk_fuzz.turn(cache, rng)
cache.close()
print(cache.stats().extra["disk_failed"])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.strip()) == (0, "1"), run.stderr
    assert run.stderr.count("writing to the disk cache failed") == 1
    assert run.stderr.count("were not written to the disk cache") == 1
    cache = PromptCache(1 << 24, folder)
    assert ask(cache, A).cached == 0
    assert cache.flush()
    assert cache.stats().extra["disk_failed"] == 0


@pytest.mark.parametrize("what", ["forget", "clear"])
def test_what_is_removed_goes_from_a_full_disk_too(
    folder: Path, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The index has no room for a change; files have to go first."""
    filled(folder)
    cache = PromptCache(1 << 24, folder)
    before = files(folder)

    def full(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(diskcache.Cache, "delete" if what == "forget" else "clear", full)
        cache.forget(A) if what == "forget" else cache.clear()
    assert f"{what} it again" in caplog.text
    assert len(files(folder)) < len(before) if what == "forget" else not files(folder)
    assert planned(cache, [*A, 1]) <= 150, "as far as B goes"


def test_clearing_removes_files_that_no_row_names(folder: Path) -> None:
    cache = filled(folder)
    stray = files(folder)[0].with_name(f"{'a' * 30}-r-00000000.val")
    stray.write_bytes(b"half a record")
    cache.clear()
    assert not files(folder)


# -- what is written, and how much ---------------------------------------------------------------------


def test_a_conversation_in_full_swing_is_not_written_turn_by_turn(folder: Path) -> None:
    cache = PromptCache(1 << 24, folder)
    engine = FakeEngine(cache, costs=SLOW)
    for _ in range(10):
        engine.prefill([*engine.state, *A[:50]])
        engine.generate(range(7000, 7080))
    cache.close()
    assert cache.stats().extra["disk_superseded"] > 10
    again = FakeEngine(PromptCache(1 << 24, folder), costs=SLOW)
    assert again.prefill([*engine.state, 1, 2]).cached == 1300


def test_attention_in_ram_is_not_checked_again_for_each_of_its_records(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, checked = FakeAttention.parts, list[int]()

    def counted(self: FakeAttention, segment: Segment, *arguments: Any) -> Iterator[Segment]:
        checked.append(segment.end)
        return parts(self, segment, *arguments)

    cache = PromptCache(1 << 24, folder)
    FakeEngine(cache).prefill(range(2000))
    monkeypatch.setattr(FakeAttention, "parts", counted)
    assert cache.flush()
    assert cache.stats().segments == 1
    assert 0 < checked.count(2000) < 10, "others are of caches that earlier tests left"
    assert len(files(folder)) > 2000 // BLOCK
    assert ask(PromptCache(1 << 24, folder), [*range(2000), 1]).cached == 2000


@pytest.mark.parametrize(("hourly", "most"), [(0, 0), (6000, 10_000)])
def test_no_more_is_written_in_an_hour_than_was_allowed(folder: Path, hourly: int, most: int) -> None:
    cache = PromptCache(1 << 24, folder, 1 << 30, hourly)
    for n in range(12):
        ask(cache, [n, *A])
    assert not cache.close()
    extra = cache.stats().extra
    assert extra["disk_deferred"] > 0
    assert (extra["disk_written_bytes"] > 0) == (hourly > 0)
    assert sum(p.stat().st_size for p in files(folder)) == extra["disk_written_bytes"] <= most


def test_checkpoints_evicted_before_they_were_written_are_counted(folder: Path) -> None:
    cache = PromptCache(12_000, folder)
    for prompt in (A, B, C):
        ask(cache, prompt)
    cache.flush()
    assert cache.stats().extra["disk_dropped"] > 0
    assert cache.close()


def test_a_read_that_comes_late_is_not_tried_at_each_shorter_prefix(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(folder).close()
    cache, asked = PromptCache(1 << 24, folder), list[int]()

    def late(tier: Tier, namespace: str, tokens: Tokens, offer: Offer, *_: object) -> None:
        asked.append(offer.position)
        tier.counts.late += 1

    monkeypatch.setattr(Tier, "load", late)
    assert ask(cache, [*A, 1, 2]).source == "none"
    assert len(asked) == 1


def test_logits_that_a_row_names_and_a_record_lacks_are_a_miss(folder: Path) -> None:
    """Two processes wrote a checkpoint at once, with and without them."""
    filled(folder).close()
    store, there = stored(folder)
    plain = [(item, tokens) for item, tokens in there.values() if item.is_checkpoint and not item.logits]
    (one,) = (each for each in store.each() if each.keys[0] == plain[0][0].key)
    store.note_logits(one.hashes[-1])
    cache = PromptCache(1 << 24, folder)
    assert ask(cache, plain[0][1].tolist()).cached < len(plain[0][1])
    assert cache.stats().extra["disk_damaged"] == 1


def test_logits_that_were_not_written_are_named_by_no_row(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = DiskRows.write

    def full(rows: DiskRows, key: bytes, parts: Any) -> None:
        if key.startswith(b"r"):
            raise OSError(errno.ENOSPC, "full")
        write(rows, key, parts)

    cache = PromptCache(1 << 24, folder)
    monkeypatch.setattr(DiskRows, "write", full)
    ask(cache, A)
    cache.close()
    store, _ = stored(folder)
    nodes = [Node.unpack(raw) for _, raw in store.rows.rows(b"n")]
    assert nodes
    assert not any(node is not None and node.logits for node in nodes)


def test_clearing_an_index_that_raises_anything_is_no_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(rows: DiskRows) -> None:
        raise ValueError("not enough values to unpack")

    cache = filled(folder)
    monkeypatch.setattr(DiskRows, "clear", damaged)
    cache.clear()
    assert cache.stats().extra["disk_errors"] == 1


def test_a_row_without_a_size_is_a_miss(folder: Path) -> None:
    filled(folder).close()
    (database,) = folder.glob(f"*/{FOREIGN}")
    with closing(sqlite3.connect(database)) as index, index:
        index.execute("UPDATE Cache SET size = NULL WHERE mode = 2")
    assert ask(PromptCache(1 << 24, folder), [*A, 1, 2]).source == "none"


def test_a_record_that_is_written_anew_while_it_is_read_serves(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(folder).close()
    cache, again = PromptCache(1 << 24, folder), list[Path]()
    assert cache.disk is not None
    rows = cache.disk.rows

    def opened(path: Path) -> Any:
        if not again:
            again.append(path)
            rows.write(key_of(f"{path.parent.name}/{path.name}"), [path.read_bytes()])
            assert not path.exists()
        return folders.opened(path)

    monkeypatch.setattr("llamahybrid.prompt_cache.disk.opened", opened)
    before = len(files(folder))
    assert ask(cache, A).source == "disk"
    assert again
    assert cache.stats().extra["disk_gone"] == 0
    assert len(files(folder)) == before


def test_a_read_that_is_refused_at_once_measures_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(folder).close()
    cache = PromptCache(1 << 24, folder)
    assert cache.disk is not None
    load, nbytes = Tier.load, list[int]()

    def refused_once(tier: Tier, namespace: str, tokens: Tokens, offer: Offer, *more: Any) -> Any:
        nbytes.append(offer.nbytes)
        with monkeypatch.context() as busy:
            busy.setattr(tier.reader, "call", _late)
            return load(tier, namespace, tokens, offer, *more)

    monkeypatch.setattr(Tier, "load", refused_once)
    before = cache.disk.costs.seconds(1 << 30)
    for _ in range(20):
        ask(cache, [*A, 1, 2])
    assert nbytes
    assert cache.disk.costs.seconds(1 << 30) == before


def _late(*_: object, **__: object) -> None:
    raise Late("an earlier call still runs")


def test_attention_behind_a_hole_is_written_by_blocks(folder: Path) -> None:
    """A segment that begins inside a block is of no use there; the blocks behind are."""
    cache, path = PromptCache(1 << 24, folder), list(range(1000))
    assert cache.disk is not None
    writer, start = cache.disk.writer, BLOCK + 30
    attention = FakeAttention(8)
    segment = attention.of(path[:start], path[start:])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cache, "attention", lambda *_: [segment])
        job = Job("model", np.array(path, np.int32), (), True)
        found = writer._attention(job, spans(len(path)))
        ranges = [(part.start, part.end) for part in found]
    assert ranges == spans(len(path))[2:]
