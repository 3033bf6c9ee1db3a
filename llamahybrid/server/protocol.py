"""uvicorn's HTTP protocol, which waits for ever neither for a request's headers nor for a reader.

A client that has shut down its sending side gets its answer, too (`nc -N`, some proxies).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from llamahybrid.server.errors import later

BEGINNING = b"HTTP/1.1 "
"""Of every answer, whatever its status."""

LOOK_SECONDS = 0.1
"""Between two looks at whether a client that sends nothing more has left."""


class Begun:
    """A transport that has sent the first bytes of an answer before there was one."""

    def __init__(self, transport: Any, sent: int) -> None:
        """`sent`: bytes of the answer's beginning; -1: all, and maybe more."""
        self._transport = transport
        self._sent = sent
        self.due = 0
        """Looks after which the next byte is sent."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def begin(self) -> None:
        """Send another of those bytes, if one is left."""
        if 0 <= self._sent < len(BEGINNING):
            self._transport.write(BEGINNING[self._sent : self._sent + 1])
            self._sent += 1

    def write(self, data: bytes) -> None:
        """Send all but what was sent."""
        self._transport.write(data[max(0, self._sent) :])
        self._sent = -1


def protocol(
    header_seconds: float,
    send_seconds: float,
    refused: Callable[[str], None] = lambda why: None,
    most: int | None = None,
) -> type[H11Protocol]:
    """A protocol class that closes connections whose headers, or whose reading, take longer.

    `refused` is told why one was closed: "headers" or "reader". Beyond `most` connections requests get 503,
    and `refused` is told "connections".
    """

    async def crowded(scope: Scope, receive: Receive, send: Send) -> None:
        refusal = later("this server has too many connections; ask again later", 1)
        refusal.headers["Connection"] = "close"
        refused("connections")
        await refusal.response()(scope, receive, send)

    class Impatient(H11Protocol):
        """uvicorn has a timeout for a connection that says nothing after an answer, and for no other."""

        _late: asyncio.TimerHandle | None = None
        _unread: asyncio.TimerHandle | None = None
        _half_closed = False
        """The client sends nothing more."""
        _left = 0
        """Bytes that waited to be taken when `_unread` was set."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if most is not None and len(self.connections) > most:
                self.app = crowded
            self._wait()

        def data_received(self, data: bytes) -> None:
            if not self.flow.write_paused:  # it goes on, and what it did not take yet is little
                self._stop_waiting_for_reader()
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop()
            elif self._late is None:  # the first bytes of another request
                self._wait()

        def pause_writing(self) -> None:
            """More waits to be taken than the transport likes to hold; the app waits from now on."""
            super().pause_writing()
            self._wait_for_reader()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop_waiting_for_reader()

        def on_response_complete(self) -> None:
            """What is left of the answer would wait for ever: closing a connection sends it first."""
            super().on_response_complete()
            if self._half_closed and (self.cycle.response_complete or self.cycle.more_body):
                self.transport.close()
            if self._unread is None and self.transport.get_write_buffer_size():
                self._wait_for_reader()

        def eof_received(self) -> bool:  # type: ignore[override]
            """Keep the connection where an answer is due."""
            super().eof_received()
            cycle = self.cycle
            if cycle is None or cycle.response_complete or cycle.more_body or self.scheme == "https":
                return False
            self._half_closed = True
            begun = Begun(self.transport, -1 if cycle.response_started else 0)
            cycle.transport = begun  # type: ignore[assignment]
            self._look(begun, 0)
            return True

        def _look(self, begun: Begun, number: int) -> None:
            """Close the connection of a client that has left altogether.

            The last packet of either is the same. One that has left resets the connection when something is
            sent, so now and then a byte of the answer's beginning is.
            """
            if self.transport.is_closing():
                return
            if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.transport.abort()
                return
            if number == begun.due:
                begun.begin()
                begun.due = max(1, 4 * number)
            self.loop.call_later(LOOK_SECONDS, partial(self._look, begun, number + 1))

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)
            self._stop_waiting_for_reader()

        def _wait(self) -> None:
            self._late = self.loop.call_later(header_seconds, self._give_up)

        def _stop(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

        def _give_up(self) -> None:
            self._late = None
            if not self.transport.is_closing():
                self.logger.warning("a connection sent no request within %g s", header_seconds)
                refused("headers")
                self.transport.abort()

        def _wait_for_reader(self) -> None:
            self._stop_waiting_for_reader()
            self._left = self.transport.get_write_buffer_size()
            self._unread = self.loop.call_later(send_seconds, self._give_reader_up)

        def _stop_waiting_for_reader(self) -> None:
            if self._unread is not None:
                self._unread.cancel()
                self._unread = None

        def _give_reader_up(self) -> None:
            self._unread = None
            left = self.transport.get_write_buffer_size()
            if 0 < left < self._left:
                self._wait_for_reader()
            elif left:  # also of one that is closing: it never will
                self.logger.warning("a client took nothing of its answer for %g s", send_seconds)
                refused("reader")
                self.transport.abort()

    return Impatient
