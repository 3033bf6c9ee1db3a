"""Serving: uvicorn with our timeouts, and a shutdown that lets answers end."""

from __future__ import annotations

import os
import socket
from math import isinf
from typing import Any

import uvicorn
from fastapi import FastAPI

from llamahybrid.server.protocol import protocol
from llamahybrid.server.service import Service

GRACE = 10.0
"""Seconds for answers that were cancelled on shutdown to be sent."""


class Server(uvicorn.Server):
    """uvicorn's, which tells the service when it shuts down."""

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
        http=protocol(
            settings.header_seconds,
            settings.send_seconds,
            service.metrics.refused,
            settings.max_connections,
        ),
        ws="none",
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


def _port(said: str) -> int:
    if not (said.isascii() and said.isdecimal() and int(said) < 1 << 16):
        raise ValueError(f"port: {said!r} is none")
    return int(said)
