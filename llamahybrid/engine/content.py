"""Files named by their whole content: read once, and remembered beside what the file system says of them."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import xxhash

from llamahybrid.engine.sdist import cache_dir
from llamahybrid.errors import EngineError
from llamahybrid.files import write_whole

logger = logging.getLogger("llamahybrid")

SMALL = 64 << 20
"""Bytes up to which a file is read again rather than remembered: that takes some 10 ms."""

SETTLED_SECONDS = 2.0
"""A file changed more recently is not known by its time stamps: the next change may get the same ones, which
are as coarse as the system's tick, or two seconds on FAT."""

PIECE = 16 << 20
THREADS = min(4, os.cpu_count() or 1)
REMEMBERED = 512
"""Files whose digests are kept, the latest."""


class Signature(NamedTuple):
    """What the file system says of a regular file; equal as long as nobody has written to it."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> Signature:
        """The signature now; links are followed. Raises OSError when there is no regular file."""
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is not a regular file")
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    @property
    def settled(self) -> bool:
        """The last change is long enough ago that another one would show."""
        return time.time_ns() - max(self.mtime_ns, self.ctime_ns) > SETTLED_SECONDS * 1e9


class Nameless(bytes):
    """16 bytes that nothing else has, for what cannot be told from others by its content."""

    def __new__(cls) -> Nameless:
        """Another one every time."""
        return super().__new__(cls, os.urandom(16))


class Abandoned(Exception):
    """Reading was given up because nobody wants the digest any more."""


def digest(path: Path, wanted: Callable[[], bool] = lambda: True) -> bytes:
    """16 bytes that name a file's content: all of it is read, unless it was before and has not changed.

    `wanted()` False, asked after each piece, ends the reading with Abandoned. Raises OSError when the file
    cannot be read, or is written to meanwhile.
    """
    signature = Signature.of(path)
    known = None if signature.size <= SMALL else _Memory.here().find(signature)
    if known is not None:
        return known
    settled = signature.settled
    clock = time.perf_counter()
    name = _read(path, signature.size, wanted)
    if Signature.of(path) != signature:
        raise OSError(f"{path} was written to while it was read")
    if signature.size > SMALL:
        seconds = time.perf_counter() - clock
        logger.info("read %s once to name its content: %.1f s", path, seconds)
        if settled:
            _Memory.here().keep(signature, name)
    return name


def _read(path: Path, size: int, wanted: Callable[[], bool]) -> bytes:
    """The xxh3-128 of the size and of the xxh3-128 of every `PIECE`, which several threads take in turn.

    Neither reading nor hashing holds the GIL, and memory is `THREADS` pieces.
    """
    buffers = threading.local()

    def piece(start: int) -> bytes:
        if not wanted():
            raise Abandoned
        if not hasattr(buffers, "view"):
            buffers.view = memoryview(bytearray(min(PIECE, size)))
            buffers.file = FileIO(path)
            files.append(buffers.file)
        view = buffers.view[: min(PIECE, size - start)]
        buffers.file.seek(start)
        done = 0
        while done < len(view):
            n = buffers.file.readinto(view[done:])
            if not n:
                raise OSError(f"{path} ends before its {size} bytes")
            done += n
        hasher = xxhash.xxh3_128()
        hasher.update(view)
        return hasher.digest()

    files: list[FileIO] = []
    whole = xxhash.xxh3_128(size.to_bytes(8, "little"))
    threads = ThreadPoolExecutor(THREADS, "llamahybrid-read")
    try:
        for one in threads.map(piece, range(0, size, PIECE)) if size > PIECE else map(piece, range(size)[:1]):
            whole.update(one)
    finally:
        threads.shutdown(cancel_futures=True)
        for file in files:
            file.close()
    return whole.digest()


class _Memory:
    """Digests of large files by signature, in one small file of the user's cache folder.

    Whatever is wrong with that file costs reading the large ones again, and nothing else. Two processes that
    write at once may lose one entry of the other's.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @classmethod
    def here(cls) -> _Memory:
        """The one of this user; one that keeps nothing, of a user without a home folder."""
        try:
            return cls(cache_dir() / "digests.json")
        except EngineError:
            return cls(None)

    def find(self, signature: Signature) -> bytes | None:
        """The digest of the file with this signature; None if it is not known."""
        found = self._entries().get(_key(signature))
        return None if found is None else bytes.fromhex(found)

    def keep(self, signature: Signature, name: bytes) -> None:
        """Remember a digest, if the folder can be written to."""
        if self._path is None:
            return
        entries = self._entries()
        entries.pop(_key(signature), None)
        entries[_key(signature)] = name.hex()
        entries = dict(list(entries.items())[-REMEMBERED:])
        text = json.dumps({"files": entries, "checksum": _checksum(entries)}, indent=1)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, text.encode())
        except OSError as error:
            logger.info("what a large file holds cannot be remembered in %s: %s", self._path, error)

    def _entries(self) -> dict[str, str]:
        """What is remembered; nothing if the file is damaged, or others could have written it."""
        if self._path is None:
            return {}
        try:
            with self._path.open("rb") as file:
                if hasattr(os, "geteuid"):
                    status = os.fstat(file.fileno())
                    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                        return {}
                content = json.loads(file.read())
            entries: dict[str, str] = content["files"]
            sound = content["checksum"] == _checksum(entries)
            return entries if sound and all(len(name) == 32 for name in entries.values()) else {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return {}


def _key(signature: Signature) -> str:
    return ":".join(map(str, signature))


def _checksum(entries: dict[str, str]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(entries, sort_keys=True).encode())
