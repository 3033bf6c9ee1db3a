"""The folder of a disk cache: whose it is, and what in it is ours.

All that this format writes lies in a folder of its own, `llamahybrid-<format>`, with a mark: another format's
records, older or newer, and whatever else a user keeps beside them are never touched.

Format 1 (before this one) was a diskcache folder: an SQLite index `cache.db`, and records in `xx/yy/*.val`.
Its records are not read; `llamahybrid cache prune --old-formats` removes them.
"""

from __future__ import annotations

import os
import re
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import BinaryIO

from llamahybrid.errors import FolderRefused
from llamahybrid.prompt_cache.records import MAGIC, VERSION

FOLDER = f"llamahybrid-{VERSION}"
MARK = "FORMAT"
MARK_TEXT = f"llamahybrid disk cache, format {VERSION}\n".encode()
SHARDS = "0123456789abcdef"
"""Folders for records, by the first letter of their key."""

OLD_INDEX = ("cache.db", "cache.db-wal", "cache.db-shm")
_OLD_KEY = re.compile(r"[0-9a-f]{32}-(attention|prompt|state)-[0-9]+-[0-9]+")
_OLD_FOLDER = re.compile(r"[0-9a-f]{2}")


def opened(path: Path | str, *, buffered: bool = True) -> BinaryIO:
    """A file to read: what is a link is not followed, and a pipe does not wait for who writes to it."""
    careful = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    buffering = -1 if buffered else 0
    return open(path, "rb", buffering, opener=lambda name, flags: os.open(name, flags | careful))


def claim(folder: str | os.PathLike[str]) -> Path:
    """The folder in `folder` for records of this format; made and marked if need be.

    Raises FolderRefused for one that others may write to, or that another program keeps its cache in, and
    OSError where nothing can be made or read. A folder that is refused is left as it is.
    """
    there = Path(folder).expanduser()
    there.mkdir(mode=0o700, parents=True, exist_ok=True)
    there = Path(os.path.realpath(there))
    check_owner(there)
    own = there / FOLDER
    if not os.path.lexists(own):
        if not _is_free(there):
            raise FolderRefused(f"another program keeps its cache in {there}: name another folder")
        own.mkdir(mode=0o700, exist_ok=True)
    check_owner(own)
    _mark(own)
    return own


def check_owner(folder: Path) -> None:
    """Raise FolderRefused unless a folder is this user's and nobody else may write to it, as ssh does."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise FolderRefused(f"{folder} is no folder")
    if os.name == "nt":
        return  # its permissions are not in these bits
    if found.st_uid != os.geteuid():
        raise FolderRefused(f"{folder} belongs to another user")
    if found.st_mode & 0o022:
        raise FolderRefused(f"others may write to {folder}: `chmod go-w` it, or name another folder")


def old_files(folder: Path) -> Iterator[Path]:
    """Records of format 1 in a folder."""
    return (path for path in _old_values(folder) if _begins_as_record(path))


def remove_old(folder: Path) -> tuple[int, int]:
    """Remove records of format 1, and their index unless it names anything else; (how many, their bytes)."""
    count = size = 0
    ours = _old_index_is_ours(folder)
    for path in list(old_files(folder)):
        n_bytes = path.stat().st_size
        path.unlink()
        count, size = count + 1, size + n_bytes
        for above in (path.parent, path.parent.parent):
            with suppress(OSError):  # not empty
                above.rmdir()
    if ours and not any(True for _ in _old_values(folder)):
        for name in OLD_INDEX:
            with suppress(FileNotFoundError):
                (folder / name).unlink()
    return count, size


def _mark(own: Path) -> None:
    """Say in the folder what it is. Raises FolderRefused where that is said otherwise, or not at all."""
    path = own / MARK
    try:
        with opened(path) as mark:
            text = mark.read(len(MARK_TEXT) + 1)
    except FileNotFoundError:
        if any(own.iterdir()) and not path.exists():  # another process may be making it, too
            raise FolderRefused(f"{own} is not a cache of llamahybrid: name another folder") from None
        text = b""
    if not text:  # two processes may do so: they say the same
        flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
        with open(os.open(path, flags, 0o600), "wb") as out:
            out.write(MARK_TEXT)
    elif text != MARK_TEXT:
        raise FolderRefused(f"{own} is not a cache of this format: name another folder")


def _is_free(folder: Path) -> bool:
    """Nobody else's diskcache lies here: none at all, or one of format 1."""
    if not os.path.lexists(folder / OLD_INDEX[0]):
        return True
    ours = [_begins_as_record(path) for path in _old_values(folder)]
    return all(ours) and _old_index_is_ours(folder, damaged=bool(ours))


def _old_values(folder: Path) -> Iterator[Path]:
    """Files of a diskcache: regular ones two folders down, no links on the way."""
    for first in _folders(folder):
        for second in _folders(first):
            with suppress(OSError), os.scandir(second) as entries:
                for entry in list(entries):
                    if entry.name.endswith(".val") and entry.is_file(follow_symlinks=False):
                        yield Path(entry.path)


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [
                Path(e.path)
                for e in entries
                if _OLD_FOLDER.fullmatch(e.name) and e.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return []


def _begins_as_record(path: Path) -> bool:
    with opened(path) as file:
        return file.read(len(MAGIC)) == MAGIC


def _old_index_is_ours(folder: Path, *, damaged: bool = False) -> bool:
    """An SQLite index with no keys but ours, and the settings of format 1; it is not changed by looking.

    `damaged`: the answer for one that cannot be read.
    """
    wal = folder / OLD_INDEX[1]
    how = "mode=ro" if wal.exists() and wal.stat().st_size else "immutable=1"
    path = (folder / OLD_INDEX[0]).as_uri()
    try:
        with closing(sqlite3.connect(f"{path}?{how}", uri=True, timeout=1)) as rows:
            settings = dict(rows.execute("SELECT key, value FROM Settings"))
            keys = [key for (key,) in rows.execute("SELECT key FROM Cache")]
    except sqlite3.Error:
        return damaged
    mine = settings.get("eviction_policy") == "none" and settings.get("cull_limit") == 0
    return mine and all(isinstance(key, str) and _OLD_KEY.fullmatch(key) for key in keys)
