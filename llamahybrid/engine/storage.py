"""Folders of the cache: built aside under a lock, then renamed into place; each is whole or absent."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from llamahybrid.errors import DISK_FULL, EngineError

_PART = ".part-"
_CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM)
_LOCKLESS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)
_ELSEWHERE = "set LLAMAHYBRID_CACHE_DIR to a folder"


def folder(path: Path) -> Path:
    """Create a folder and its missing parents, writable by their owner alone under any umask."""
    if not path.is_dir():
        folder(path.parent)
        path.mkdir(mode=0o755, exist_ok=True)
    return path


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """Turn an OSError into an EngineError that says what to do."""
    try:
        yield
    except OSError as error:
        advice = "check the disk, and LLAMAHYBRID_CACHE_DIR"
        if error.errno in DISK_FULL:
            advice = f"the disk is full: free a few GiB, or {_ELSEWHERE} on another disk"
        elif error.errno in _CLOSED:
            advice = f"it cannot be written: {_ELSEWHERE} of your own"
        elif error.errno in _LOCKLESS:
            advice = f"the file system has no locks: {_ELSEWHERE} on another"
        raise EngineError(f"{error}; {advice}") from error


@contextlib.contextmanager
def scratch(parent: Path, name: str = "") -> Iterator[Path]:
    """A private temporary folder in `parent`, on the same file system as the final place."""
    prefix = f"{_PART}{name}-" if name else _PART
    with tempfile.TemporaryDirectory(
        prefix=prefix, dir=folder(parent), ignore_cleanup_errors=True
    ) as temporary:
        yield Path(temporary)


@contextlib.contextmanager
def locked_build_dir(home: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """A private folder to build `home` in, under a lock between processes.

    After a wait `home` may exist: look again. Folders that killed processes left are removed first.

    Args:
        home: the final place.
        waiting: called once if another process holds the lock.

    Raises:
        EngineError: in place of any OSError.
    """
    with disk_errors():
        lock = _lock(home)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            waiting()
            lock.acquire()
        try:
            _remove_leftovers(home)
            with scratch(home.parent, home.name) as part:
                yield part
        finally:
            lock.release()


def install(new: Path, home: Path, aside: Path) -> None:
    """Move the folder `new` to `home`; a previous `home` goes to `aside`, and back if the move fails.

    Raises:
        OSError: the disk refuses.
    """
    _seal(new)
    replaced = home.exists()
    if replaced:
        os.replace(home, aside)
    try:
        os.replace(new, home)
    except OSError:
        if replaced:
            os.replace(aside, home)
        raise


def _seal(tree: Path) -> None:
    """Make all files writable by their owner alone, and flush them: a rename must not outlive its files."""
    for path in (*tree.rglob("*"), tree):
        if path.is_symlink() or (sys.platform == "win32" and path.is_dir()):
            continue
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o022)
        handle = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _lock(home: Path) -> FileLock:
    """Return the lock of `home`.

    On a file system without flock (ENOSYS), filelock takes a SoftFileLock; the next process on the same
    machine removes that of a killed one.
    """
    return FileLock(folder(home.parents[1] / "locks") / f"{home.parent.name}-{home.name}.lock")


def _remove_leftovers(home: Path) -> None:
    """Remove build folders beside `home` whose processes are dead; the caller holds the lock of `home`."""
    for part in folder(home.parent).glob(f"{_PART}*-*"):
        name = part.name.removeprefix(_PART).rpartition("-")[0]
        if name == home.name:
            shutil.rmtree(part, ignore_errors=True)
        elif name:
            with contextlib.suppress(Timeout), _lock(home.with_name(name)).acquire(timeout=0):
                shutil.rmtree(part, ignore_errors=True)
