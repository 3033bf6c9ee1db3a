"""Write files atomically, and results without the user's home folder in them."""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def write_json(path: Path, data: Any) -> None:
    """Write plain data as JSON, `without_home`, atomically. Raises OSError."""
    text = json.dumps(without_home(data), indent=1) + "\n"
    mask = os.umask(0)
    os.umask(mask)
    write_whole(path, text.encode("utf-8"), 0o666 & ~mask)


def write_so_far(path: Path, write: Callable[[Path], None]) -> None:
    """Call `write(path)` for an intermediate result: only for a regular file, and errors are ignored."""
    if not path.exists() or path.is_file():
        with suppress(OSError):
            write(path)


def require_writable(path: Path) -> None:
    """Raise OSError for a file that cannot be written, before a long run instead of after it."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():  # /dev/stdout
        return
    folder = path.resolve().parent
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        said = f"nothing can be written there: {error.strerror}"
        raise OSError(error.errno, said, str(folder)) from error


def without_home(data: Any) -> Any:
    """Replace the user's home folder by `~` in all texts of plain data."""
    home = str(Path.home())
    if len(home) < 2:
        return data
    named = re.compile(rf"{re.escape(home)}(?![\w.-])")

    def shown(value: Any) -> Any:
        if isinstance(value, str):
            return named.sub("~", value)
        if isinstance(value, dict):
            return {shown(key): shown(each) for key, each in value.items()}
        return [shown(each) for each in value] if isinstance(value, (list, tuple)) else value

    return shown(data)


def open_alone(path: Path) -> TextIO:
    """Open a file for writing without truncation, under a lock. Raises OSError, also if it is locked."""
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "w", encoding="utf-8")
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise OSError(error.errno, "another process writes to it", str(path)) from error
        except OSError:  # a file system without locks
            pass
    return file


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Names of files in a report: the shortest ends of their paths that differ.

    Raises ValueError for a file that is given twice.
    """
    whole = [path.absolute().parts for path in paths]
    for length in range(1, 1 + max(map(len, whole), default=0)):
        names = ["/".join(parts[-length:]) for parts in whole]
        if len(set(names)) == len(names):
            return names
    if whole:
        twice = next(path for path, parts in zip(paths, whole, strict=True) if whole.count(parts) > 1)
        raise ValueError(f"{twice} is given twice")
    return []


def printable(text: str) -> str:
    """Replace control characters, which XML cannot hold, by spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def write_whole(path: Path, data: bytes, mode: int | None = None) -> None:
    """Write a file atomically: the old content stays until the new one is complete.

    A link stays, and its file is written; a device or pipe is written into. `mode`: None: readable by the
    owner alone. Raises OSError.
    """
    if path.exists() and not path.is_file():  # /dev/stdout
        path.write_bytes(data)
        return
    path = path.resolve()
    descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        if mode is not None:
            os.chmod(part, mode)
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
