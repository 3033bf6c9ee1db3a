"""The places where a cache keeps state, as the contract of the stores opens, damages and starves them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import pytest

from llamahybrid.prompt_cache import PromptCache
from llamahybrid.prompt_cache.disk import DiskRows
from llamahybrid.prompt_cache.remote import PREFIX, RemoteRows
from tests.lab.integrity import check_integrity
from tests.lab.redis_server import RedisServer

from .asking import files

DEADLINE = 60.0
"""Seconds within which something expected happens, on a slow and busy machine, too."""

Operation = Literal["read", "write", "remove", "clear"]
"""Read a record; write one; remove one, or all."""


class Store:
    """One place; `open` makes another cache on it, as another process would."""

    name = "ram"
    rows_class: type[Any]

    def __init__(self) -> None:
        self.caches: list[PromptCache] = []

    def arguments(self, limit: int | None) -> dict[str, Any]:
        """How a cache is told of this place; `limit`: the bytes that may lie there."""
        raise NotImplementedError

    def open(self, limit: int | None = None, ram_bytes: int = 1 << 24, **more: Any) -> PromptCache:
        """Another cache on this place; those before it have written all that they had to write."""
        for cache in self.caches:
            cache.close()
        self.caches.append(PromptCache(ram_bytes, **{**self.arguments(limit), **more}))
        return self.caches[-1]

    def close(self) -> None:
        """Close all caches, and check what they hold."""
        for cache in self.caches:
            cache.close()
            check_integrity(cache)

    def count(self, cache: PromptCache, counter: str) -> int:
        """A counter of this place, from `stats`."""
        return cache.stats().extra[f"{self.name}_{counter}"]

    def records(self) -> dict[str, bytes]:
        """All records that lie there, by name."""
        raise NotImplementedError

    def at_rest(self) -> bytes:
        """All bytes that lie there, those of rows and of what was removed included."""
        return b""

    def put(self, name: str, raw: bytes) -> None:
        """Replace a record's bytes."""
        raise NotImplementedError

    def damage(self, change: Callable[[bytes], bytes], chosen: Callable[[str], bool] = bool) -> None:
        """Change every record that is chosen by its name."""
        for name, raw in self.records().items():
            if chosen(name):
                self.put(name, change(raw))

    @contextmanager
    def failing(self, operation: Operation, error: BaseException) -> Iterator[list[bytes]]:
        """An operation raises this error in here; the keys that it was asked for."""
        asked: list[bytes] = []

        def fail(_: Any, key: bytes = b"", *__: Any, **___: Any) -> Any:
            asked.append(key)
            raise error

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.rows_class, operation, fail)
            yield asked

    @contextmanager
    def held(self, operation: Operation) -> Iterator[tuple[threading.Event, threading.Event]]:
        """An operation waits after its work; (it got there, let it go on)."""
        met, go_on = threading.Event(), threading.Event()
        real = getattr(self.rows_class, operation)

        def slowly(*arguments: Any, **more: Any) -> Any:
            done = real(*arguments, **more)
            met.set()
            go_on.wait(DEADLINE)
            return done

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.rows_class, operation, slowly)
            try:
                yield met, go_on
            finally:
                go_on.set()
                self.caches[-1].flush()


class MemoryStore(Store):
    """RAM: every `open` is the same cache, which other contexts use."""

    def open(self, limit: int | None = None, ram_bytes: int = 1 << 24, **more: Any) -> PromptCache:
        if not self.caches:
            self.caches.append(PromptCache(limit or ram_bytes, **more))
        return self.caches[0]


class FolderStore(Store):
    """A folder."""

    name = "disk"
    rows_class = DiskRows

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def arguments(self, limit: int | None) -> dict[str, Any]:
        return {"disk_dir": str(self.folder), "disk_bytes": 1 << 30 if limit is None else limit}

    def records(self) -> dict[str, bytes]:
        found = {}
        for path in files(self.folder):
            with suppress(FileNotFoundError):  # the writer removes what is damaged
                found[str(path)] = path.read_bytes()
        return found

    def put(self, name: str, raw: bytes) -> None:
        Path(name).write_bytes(raw)

    def at_rest(self) -> bytes:
        """Read by another process: to close a database's file would end the locks of this one."""
        inside = [str(path) for path in sorted(self.folder.rglob("*")) if path.is_file()]
        code = "import sys; [sys.stdout.buffer.write(open(name, 'rb').read()) for name in sys.argv[1:]]"
        return subprocess.run([sys.executable, "-c", code, *inside], capture_output=True, check=True).stdout


class ServerStore(Store):
    """A Redis server."""

    name = "remote"
    rows_class = RemoteRows

    def __init__(self, server: RedisServer) -> None:
        super().__init__()
        self.server = server

    def arguments(self, limit: int | None) -> dict[str, Any]:
        return {"remote": self.server.url, **({} if limit is None else {"remote_bytes": limit})}

    def records(self) -> dict[str, bytes]:
        client = self.server.client()
        found: dict[str, bytes] = {}
        for name in sorted(client.keys(PREFIX + b"[ar]*")):  # type: ignore[type-var]
            raw = client.get(name)
            if raw is not None:
                found[name.hex()] = raw
        return found

    def put(self, name: str, raw: bytes) -> None:
        self.server.client().set(bytes.fromhex(name), raw)

    def at_rest(self) -> bytes:
        client = self.server.client()
        return b"".join(client.get(name) or b"" for name in client.keys("*"))  # type: ignore[union-attr]
