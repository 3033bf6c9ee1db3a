"""The folder of a disk cache: whose it is, and what in it is ours.

All that this format writes lies in a folder of its own, `llamahybrid-<format>`, with a mark: another format's
records, older or newer, and whatever else a user keeps beside them are never touched.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from llamahybrid.errors import FolderRefused
from llamahybrid.prompt_cache.envelope import VERSION

FOLDER = f"llamahybrid-{VERSION}"
MARK = "FORMAT"
MARK_TEXT = f"llamahybrid disk cache, format {VERSION}\n".encode()
SHARDS = "0123456789abcdef"
"""Folders for records, by the first letter of their key."""

FOREIGN = "cache.db"
"""Index of a folder in which another program keeps its cache with the diskcache library."""


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
        if os.path.lexists(there / FOREIGN):
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


def _mark(own: Path) -> None:
    """Say in the folder what it is. Raises FolderRefused where that is said otherwise, or not at all."""
    path = own / MARK
    try:
        with opened(path) as mark:
            text = mark.read(len(MARK_TEXT) + 1)
    except FileNotFoundError:
        foreign = any(map(_is_foreign, own.iterdir()))
        if foreign and not path.exists():  # another process may be making it, too
            raise FolderRefused(f"{own} is not a cache of llamahybrid: name another folder") from None
        text = b""
    if not text:  # two processes may do so: they say the same
        flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
        with open(os.open(path, flags, 0o600), "wb") as out:
            out.write(MARK_TEXT)
    elif text != MARK_TEXT:
        raise FolderRefused(f"{own} is not a cache of this format: name another folder")


def _is_foreign(path: Path) -> bool:
    """It is none of ours: not what is left, or made again, where somebody empties the folder meanwhile."""
    return path.name not in SHARDS and not path.name.endswith(".part")
