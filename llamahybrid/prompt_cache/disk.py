"""Records in a folder: one file each, whose name says what it is. The folder itself is the index.

Several processes may share it and none waits for another: a record is written under another name first and
renamed when it is whole, removed as a file is, and noticed by looking again into the folders that changed. A
killed process leaves whole records and, at most, a part that is swept up later. Only regular files with a
name of ours, in a folder that only this user may write to, are ever opened or removed.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from llamahybrid.errors import RecordError, RecordGone
from llamahybrid.prompt_cache.disk_folder import SHARDS, check_owner, claim, opened
from llamahybrid.prompt_cache.records import KEY, Head, Record, read_head, read_record

SUFFIX = ".record"
ORPHAN_SECONDS = 3600
"""A part that nobody finished is left alone for so long: another process may be writing it."""

RACY_NS = 2_000_000_000
"""A folder that was changed less than so long ago may change again without its time telling."""

MOST_ATTEMPTS = 20
"""How often a file is tried to be made in a folder that others remove when it is empty."""

_PART = re.compile(r"[0-9a-f]{16}\.part")


@dataclass
class DiskCounts:
    """What happened between this process and the folder."""

    written: int = 0
    written_bytes: int = 0
    loaded: int = 0
    damaged: int = 0
    """Records that did not prove right, twice; they are removed."""
    gone: int = 0
    """Records that another process has removed."""
    dropped: int = 0
    """Evicted from RAM before they could be written."""
    superseded: int = 0
    """States that waited to be written until the conversation had gone on: they never were."""
    deferred: int = 0
    """Not written because the hour's `disk_write_bytes` were used up."""
    evicted: int = 0
    errors: int = 0
    """Times that the disk refused something; it is left alone for a while then."""
    failed: int = 0
    """1: the disk refused the last write; it is tried again later."""


class RecordStore:
    """The records in one folder, by key; methods raise OSError for what the disk refuses."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Raises FolderRefused, see `claim`."""
        self.folder = claim(folder)
        self._seen: dict[str, int] = {}  # what `changed` saw: a folder's time, by shard
        self._ahead_ns = 0  # the clock of who keeps the folder, another machine maybe, of ours

    def keys(self, refused: Callable[[OSError], object] | None = None) -> list[str]:
        """All keys, in no order. `refused`: is told of each shard that cannot be listed, and it goes on."""
        keys: list[str] = []
        for shard in SHARDS:
            try:
                keys += (key for key in self.listed(shard) if lies_in(key, shard))
            except OSError as error:
                if refused is None:
                    raise
                refused(error)
        return keys

    def changed(self) -> Iterator[str]:
        """Shards that may have changed since this was asked. Raises OSError where that cannot be told."""
        for shard in SHARDS:
            try:
                changed = os.lstat(self.folder / shard).st_mtime_ns
            except FileNotFoundError:
                changed = 0
            if self._seen.get(shard) != changed:
                yield shard
                if abs(time.time_ns() + self._ahead_ns - changed) > RACY_NS:
                    self._seen[shard] = changed

    def look_again(self, shard: str) -> None:
        """What `listed` told of a shard was not all of use: it counts as changed."""
        self._seen.pop(shard, None)

    def listed(self, shard: str) -> set[str]:
        """What may be keys in a shard (see `lies_in`); none if it is gone. Raises OSError where untold."""
        try:
            with os.scandir(self._shard(shard)) as entries:
                return {
                    entry.name[: -len(SUFFIX)]
                    for entry in entries
                    if entry.name.endswith(SUFFIX) and entry.is_file(follow_symlinks=False)
                }
        except FileNotFoundError:
            return set()

    @contextmanager
    def opened(self, key: str) -> Iterator[tuple[BinaryIO, Head, float]]:
        """A record's file, read up to its ids, what the record says of itself, and when it was used last.

        Raises RecordError when it is damaged, RecordGone when it is gone, OSError when that cannot be told.
        """
        with self._file(key, buffered=False) as (file, status):
            yield file, named(key, read_head(file, status.st_size)), status.st_mtime

    def head(self, key: str) -> Head:
        """What a record says of itself, without its tokens. Raises as `opened` does."""
        with self.opened(key) as (_, head, _):
            return head

    def check(self, key: str) -> None:
        """Read a whole record and check it, which is no use of it. Raises as `opened` does."""
        with self._file(key) as (file, status):
            named(key, read_record(file, status.st_size).head)

    def load(self, key: str, within: float | None = None) -> Record:
        """A whole record, checked, then marked as used. Raises as `opened` does.

        `within`: seconds that it may take, where that can be told; not here.
        """
        with self._file(key) as (file, status):
            record = read_record(file, status.st_size)
            named(key, record.head)
            with suppress(OSError):  # on a read-only disk nothing is evicted either
                os.utime(file.fileno() if os.utime in os.supports_fd else self._path(key))
            return record

    def write(self, key: str, parts: Sequence[bytes | memoryview]) -> None:
        """Write a record; it is there for everybody, whole, once this returns."""
        part = self.prepare(key, parts)
        try:
            self.commit(part, key)
        except BaseException:
            self.abandon(part)
            raise

    def prepare(self, key: str, parts: Sequence[bytes | memoryview]) -> str:
        """Write a record to a file that is none yet, for `commit` or `abandon`; only its owner reads it."""
        part = os.path.join(os.path.dirname(self._path(key)), f"{secrets.token_hex(8)}.part")
        file = self._create(part)
        try:
            with open(file, "wb", buffering=0) as out:
                for piece in parts:
                    view = memoryview(piece).cast("B")
                    while len(view):
                        view = view[out.write(view) :]
        except BaseException:
            self.abandon(part)
            raise
        return part

    def commit(self, part: str, key: str) -> None:
        """What was prepared is the record of this key from now on, for everybody."""
        os.replace(part, self._path(key))

    def abandon(self, part: str) -> None:
        """Remove what was prepared."""
        with suppress(OSError):
            os.unlink(part)

    def delete(self, key: str) -> None:
        """Remove a record; harmless if it is gone."""
        path = self._path(key)
        with suppress(FileNotFoundError):
            if stat.S_ISREG(os.lstat(path).st_mode):
                os.unlink(path)

    def size(self, key: str) -> int:
        """Bytes of a record, sound or not; 0 if it is gone."""
        try:
            return os.lstat(self._path(key)).st_size
        except FileNotFoundError:
            return 0

    @property
    def nbytes(self) -> int:
        """Bytes of all records, but of those that cannot be looked at."""
        size = 0
        for key in self.keys(refused=lambda _: None):
            with suppress(OSError):
                size += self.size(key)
        return size

    def sweep(self) -> int:
        """Remove parts that a killed process never got to finish; how many there were.

        The folder may lie on another machine, whose clock it is that tells their age: it is read, too.
        """
        swept = 0
        try:
            now = self._clock()
        except OSError:  # nothing can be made here, so nothing is removed
            return 0
        self._ahead_ns = now - time.time_ns()
        before = now / 1e9 - ORPHAN_SECONDS
        for shard in SHARDS:
            with suppress(OSError), os.scandir(self._shard(shard)) as entries:
                for entry in list(entries):
                    part = _PART.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
                    if part and entry.stat(follow_symlinks=False).st_mtime < before:
                        os.unlink(entry.path)
                        swept += 1
        return swept

    def takes(self, n_bytes: int) -> bool:
        """A record of this size could lie here, if there were room. Raises OSError where none can now."""
        return True

    def catch_up(self, seconds: float) -> bool:
        """Know what others have stored until now, within so long; False if that cannot be told."""
        return True

    def settle(self, seconds: float) -> bool:
        """What was committed and deleted is so for everybody: here it is at once."""
        return True

    def _clock(self) -> int:
        """What time it is for who keeps the folder, in ns since 1970. Raises OSError."""
        mark = f"{self.folder}{os.sep}{secrets.token_hex(8)}.part"
        file = self._create(mark)
        try:
            return os.fstat(file).st_mtime_ns
        finally:
            os.close(file)
            os.unlink(mark)

    def _shard(self, shard: str) -> str:
        """A shard's folder; what somebody put in its place is not followed."""
        path = f"{self.folder}{os.sep}{shard}"
        with suppress(FileNotFoundError):
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                raise NotADirectoryError(f"{path} is no folder")
        return path

    def _path(self, key: str) -> str:
        """A record's file. Raises RecordError for what is no key."""
        if not lies_in(key, key[:1]):
            raise RecordError("not a key of a record")
        return f"{self._shard(key[0])}{os.sep}{key}{SUFFIX}"

    def _create(self, path: str) -> int:
        """A new file's descriptor; its folders are made, again if somebody removes them."""
        flags = (
            os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
        )
        attempt = 0
        while True:
            try:
                return os.open(path, flags, 0o600)
            except FileNotFoundError:
                attempt += 1
                if attempt == MOST_ATTEMPTS:
                    raise
                claim(self.folder.parent)  # all of it was removed, or its mark: whose is what is there now?
                parent = Path(path).parent
                parent.mkdir(mode=0o700, exist_ok=True)
                check_owner(parent)

    @contextmanager
    def _file(self, key: str, *, buffered: bool = True) -> Iterator[tuple[BinaryIO, os.stat_result]]:
        """A record's file, opened. Raises RecordGone where there is none."""
        try:
            file = opened(self._path(key), buffered=buffered)
        except FileNotFoundError:
            raise RecordGone("the record is gone") from None
        with file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OSError("a record is no file")
            yield file, status


def lies_in(key: str, shard: str) -> bool:
    """Text is a key, and of this shard."""
    return bool(shard) and key.startswith(shard) and KEY.fullmatch(key) is not None


def named(key: str, head: Head) -> Head:
    """A record's head, if it lies under its own name. Raises RecordError otherwise."""
    if head.key != key:
        raise RecordError("a record has another's name")
    return head
