"""The storage under `diskcache`: rows in its database, records in files that are named after their keys."""

from __future__ import annotations

import os
import re
import sqlite3
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import diskcache
from diskcache.core import MODE_BINARY, MODE_RAW, UNKNOWN

from llamahybrid.prompt_cache.folder import check_owner

SHARDS = 256
"""Folders for files, named by the first two letters of their names."""

NAME = re.compile(r"[0-9a-f]{2}/[0-9a-f]{30}-[ar]-[0-9a-f]{8}\.val")
"""Hash and letter of a key, and something that makes it unique."""


def key_of(name: str) -> bytes:
    """The key after which a file is named."""
    return name[34].encode() + bytes.fromhex(name[:2] + name[3:33])


class BytesDisk(diskcache.Disk):  # type: ignore[misc]
    """Keys and values are bytes; records lie in files. Nothing is pickled or unpickled (CVE-2025-69872)."""

    def __init__(self, directory: str, **settings: Any) -> None:
        super().__init__(directory, **settings)
        self.removed = 0
        """Files that were removed."""

    def put(self, key: object) -> tuple[object, bool]:
        """A key for the database. Raises TypeError for what is not bytes."""
        if not isinstance(key, bytes):
            raise TypeError("a key is bytes")
        return sqlite3.Binary(key), True

    def get(self, key: object, raw: object) -> bytes:
        """A key from the database; b"" for what is none of ours."""
        return bytes(key) if isinstance(key, bytes | memoryview) else b""

    def filename(self, key: object = UNKNOWN, value: object = UNKNOWN) -> tuple[str, str]:
        """A new name for a record's file, see `NAME`."""
        assert isinstance(key, bytes)
        name = key[1:].hex()
        short = f"{name[:2]}/{name[2:]}-{key[:1].decode()}-{os.urandom(4).hex()}.val"
        return short, os.path.join(self._directory, short)

    def store(self, value: Any, read: object, key: object = UNKNOWN) -> tuple[int, int, str | None, object]:
        """Bytes into the database, the parts of a record into a file."""
        if isinstance(value, bytes):
            return 0, MODE_RAW, None, sqlite3.Binary(value)
        name, path = self.filename(key, value)
        try:
            return self._written(path, value), MODE_BINARY, name, None
        except BaseException:
            self.remove(name)
            raise

    def _written(self, path: str, parts: Sequence[bytes | memoryview]) -> int:
        folder = os.path.dirname(path)
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        check_owner(Path(folder))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        with open(os.open(path, flags, 0o600), "wb") as out:
            return sum(map(out.write, parts))

    def fetch(self, mode: int, filename: str | None, value: object, read: object) -> bytes | str:
        """A row's bytes, or the path of a record's file. Raises OSError for a row that is none of ours, which
        is a missing one for diskcache."""
        if mode == MODE_RAW and isinstance(value, bytes):
            return value
        if mode != MODE_BINARY or not NAME.fullmatch(filename or ""):
            raise OSError("a row that names no file of ours")
        return os.path.join(self._directory, str(filename))

    def remove(self, file_path: str) -> None:
        """Remove a record's file, if that can be: its row is gone."""
        with suppress(OSError):
            self.unlink(file_path)

    def unlink(self, name: str) -> None:
        """Remove a record's file; what has another name, or is no file of a folder here, is left alone.

        Raises OSError where it stays."""
        path = os.path.join(self._directory, name or "")
        with suppress(FileNotFoundError):
            if (
                NAME.fullmatch(name or "")
                and stat.S_ISREG(os.lstat(path).st_mode)
                and stat.S_ISDIR(os.lstat(os.path.dirname(path)).st_mode)
            ):
                os.unlink(path)
                self.removed += 1
