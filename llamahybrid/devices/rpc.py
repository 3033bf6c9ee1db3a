"""Connections to RPC servers, tried in a child process first.

llama.cpp ends the process if a server is unreachable, refuses, or has another protocol version, and waits for
ever if it does not answer: a server handles one client at a time, and others wait.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import ref

from llamahybrid.devices import ggml
from llamahybrid.devices.ggml import Device
from llamahybrid.errors import DeviceError, DeviceLost

SECONDS = 30.0
"""Time limit for a server's answer."""
_MOST = 16  # GGML_RPC_MAX_SERVERS of ggml-rpc.h

# Connections stay open to the end, so that one server under two names fails: it never answers the second one.
_TRY = """
import os, sys
from llamahybrid.devices import ggml
ggml.files = lambda: sys.argv[1].split(os.pathsep)
for endpoint in sys.argv[2:]:
    ggml.start(ggml.add_server(endpoint)[0])
    print(endpoint, flush=True)
"""

_lock = threading.RLock()
_users: dict[str, list[tuple[ref[Any], Watch]]] = {}
"""Models on each server, as llama_cpp's objects."""


class Watch:
    """Detects lost connections of one model."""

    def __init__(self, servers: Sequence[str]) -> None:
        counts = ((server, ggml.losses(server)) for server in servers)
        self._before = {server: count for server, count in counts if count is not None}

    @property
    def counting(self) -> bool:
        """The library counts lost connections; otherwise a loss ends the process."""
        return bool(self._before)

    @property
    def lost(self) -> str:
        """A server whose connection was lost, for good as far as this model is concerned; empty: none."""
        return next((server for server in self._before if not self.stands(server)), "")

    def stands(self, server: str) -> bool:
        """No loss of the connection to this server is known."""
        before = self._before.get(server)
        return before is None or ggml.losses(server) == before

    def check(self) -> None:
        """Raise DeviceLost if a connection was lost."""
        if server := self.lost:
            raise DeviceLost(
                f"the RPC server {server} is gone, and with it layers and states of the model; when it "
                "is back, open the model again, with prompt_cache=llm.prompt_cache: the next request starts "
                "from what was stored"
            )


def endpoints(servers: str | Iterable[str]) -> tuple[str, ...]:
    """Split ``host:port,host:port`` into distinct addresses, in order.

    Raises:
        ValueError: an address is invalid, or there are too many.
    """
    given = servers.split(",") if isinstance(servers, str) else servers
    found = tuple(dict.fromkeys(each.strip() for each in given if each.strip()))
    for each in found:
        host, _, port = each.partition(":")
        if not host or any(letter.isspace() for letter in host) or not port.isascii() or not port.isdigit():
            raise ValueError(f"{each!r} is no RPC server; one is host:port, as 192.168.0.2:50052")
        if not 0 < int(port) < 65536:
            raise ValueError(f"{each!r}: ports go from 1 to 65535")
    if len(found) > _MOST:
        raise ValueError(f"{len(found)} RPC servers; llama.cpp takes {_MOST}")
    return found


def connect(servers: Sequence[str], seconds: float = SECONDS) -> list[Device]:
    """Connect to servers (of `endpoints`) and return their devices.

    Raises:
        DeviceError: the library has no RPC backend, or a server does not answer in time.
    """
    ggml.require_rpc()
    with _lock:
        for server in filter(_connected, servers):
            ggml.ask(server)  # detects a loss now, before the model is opened
        if new := [server for server in servers if not _connected(server)]:
            _try(new, seconds)
        return [device for server in servers for device in ggml.add_server(server)]


def used_by(watch: Watch, servers: Sequence[str], model: Any) -> None:
    """Register a model (llama_cpp's `LlamaModel`) as a user of these servers while it is open."""
    with _lock:
        for server in servers:
            _users.setdefault(server, []).append((ref(model), watch))


def _connected(server: str) -> bool:
    """Tell whether an open model of this process has a connection that the next model can share."""
    users = _users[server] = [
        (user, watch)
        for user, watch in _users.get(server, ())
        if getattr(user(), "model", None) is not None and watch.stands(server)
    ]
    return bool(users)


def _try(servers: Sequence[str], seconds: float) -> None:
    command = [sys.executable, "-c", _TRY, os.pathsep.join(map(str, ggml.files())), *servers]
    try:
        run = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            errors="replace",
        )
        said, why = run.stdout, ""
    except subprocess.TimeoutExpired as error:
        said, why = _decoded(error.stdout), "in time; it serves one program at a time, under one name"
    answered = said.split()
    if missing := next((server for server in servers if server not in answered), None):
        reason = f"does not answer {why}" if why else f"cannot be used: {_last_words(run.stderr)}"
        raise DeviceError(
            f"the RPC server {missing} {reason}; `llamahybrid rpc-server` on that machine starts one"
        )


def _decoded(output: Any) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _last_words(errors: str) -> str:
    """The library's last error message."""
    lines = [line.strip() for line in errors.splitlines()]
    telling = [line for line in lines if "onnect" in line or "RPC" in line or "esolve" in line]
    return telling[0].rpartition("cpp:")[2].partition(": ")[2] or telling[0] if telling else "no reason given"
