"""Records in a folder: diskcache keeps the index (SQLite) and the files, and nothing is ever unpickled.

Several processes may share a folder. A record is written to a file of its own first and indexed afterwards,
so that a killed process leaves whole records and, at most, a file that nobody knows, swept up later.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import diskcache
from diskcache.core import MODE_BINARY, UNKNOWN

from llamahybrid.errors import RecordError, RecordGone
from llamahybrid.prompt_cache.base import Bytes
from llamahybrid.prompt_cache.records import Head, read_head, read_payload

ORPHAN_SECONDS = 3600
"""A file that no index knows is left alone for so long: another process may be about to index it."""

BUSY_SECONDS = 10
"""How long SQLite waits for another process."""

MOST_ATTEMPTS = 20
"""How often a file is tried to be made in a folder that others remove when it is empty."""

DISK_ERRORS = (OSError, sqlite3.Error, diskcache.Timeout)
"""What a disk that is full, read-only, broken or busy raises."""


class BytesDisk(diskcache.Disk):  # type: ignore[misc]
    """Stores sequences of buffers in files under text keys. Cache files are data, never code."""

    def put(self, key: Any) -> tuple[str, bool]:
        """The key as the index holds it. Raises TypeError for anything but text."""
        if not isinstance(key, str):
            raise TypeError("a record's key is text")
        return key, True

    def get(self, key: Any, raw: Any) -> str:
        """A key of the index; what is no text, somebody else put there, becomes a key that nothing has."""
        return key if raw and isinstance(key, str) else ""

    def store(
        self, value: Sequence[bytes | memoryview], read: bool, key: Any = UNKNOWN
    ) -> tuple[int, int, str, None]:
        """Write buffers, one after the other, to a new file that only its owner may read."""
        name, path = self.filename(key, value)
        file = _create(Path(path))
        try:
            with open(file, "wb") as out:
                size = sum(int(out.write(part)) for part in value)
        except BaseException:
            self.remove(name)
            raise
        return size, MODE_BINARY, name, None

    def fetch(self, mode: int, filename: str | None, value: Any, read: bool) -> BinaryIO:
        """Open a record's file. Raises OSError, which reads as a miss, for a row that names none in here."""
        root = os.path.realpath(self._directory)
        path = os.path.realpath(os.path.join(root, filename or ""))
        if mode != MODE_BINARY or not path.startswith(root + os.sep):
            raise OSError("not a record")
        return open(path, "rb")


def _create(path: Path) -> int:
    """A new file's descriptor; its folders are made, again if another process removes them as empty."""
    attempt = 0
    while True:
        try:
            for above in (path.parent.parent, path.parent):
                above.mkdir(mode=0o700, exist_ok=True)
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileNotFoundError:
            attempt += 1
            if attempt == MOST_ATTEMPTS:
                raise


class RecordStore:
    """The records in one folder, by key; methods raise `DISK_ERRORS`."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).expanduser()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._cache = self._open()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            for path in self.folder.glob("cache.db*"):  # damaged: the records it named become orphans
                path.unlink()
            self._cache = self._open()
        with contextlib.suppress(OSError):  # another user's: theirs to decide
            for path in self.folder.glob("cache.db*"):
                path.chmod(0o600)
        self._mark = ""

    def _open(self) -> diskcache.Cache:
        # Eviction is ours: the library's would tear segments away from what needs them.
        return diskcache.Cache(
            str(self.folder), timeout=BUSY_SECONDS, disk=BytesDisk, eviction_policy="none", cull_limit=0
        )

    def keys(self) -> Iterator[str]:
        """All keys, the oldest first."""
        return (key for key in self._cache if key)

    def fresh(self) -> list[str]:
        """Keys added since the last call, by anybody, the oldest first."""
        new = []
        for key in reversed(self._cache):
            if key == self._mark:
                break
            new.append(key)
        if new:
            self._mark = new[0]
        return [key for key in reversed(new) if key]

    def head(self, key: str) -> Head:
        """A record without its payload. Raises RecordError when it is damaged, RecordGone when it is gone."""
        with self._file(key) as file:
            return replace(read_head(file), used=os.fstat(file.fileno()).st_mtime)

    def load(self, key: str) -> tuple[Head, Bytes]:
        """A whole record, checked, then marked as used. Raises RecordError if damaged, RecordGone if gone."""
        with self._file(key) as file:
            head = read_head(file)
            if head.payload_bytes > os.fstat(file.fileno()).st_size:
                raise RecordError("a record is truncated")
            payload = read_payload(file, head)
            with contextlib.suppress(OSError):  # on a read-only disk nothing is evicted either
                os.utime(file.fileno())
            return head, payload

    def write(self, key: str, parts: Sequence[bytes | memoryview]) -> None:
        """Write a record; it is there for everybody, whole, once this returns."""
        self._cache.set(key, parts, retry=True)

    def delete(self, key: str) -> None:
        """Remove a record; harmless if it is gone."""
        self._cache.delete(key, retry=True)

    @property
    def nbytes(self) -> int:
        """Bytes of all records and the index."""
        return int(self._cache.volume())

    def sweep(self) -> int:
        """Remove files that a killed process never got to index; how many there were."""
        before, known, swept = time.time() - ORPHAN_SECONDS, set(), 0
        for key in self.keys():
            with contextlib.suppress(RecordError), self._file(key) as file:
                known.add(os.path.realpath(file.name))
        for path in self.folder.glob("*/*/*.val"):
            with contextlib.suppress(FileNotFoundError):
                if os.path.realpath(path) not in known and path.stat().st_mtime < before:
                    path.unlink()
                    swept += 1
        return swept

    def close(self) -> None:
        """Let go of the index; it opens again by itself when used."""
        self._cache.close()

    def _file(self, key: str) -> BinaryIO:
        file: BinaryIO | None = self._cache.get(key, read=True, retry=True)
        if file is None:
            raise RecordGone("the record is gone")
        return file
