"""Rows and records in a folder: a `diskcache.Cache` that holds bytes and never unpickles anything.

Several processes may share it. A row is in its SQLite database; a record is a file, named after its key, that
is written before its row and removed after it. Reads wait at most `LOCK_SECONDS` for a lock that another
process holds, changes `CHANGE_SECONDS`. Only regular files with a name of ours, in a folder that only this
user may write to, are ever opened or removed. The longest unused goes first: every row has its time of
use as its time of expiry, far ahead, and records have an earlier one than the rows that lead to them.
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import diskcache
from diskcache.core import MODE_BINARY, MODE_RAW

from llamahybrid.errors import DISK_FULL, RecordError, RecordGone
from llamahybrid.prompt_cache.block_store import BATCH, Busy, Rows, Values
from llamahybrid.prompt_cache.bytes_disk import NAME, SHARDS, BytesDisk, key_of
from llamahybrid.prompt_cache.envelope import Record, read_record
from llamahybrid.prompt_cache.folder import FOREIGN, POLICY, check_database, claim, folder_in, opened

logger = logging.getLogger("llamahybrid")

LOCK_SECONDS = 0.05
CHANGE_SECONDS = 5.0
KEEP_SECONDS = 300 * 365 * 86400
"""Times of expiry lie so far ahead: they are an order, nothing goes for its age, nor on a machine whose clock
stood at 1970 when a record was written."""

ORPHAN_SECONDS = 3600
"""Age from which a file without a row is removed: before, another process may be about to write its row."""

SPARE_BYTES = 1 << 20
"""Bytes of a disk that records leave free, for the journal that an open index has."""

DATABASE = (FOREIGN, f"{FOREIGN}-wal", f"{FOREIGN}-shm")

diskcache.EVICTION_POLICY[POLICY] = {
    "init": None,
    "get": None,  # one row at a time: `cull` asks for ten, which may be more than has to go
    "cull": "SELECT {fields} FROM Cache WHERE expire_time IS NOT NULL ORDER BY expire_time LIMIT min(?, 1)",
}


class DiskRows(Rows):
    """The rows and records of one folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Raises FolderRefused and OSError, see `claim`; nothing is opened yet."""
        self.folder = folder_in(folder)
        with suppress(Busy):
            self._claim()
        self.fork()

    def fork(self) -> None:
        """In a process that was forked: nothing is open; its parent's connections are never used."""
        self._caches: tuple[Any, Any] | None = None
        self._damaged = False
        self._identity = (0, 0)
        self._opening = threading.Lock()
        self._shard = os.getpid() % SHARDS

    # -- opening -----------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the folder, again where it was removed; harmless when it is open. Raises OSError.

        Every opening writes, and waits up to a minute for a lock: no request should wait for it.
        """
        with self._opening:
            if self._caches is not None and self._same():
                return
            self._caches = None
            self._claim()  # all of it was removed, or its mark: whose is it now?
            if self._damaged:
                self._discard()
            try:
                self._caches = self._opened()
            except sqlite3.OperationalError as error:
                full = " (the disk is full)" if self.free() <= 0 else ""
                raise Busy(f"its index cannot be opened: {error}{full}") from error
            except sqlite3.DatabaseError:
                self._discard()
                self._caches = self._opened()
            self._identity = self._identify()

    def _claim(self) -> None:
        """See `claim`. Raises Busy where a full disk has no room for the folder."""
        try:
            claim(self.folder.parent)
        except OSError as error:
            if error.errno in DISK_FULL:
                raise Busy(f"its folder cannot be made: {error}") from error
            raise

    def _opened(self) -> tuple[Any, Any]:
        check_database(self.folder)
        settings = {
            "disk": BytesDisk,
            "eviction_policy": POLICY,
            "cull_limit": 0,
            "size_limit": 1 << 62,
            "sqlite_mmap_size": 0,
            "sqlite_wal_autocheckpoint": 128,  # pages: its journal stays below `SPARE_BYTES`
            "sqlite_secure_delete": 1,  # what is forgotten is not to lie in free pages
            "disk_min_file_size": 0,
        }
        cache = diskcache.Cache(str(self.folder), timeout=CHANGE_SECONDS, **settings)
        hasty = diskcache.Cache(str(self.folder), timeout=LOCK_SECONDS, disk=BytesDisk)
        for name in DATABASE:  # never opened here: closing it would end SQLite's own locks (fcntl)
            with suppress(FileNotFoundError):
                os.chmod(self.folder / name, 0o600)
        self.nbytes = cache.reset("size") or 0  # a damaged row makes the sum none
        return hasty, cache

    def release(self) -> None:
        """Close what the calling thread has open."""
        for cache in self._caches or ():
            with suppress(sqlite3.Error):
                cache.close()

    def is_open(self) -> bool:
        """See `Rows.is_open`."""
        return self._caches is not None and self._same()

    def _identify(self) -> tuple[int, int]:
        found = os.stat(self.folder / FOREIGN)
        return found.st_dev, found.st_ino

    def _same(self) -> bool:
        """The folder that was opened is still there: an open database lives on when its folder is removed."""
        try:
            return self._identify() == self._identity
        except OSError:
            return False

    def _discard(self) -> None:
        """Remove a damaged database: it is only a cache; its files are orphans then."""
        logger.warning("the index of the disk cache in %s is damaged, and made anew", self.folder)
        self._damaged = False
        for name in DATABASE:
            with suppress(FileNotFoundError):
                os.unlink(self.folder / name)

    @contextmanager
    def _cache(self, *, change: bool = False) -> Iterator[Any]:
        """The open cache; what it raises becomes an OSError."""
        caches = self._caches
        if caches is None or not self._same():
            raise Busy("it is not open")
        try:
            yield caches[change]
        except diskcache.Timeout as error:
            raise Busy("another process holds its lock") from error
        except sqlite3.OperationalError as error:
            raise Busy(str(error)) if "lock" in str(error) else OSError(str(error)) from error
        except sqlite3.Error as error:
            if type(error) is sqlite3.DatabaseError:  # no database, or a malformed one
                self._caches, self._damaged = None, True
            raise OSError(f"its index is damaged: {error}") from error

    # -- reading -----------------------------------------------------------------------------------

    def measure(self) -> int:
        """See `Rows.measure`."""
        with self._cache(change=True) as cache:
            self.nbytes = cache.reset("size") or 0  # a damaged row makes the sum none
        return self.nbytes

    def free(self) -> int:
        """See `Rows.free`. Raises OSError."""
        return shutil.disk_usage(self.folder).free - SPARE_BYTES

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """See `Rows.get`."""
        found = {key: value for key, mode, value in self._named("mode, value", keys) if mode == MODE_RAW}
        return [value if isinstance(value := found.get(key), bytes) else None for key in keys]

    def sizes(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        """See `Rows.sizes`."""
        found = self._named("mode, size", keys)
        return {key: n for key, mode, n in found if mode == MODE_BINARY and isinstance(n, int)}

    def _named(self, columns: str, keys: Sequence[bytes]) -> Iterator[tuple[Any, ...]]:
        """Keys and columns of rows; row by row, diskcache takes ten times as long."""
        with self._cache() as cache:
            for at in range(0, len(keys), BATCH):
                some = keys[at : at + BATCH]
                query = f"SELECT key, {columns} FROM Cache WHERE key IN ({','.join('?' * len(some))})"
                yield from cache._sql(query, some)

    def keys(self, kind: bytes) -> Iterator[bytes]:
        """See `Rows.keys`; key by key, diskcache takes fifty times as long."""
        query = "SELECT key FROM Cache WHERE key >= ? AND key < ? ORDER BY rowid DESC"
        with self._cache(change=True) as cache:
            yield from (bytes(key) for (key,) in cache._sql(query, (kind, bytes([kind[0] + 1]))))

    def last_used(self, keys: Sequence[bytes]) -> dict[bytes, float]:
        """See `Rows.last_used`."""
        found = self._named("expire_time", keys)
        return {key: at - KEEP_SECONDS for key, at in found if isinstance(at, float | int)}

    def file(self, key: bytes) -> Path | None:
        """The file of a record; None where there is no record."""
        with self._cache() as cache:
            path = cache.get(key, read=True)
        return Path(path) if isinstance(path, str) else None

    def read(self, key: bytes) -> Record:
        """See `Rows.read`."""
        path = self.file(key)
        if path is None:
            raise RecordGone("the record is gone")
        try:
            with opened(path) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise RecordError("a record is no file")
                return read_record(file, status.st_size)
        except FileNotFoundError:
            raise RecordGone("the record's file is gone") from None

    # -- changing ----------------------------------------------------------------------------------

    def update(self, keys: Sequence[bytes], change: Callable[[Values], Values]) -> None:
        """See `Rows.update`."""
        with self._cache(change=True) as cache, cache.transact():
            rows = dict(zip(keys, self.get(keys), strict=True))
            expire = _behind_all(cache)
            for key, value in change(dict(rows)).items():
                if value is None:
                    cache.delete(key)
                elif value != rows.get(key):
                    cache.set(key, value, expire=expire)

    def write(self, key: bytes, parts: Sequence[bytes | memoryview]) -> None:
        """See `Rows.write`."""
        with self._cache(change=True) as cache:
            cache.set(key, list(parts), expire=_behind_all(cache))
        self.measure()
        self.sweep(self._shard)
        self._shard = (self._shard + 1) % SHARDS

    def remove(self, key: bytes) -> None:
        """See `Rows.remove`. Raises OSError where its file stays.

        The file goes first: on a full disk there is room for the change of the index then.
        """
        with self._cache(change=True) as cache:
            if (path := self.file(key)) is not None:
                cache.disk.unlink(f"{path.parent.name}/{path.name}")
            cache.delete(key)
        self.measure()

    def touch(self, keys: Sequence[bytes]) -> None:
        """See `Rows.touch`."""
        with self._cache(change=True) as cache, cache.transact():
            expire = _behind_all(cache)
            for key in keys:
                cache.touch(key, expire=expire)

    def make_room(self, n_bytes: int, limit: int) -> int | None:
        """Evict the longest unused records until `n_bytes` fit; return their number, None if that fails."""
        with self._cache(change=True) as cache:
            before = cache.disk.removed
            while (size := self.measure()) + n_bytes > limit:
                cache.size_limit = cache.volume() - size + limit - n_bytes
                if not cache.cull():
                    return None
            return int(cache.disk.removed - before)

    def clear(self) -> None:
        """Remove everything, files that no row names among it. Raises OSError where a file stays.

        The files go first: on a full disk the index may be opened and changed then.
        """
        errors = list[OSError]()
        disk = BytesDisk(str(self.folder))
        for name in (name for shard in range(SHARDS) for name in self._files(shard)):
            try:
                disk.unlink(name)
            except OSError as error:
                errors.append(error)
        self.open()
        with self._cache(change=True) as cache:
            cache.clear()
        self.measure()
        self.forgotten()
        if errors:
            raise errors[0]

    def forgotten(self) -> None:
        """Truncate the journal, which holds removed rows."""
        with self._cache(change=True) as cache, suppress(sqlite3.Error):
            cache.reset("sqlite_wal_checkpoint", "TRUNCATE", update=False)

    def sweep(self, shard: int) -> int:
        """Remove files of one shard that no row names, which a killed process has left; return their
        number."""
        swept, before = 0, time.time() - ORPHAN_SECONDS
        with suppress(OSError):
            for name in self._files(shard):
                path = self.folder / name
                if path.lstat().st_mtime < before and self.file(key_of(name)) != path:
                    path.unlink()
                    swept += 1
        return swept

    def count(self) -> int:
        """The number of records, by their files."""
        return sum(len(self._files(shard)) for shard in range(SHARDS))

    def _files(self, shard: int) -> list[str]:
        """Names of a shard's files, as `NAME` has them; the folder alone is read, and no file's status."""
        found = list[str]()
        with suppress(OSError), os.scandir(self.folder / f"{shard:02x}") as entries:
            for entry in entries:
                name = f"{shard:02x}/{entry.name}"
                if NAME.fullmatch(name) and entry.is_file(follow_symlinks=False):
                    found.append(name)
        return found


def _behind_all(cache: Any) -> float:
    """Seconds until a row expires that is used now: no row goes after it, also where the clock was ahead."""
    now = time.time()
    sane = now + 2 * KEEP_SECONDS  # a damaged row may hold anything
    ((last,),) = cache._sql("SELECT MAX(expire_time) FROM Cache WHERE expire_time < ?", (sane,)).fetchall()
    return float(max(KEEP_SECONDS, (last or 0) - now))
