"""Whose folder it is: another's is refused, and what another program or version keeps in it is left alone."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from llamahybrid.errors import FolderRefused
from llamahybrid.prompt_cache import PromptCache, envelope
from llamahybrid.prompt_cache.disk import RecordStore
from llamahybrid.prompt_cache.disk_folder import FOLDER, MARK

from .asking import A, ask, everything, files, filled

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


def test_what_is_left_of_a_folder_that_was_emptied_is_marked(tmp_path: Path) -> None:
    own = RecordStore(tmp_path).folder
    (own / MARK).unlink()
    (own / "3").mkdir(mode=0o700)
    (own / "0123456789abcdef.part").touch()
    RecordStore(tmp_path)
    assert (own / MARK).is_file()
    (own / MARK).unlink()
    (own / "notes").mkdir()
    with pytest.raises(FolderRefused):
        RecordStore(tmp_path)


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
    with diskcache.Cache(str(folder)) as other:
        assert (len(other[(1, 2, 3)]), len(other["text"])) == (100_000, 100)


def test_another_programs_diskcache_is_refused_before_anything_is_in_it(folder: Path, caplog) -> None:
    diskcache = pytest.importorskip("diskcache")
    diskcache.Cache(str(folder)).close()
    folder.chmod(0o700)
    refused(folder, caplog)


@pytest.mark.parametrize("version", [envelope.VERSION - 1, envelope.VERSION + 1])
def test_versions_lie_side_by_side(folder: Path, version: int) -> None:
    other = folder / f"llamahybrid-{version}" / "a"
    other.mkdir(mode=0o700, parents=True)
    (other / f"{'a' * 32}-state-5-5.record").write_bytes(envelope.MAGIC + bytes([version, 0]) + b" other")
    before = everything(other)
    filled(folder)
    cache = PromptCache(1 << 24, folder, 20_000)  # starved
    ask(cache, A)
    cache.clear()
    assert everything(other) == before
