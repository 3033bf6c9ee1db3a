"""Folders of the cache: made so that only their owner writes, filled aside, put in place in one step."""

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

from llamahybrid.engine.lock import Taken, lock
from llamahybrid.errors import EngineError

_PART = ".part-"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM)
_ELSEWHERE = "set LLAMAHYBRID_CACHE_DIR to a folder"


def folder(path: Path) -> Path:
    """Make a folder and those above it that are missing, writable by their owner alone under any umask."""
    if not path.is_dir():
        folder(path.parent)
        path.mkdir(mode=0o755, exist_ok=True)
    return path


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """Turn an OSError into one that says what to do.

    Raises:
        EngineError: a file could not be read or written.
    """
    try:
        yield
    except OSError as error:
        advice = "check the disk, and LLAMAHYBRID_CACHE_DIR"
        if error.errno in _FULL:
            advice = f"the disk is full: free a few GiB, or {_ELSEWHERE} on another disk"
        elif error.errno in _CLOSED:
            advice = f"it cannot be written: {_ELSEWHERE} of your own"
        raise EngineError(f"{error}; {advice}") from error


@contextlib.contextmanager
def scratch(parent: Path, name: str = "") -> Iterator[Path]:
    """A private folder beside the final place, so that the last step is one atomic rename."""
    prefix = f"{_PART}{name}-" if name else _PART
    with tempfile.TemporaryDirectory(
        prefix=prefix, dir=folder(parent), ignore_cleanup_errors=True
    ) as temporary:
        yield Path(temporary)


@contextlib.contextmanager
def workshop(home: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """A private folder to make `home` in, while no other process makes the same.

    Whoever comes second waits, so look once more whether `home` is there. What a killed process left of its
    own folder is removed first.

    Args:
        home: the final place.
        waiting: called when another process is at it.

    Raises:
        EngineError: instead of any OSError.
    """
    with disk_errors(), lock(_lock(home), waiting) as alone:
        if alone:
            _sweep(home)
        with scratch(home.parent, home.name) as part:
            yield part


def install(new: Path, home: Path, aside: Path) -> None:
    """Move the folder `new` to `home`; what is there goes to `aside`, and back if that fails.

    Raises:
        OSError: the disk says no.
    """
    seal(new)
    replaced = home.exists()
    if replaced:
        os.replace(home, aside)
    try:
        os.replace(new, home)
    except OSError:
        if replaced:
            os.replace(aside, home)
        raise


def seal(tree: Path) -> None:
    """Take the right to write from all but the owner, and wait until all of a folder is on the disk.

    A rename that outlives a power cut must not name files that do not.
    """
    for path in (*tree.rglob("*"), tree):
        if path.is_symlink() or (sys.platform == "win32" and path.is_dir()):
            continue
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o022)
        handle = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _lock(home: Path) -> Path:
    return folder(home.parents[1] / "locks") / f"{home.parent.name}-{home.name}.lock"


def _sweep(home: Path) -> None:
    """Remove what processes that were killed left beside `home`, whose lock is held."""
    for part in folder(home.parent).glob(f"{_PART}*-*"):
        name = part.name.removeprefix(_PART).rpartition("-")[0]
        if name == home.name:
            shutil.rmtree(part, ignore_errors=True)
        elif name:
            with contextlib.suppress(Taken), lock(_lock(home.with_name(name)), _refuse):  # is it dead?
                shutil.rmtree(part, ignore_errors=True)


def _refuse() -> None:
    raise Taken
