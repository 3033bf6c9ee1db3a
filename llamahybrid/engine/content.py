"""Digests of whole files: each large file is read once, and its digest kept with its inode and times."""

from __future__ import annotations

import json
import logging
import os
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import xxhash

from llamahybrid.engine.sdist import cache_dir
from llamahybrid.engine.trust import access
from llamahybrid.errors import EngineError
from llamahybrid.files import write_whole

logger = logging.getLogger("llamahybrid")

SMALL = 64 << 20
"""Files up to this many bytes are read each time (about 10 ms)."""

SETTLED_SECONDS = 2.0
"""The digest of a file changed more recently is not kept: the next change may get the same time stamp, whose
resolution is the system's tick, or two seconds on FAT."""

PIECE = 16 << 20
THREADS = min(4, os.cpu_count() or 1)
MOST_KEPT = 512
"""Digests that are kept, the latest."""


class Signature(NamedTuple):
    """The identity, size and times of a regular file; equal until somebody writes to the file."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> Signature:
        """The current signature; links are followed. Raises OSError if there is no regular file."""
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is not a regular file")
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    @property
    def settled(self) -> bool:
        """The last change is old enough that another one would have another time stamp."""
        return time.time_ns() - max(self.mtime_ns, self.ctime_ns) > SETTLED_SECONDS * 1e9


class Nameless(bytes):
    """16 random bytes in place of a digest, for content that cannot be identified."""

    def __new__(cls) -> Nameless:
        """Draw the bytes."""
        return super().__new__(cls, os.urandom(16))


class Abandoned(Exception):
    """Reading ended early because the digest is no longer needed."""


def digest(path: Path, wanted: Callable[[], bool] = lambda: True) -> bytes:
    """A digest of a file's content, 16 bytes, from the kept digests if the file has not changed.

    Raises:
        Abandoned: `wanted()`, called before each piece, was False.
        OSError: the file is unreadable, or was written to during the call.
    """
    signature = Signature.of(path)
    known = None if signature.size <= SMALL else _load().get(_key(signature))
    if known is not None:
        return bytes.fromhex(known)
    settled = signature.settled
    clock = time.perf_counter()
    name = _read(path, signature.size, wanted)
    if Signature.of(path) != signature:
        raise OSError(f"{path} was written to while it was read")
    if signature.size > SMALL:
        seconds = time.perf_counter() - clock
        logger.info("read %s once to name its content: %.1f s", path, seconds)
        if settled:
            _keep(_key(signature), name.hex())
    return name


def _read(path: Path, size: int, wanted: Callable[[], bool]) -> bytes:
    """The xxh3-128 of the size and of the xxh3-128 of each `PIECE`, computed by several threads.

    Reading and hashing release the GIL; memory is `THREADS` pieces.
    """

    def piece(start: int) -> bytes:
        if not wanted():
            raise Abandoned
        length = min(PIECE, size - start)
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(length)
        if len(data) < length:
            raise OSError(f"{path} ends before its {size} bytes")
        return xxhash.xxh3_128(data).digest()

    whole = xxhash.xxh3_128(size.to_bytes(8, "little"))
    threads = ThreadPoolExecutor(THREADS, "llamahybrid-read")
    try:
        for one in threads.map(piece, range(0, size, PIECE)):
            whole.update(one)
    finally:
        threads.shutdown(cancel_futures=True)
    return whole.digest()


# -- kept digests: one JSON file in the cache folder, for this user alone to write --------------------


def _kept() -> Path | None:
    """The file of kept digests; None for a user without a home folder."""
    try:
        return cache_dir() / "digests.json"
    except EngineError:
        return None


def _load() -> dict[str, str]:
    """Digests by key; empty if the file is damaged, or others could have written it."""
    if (path := _kept()) is None:
        return {}
    try:
        with path.open("rb") as file:
            entries = {} if access(file.fileno()) else json.loads(file.read())["files"]
        return {str(key): bytes.fromhex(name).hex() for key, name in entries.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _keep(key: str, name: str) -> None:
    """Add a digest. Two processes that write at once may lose an entry, which costs reading a file again."""
    if (path := _kept()) is None:
        return
    entries = _load()
    entries.pop(key, None)
    entries = dict([*entries.items(), (key, name)][-MOST_KEPT:])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"files": entries}, indent=1).encode())
    except OSError as error:
        logger.info("the digest of a large file cannot be kept in %s: %s", path, error)


def _key(signature: Signature) -> str:
    return ":".join(map(str, signature))
