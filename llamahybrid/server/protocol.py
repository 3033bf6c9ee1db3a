"""uvicorn's HTTP protocol, which does not wait for ever for a request's headers."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


def protocol(header_seconds: float) -> type[H11Protocol]:
    """A protocol class that closes connections whose headers take longer."""

    class Impatient(H11Protocol):
        """uvicorn has a timeout for a connection that says nothing after an answer, and for no other."""

        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop()
            elif self._late is None:  # the first bytes of another request
                self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

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
                self.transport.abort()

    return Impatient
