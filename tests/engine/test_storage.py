"""Folders of the cache: whose they are, what is left in them, and errors of the disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from llamahybrid.engine import storage
from llamahybrid.errors import EngineError


def test_a_folder_that_cannot_be_written_is_an_error_with_advice(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="a folder of your own"), storage.disk_errors():
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path))
    with pytest.raises(EngineError, match="the disk is full"), storage.disk_errors():
        raise OSError(errno.EDQUOT, "Disk quota exceeded")


def test_what_other_builds_left_goes_once_they_are_dead(tmp_path: Path) -> None:
    home = tmp_path / "cache" / "engines" / "mine"
    for name in ("mine", "dead", "alive"):
        storage.folder(home.parent / f".part-{name}-x")
    with storage.workshop(home.with_name("alive")) as alive, storage.workshop(home) as part:
        left = {path for path in home.parent.iterdir() if path.is_dir()}
        assert left == {part, alive}
    assert not list(home.parent.iterdir())


def test_a_folder_is_made_for_its_owner_alone_to_write(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        storage.folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b")] == [0o755, 0o755]
