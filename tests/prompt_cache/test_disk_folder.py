"""Whose folder it is: another's is refused, and what another program or version keeps in it is left alone."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from pathlib import Path

import pytest

from llamahybrid.errors import FolderRefused
from llamahybrid.prompt_cache import PromptCache, records
from llamahybrid.prompt_cache.disk import RecordStore
from llamahybrid.prompt_cache.disk_folder import FOLDER, MARK, old_files, remove_old

from .asking import A, C, ask, everything, files, filled

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


def test_a_folder_that_is_no_cache_is_refused(tmp_path: Path) -> None:
    own = tmp_path / FOLDER
    own.mkdir(mode=0o700)
    (own / "thesis.tex").write_text("mine")
    with pytest.raises(FolderRefused):
        RecordStore(tmp_path)
    (own / MARK).write_text("something else\n")
    with pytest.raises(FolderRefused):
        RecordStore(tmp_path)
    assert sorted(p.name for p in own.iterdir()) == [MARK, "thesis.tex"]
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    (other / FOLDER).write_text("a file")
    with pytest.raises(FolderRefused, match="no folder"):
        RecordStore(other)


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


def test_another_programs_diskcache_is_refused_before_anything_is_in_it(folder: Path, caplog) -> None:
    diskcache = pytest.importorskip("diskcache")
    diskcache.Cache(str(folder)).close()
    folder.chmod(0o700)
    refused(folder, caplog)


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


def test_a_folder_of_the_format_before_that_another_program_uses_too_is_refused(folder: Path, caplog) -> None:
    old_folder(folder)
    stranger = folder / "aa" / "bb" / "notes.val"
    stranger.parent.mkdir(parents=True)
    stranger.write_text("not a record")
    refused(folder, caplog)


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
