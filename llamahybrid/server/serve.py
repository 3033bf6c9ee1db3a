"""uvicorn with our settings, and a shutdown that lets running answers end."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import isinf
from typing import Any

import uvicorn
from fastapi import FastAPI

from llamahybrid.server.log import flush
from llamahybrid.server.service import Service

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

KEEP_ALIVE = 75
"""Seconds that an idle connection stays open, nginx's default: longer than clients keep one (httpx 5 s, as
uvicorn), which otherwise may send a request while the server closes the connection."""

SPARE_FILES = 256
"""Open files beside those of connections: models, the folders of caches, modules."""

GRACE = 10.0
"""Seconds for answers that were cancelled on shutdown to be sent."""


class Server(uvicorn.Server):
    """uvicorn's server, which drains the service at shutdown."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture uvicorn's signals, and SIGHUP: a closed terminal ends the server in order, too.

        An ignored SIGHUP, as under nohup, stays ignored.
        """
        before: Any = signal.SIG_IGN
        hangup = getattr(signal, "SIGHUP", None)
        main = threading.current_thread() is threading.main_thread()
        if main and hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:
            before = signal.signal(hangup, self.handle_exit)
        try:
            with super().capture_signals():
                try:
                    yield
                finally:
                    flush()  # uvicorn raises a captured signal again, which ends the process
        finally:
            if hangup is not None and before is not signal.SIG_IGN:
                signal.signal(hangup, before)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; Linux closes connections whose client reads nothing for twice `send_seconds`.

        By then the answer has ended and was counted. uvicorn would wait for ever to send the rest (tcp(7),
        TCP_USER_TIMEOUT).
        """
        service: Service = self.config.app.state.service  # type: ignore[union-attr]
        allow_files(service.settings.max_connections + SPARE_FILES)
        await super().startup(sockets)
        if (option := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:
            milliseconds = int(min(2000 * service.settings.send_seconds, 2**31 - 1))
            for server in self.servers if self.started else ():
                for each in server.sockets:
                    if each.family in (socket.AF_INET, socket.AF_INET6):
                        each.setsockopt(socket.IPPROTO_TCP, option, milliseconds)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests and give running ones their time; the lifespan then closes the models."""
        service: Service = self.config.app.state.service  # type: ignore[union-attr]
        service.drain(service.settings.shutdown_seconds)
        await super().shutdown(sockets)
        if self.force_exit:  # a second Ctrl-C: wait for threads only
            await service.stop()
            await self.lifespan.shutdown()  # uvicorn would cancel it with a traceback


def server_of(app: FastAPI, **more: Any) -> Server:
    """Return a server for an app; host and port by HOST and PORT, or by the settings.

    `more`: further options of uvicorn. Raises ValueError for a wrong port, and for unreadable certificates.
    """
    service: Service = app.state.service
    settings = service.settings
    grace = settings.shutdown_seconds + GRACE
    config = uvicorn.Config(
        app,
        host=os.getenv("HOST", settings.host),
        port=_port(os.getenv("PORT", str(settings.port))),
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
        http="h11",  # its headers are bounded, httptools' are not
        ws="none",
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=None if isinf(grace) else int(grace),
        server_header=False,
        **more,
    )
    if settings.ssl_keyfile and not settings.ssl_certfile:
        raise ValueError("ssl_keyfile goes with an ssl_certfile")
    try:
        config.load()  # early, and with the names of files in the error
    except OSError as error:
        raise ValueError(f"ssl_certfile and ssl_keyfile cannot be used: {error}") from error
    return Server(config)


def allow_files(wanted: int) -> None:
    """Raise the soft limit of open files, 1024 on many systems, to this number or the hard limit.

    uvloop resets connections for which there is no file: their clients would get no response.
    """
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if resource.RLIM_INFINITY != soft < most:
        with suppress(OSError, ValueError):  # the system has a limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def require_free(host: str, port: int) -> None:
    """Raise OSError for an address in use, before a model takes a minute to open."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol_number, _, address in found:
            with socket.socket(family, kind, protocol_number) as made:
                if os.name == "posix":
                    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                made.bind(address)
    except OSError as error:
        raise OSError(f"cannot listen at {host}:{port}: {error.strerror or error}") from error


def _port(said: str) -> int:
    if not (said.isascii() and said.isdecimal() and int(said) < 1 << 16):
        raise ValueError(f"port {said!r} is no number from 0 to 65535")
    return int(said)
