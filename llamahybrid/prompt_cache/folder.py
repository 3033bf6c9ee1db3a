"""The folder of a disk cache: whose it is, where it lies, and what in it is ours.

All that this format writes lies in a folder of its own, `llamahybrid-<format>`, with a mark: another format's
records, older or newer, and whatever else a user keeps beside them are never touched, nor is a database of
another program in it.
"""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import stat
from contextlib import closing
from pathlib import Path
from typing import BinaryIO

from llamahybrid.errors import FolderRefused
from llamahybrid.prompt_cache.blocks import FORMAT

logger = logging.getLogger("llamahybrid")

FOLDER = f"llamahybrid-{FORMAT}"
MARK = "FORMAT"
MARK_TEXT = f"llamahybrid disk cache, format {FORMAT}\n".encode()

FOREIGN = "cache.db"
"""Index of a folder in which another program keeps its cache with the diskcache library."""

POLICY = "llamahybrid-longest-unused"
"""Order of eviction, which diskcache notes in the database: no other program has this one."""

OURS = re.compile(r"[0-9a-f]{2}|" + re.escape(FOREIGN) + "(-wal|-shm|-journal)?")
"""Names of what lies in a folder of records; they may outlive the mark where a folder is removed while it is
in use."""

MOUNTS = Path("/proc/self/mounts")
"""The list of file systems, on Linux."""

SHARED_SYSTEMS = ("nfs", "cifs", "smb", "fuse.", "afs", "ceph", "lustre", "glusterfs", "gpfs", "beegfs")
"""File systems, by the beginning of their names, on which SQLite's locks cannot be relied on."""

LOCAL_SYSTEMS = ("fuse.fuse-overlayfs",)

_told: set[Path] = set()


def opened(path: Path | str) -> BinaryIO:
    """A file to read: what is a link is not followed, and a pipe does not wait for who writes to it."""
    careful = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | careful))


def folder_in(folder: str | os.PathLike[str]) -> Path:
    """The path of the folder for records of this format in `folder`, without links."""
    return Path(os.path.realpath(Path(folder).expanduser())) / FOLDER


def claim(folder: str | os.PathLike[str]) -> Path:
    """The folder in `folder` for records of this format; made and marked if need be.

    Raises FolderRefused for one that others may write to, that another program keeps its cache in, or that
    lies on another machine, and OSError where nothing can be made or read. A folder that is refused is left
    as it is."""
    Path(folder).expanduser().mkdir(mode=0o700, parents=True, exist_ok=True)
    own = folder_in(folder)
    there = own.parent
    check_owner(there)
    if (system := file_system(there)) is not None:
        raise FolderRefused(
            f"{there} lies on {system}, where several machines cannot share it safely: "
            "name a local folder, and share a server (remote=) instead"
        )
    if not os.path.lexists(own):
        if os.path.lexists(there / FOREIGN):
            raise FolderRefused(f"another program keeps its cache in {there}: name another folder")
        own.mkdir(mode=0o700, exist_ok=True)
    check_owner(own)
    _mark(own)
    _tell_of_older(there)
    return own


def check_database(own: Path) -> None:
    """Raise FolderRefused for a database that another program made, without a change in it.

    Raises sqlite3.Error where it cannot be read.
    """
    path = own / FOREIGN
    if not path.exists():
        return
    try:
        tables, found = _tables_and_policy(path, "ro")
    except sqlite3.OperationalError as error:
        if "readonly" not in str(error):
            raise
        tables, found = _tables_and_policy(path, "rw")  # its writer was killed: what it began is undone
    if found != (POLICY,) and (found is not None or tables - {"Settings"}):  # ours may be half made
        raise FolderRefused(f"another program keeps its cache in {own}: name another folder")


def _tables_and_policy(path: Path, mode: str) -> tuple[set[str], tuple[object] | None]:
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True)) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        policy = "SELECT value FROM Settings WHERE key = 'eviction_policy'"
        return tables, database.execute(policy).fetchone() if "Settings" in tables else None


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


def file_system(folder: Path) -> str | None:
    """The name of the file system on which a folder lies, where that is one that machines share."""
    try:
        lines = [line.split() for line in MOUNTS.read_text(errors="replace").splitlines()]
    except OSError:
        return None
    mounts = [(fields[1].replace("\\040", " "), fields[2]) for fields in lines if len(fields) > 2]
    above = [
        (len(Path(at).parts), n, kind) for n, (at, kind) in enumerate(mounts) if folder.is_relative_to(at)
    ]
    kind = max(above, default=(0, 0, ""))[2]
    return kind if kind.startswith(SHARED_SYSTEMS) and kind not in LOCAL_SYSTEMS else None


def _mark(own: Path) -> None:
    """Say in the folder what it is. Raises FolderRefused where that is said otherwise, or not at all."""
    path = own / MARK
    try:
        with opened(path) as mark:
            text = mark.read(len(MARK_TEXT) + 1)
    except FileNotFoundError:
        strange = [entry.name for entry in own.iterdir() if not OURS.fullmatch(entry.name)]
        if not path.exists():  # another process may be making it, too, or may have removed half
            if strange:
                raise FolderRefused(f"{own} is not a cache of ours: name another folder") from None
            try:
                check_database(own)
            except sqlite3.Error as error:
                raise FolderRefused(f"{own} has no mark of ours, and a database: {error}") from None
        text = b""
    if not text:  # two processes may do so: they say the same
        flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
        with open(os.open(path, flags, 0o600), "wb") as out:
            out.write(MARK_TEXT)
    elif text != MARK_TEXT:
        raise FolderRefused(f"{own} is not a cache of this format: name another folder")


def _tell_of_older(there: Path) -> None:
    """Say once that records of an older format lie beside ours."""
    older = [there / f"llamahybrid-{number}" for number in range(1, FORMAT)]
    for folder in older:
        if folder.is_dir() and folder not in _told:
            _told.add(folder)
            logger.warning("%s is of an older format and left alone; this version does not read it", folder)
