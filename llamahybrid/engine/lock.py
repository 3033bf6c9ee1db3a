"""A lock between processes, which the system takes back from one that dies."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_WITHOUT = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""What a file system says that has no locks."""


class Taken(Exception):
    """Another process holds the lock, and the caller's `waiting` does not want to wait."""


@contextlib.contextmanager
def lock(path: Path, waiting: Callable[[], None]) -> Iterator[bool]:
    """Hold the lock that a file stands for; the file is there only while somebody wants it.

    Gives False on a file system that has no locks: others may hold it, too.

    Args:
        path: the file, in a folder that exists.
        waiting: called once if another process holds it; what it raises ends the wait.
    """
    handle, alone = _acquire(path, waiting)
    try:
        yield alone
    finally:
        # Gone before it is released: who opened it meanwhile sees that it is no longer the one at `path`.
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(handle)


def _acquire(path: Path, waiting: Callable[[], None]) -> tuple[int, bool]:
    told = False
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not _try(handle):
                if not told:
                    told = True
                    waiting()
                _wait(handle)
            if _is_at(handle, path):
                return handle, True
        except OSError as error:
            if error.errno in _WITHOUT:
                return handle, False
            os.close(handle)
            raise
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


if sys.platform == "win32":
    import msvcrt

    def _try(handle: int) -> bool:
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def _wait(handle: int) -> None:
        while not _try(handle):
            time.sleep(0.2)

else:
    import fcntl

    def _try(handle: int) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _wait(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX)
