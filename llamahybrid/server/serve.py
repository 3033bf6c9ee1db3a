"""uvicorn with our settings, and a shutdown that lets running answers end."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import isinf
from typing import Any

import uvicorn
from fastapi import FastAPI

from llamahybrid.server.log import flush
from llamahybrid.server.service import Service

GRACE = 10.0
"""Seconds for answers that were cancelled on shutdown to be sent."""


class Server(uvicorn.Server):
    """uvicorn's, which tells the service when it shuts down."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's, and SIGHUP: a terminal that is closed ends the server in order, too.

        One that is ignored, as under nohup, stays so.
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
                    flush()  # a signal that was caught is raised again, and ends the process
        finally:
            if hangup is not None and before is not signal.SIG_IGN:
                signal.signal(hangup, before)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let nobody in, give what runs its time, then end it; the app's own end closes the models."""
        service: Service = self.config.app.state.service  # type: ignore[union-attr]
        service.drain(service.settings.shutdown_seconds)
        await super().shutdown(sockets)
        if self.force_exit:  # a second Ctrl-C: nothing is waited for, but no thread is left behind
            await service.stop()
            await self.lifespan.shutdown()  # uvicorn leaves it to be cancelled, which prints a traceback


def server_of(app: FastAPI, **more: Any) -> Server:
    """A server for an app, that `run` starts; host and port from its settings, or HOST and PORT.

    `more`: what else uvicorn takes. Raises ValueError for no port, and for certificates that cannot be read.
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
        ws="none",
        limit_concurrency=settings.max_connections + 1,  # uvicorn refuses at this number
        timeout_graceful_shutdown=None if isinf(grace) else int(grace),
        server_header=False,
        **more,
    )
    if settings.ssl_keyfile and not settings.ssl_certfile:
        raise ValueError("ssl_keyfile goes with an ssl_certfile")
    try:
        config.load()  # `run` would, once the model is open, and tells no file's name
    except OSError as error:
        raise ValueError(f"ssl_certfile and ssl_keyfile cannot be used: {error}") from error
    return Server(config)


def require_free(host: str, port: int) -> None:
    """Raise OSError for an address that cannot be listened at: a model may take a minute to open."""
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
        raise ValueError(f"port: {said!r} is none")
    return int(said)
