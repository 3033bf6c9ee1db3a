"""Watchdog: a timeout that runs out without having set a timer each time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf


class Watchdog:
    """Calls a function once a wait has taken too long, and again for each such time that it goes on.

    All waits of a request share a timer: one for each wait takes longer than to send a token.
    """

    def __init__(self, seconds: float, call: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._call = call
        self._since = inf
        self._timer = self._loop.call_later(seconds, self._look)

    def begin(self) -> None:
        """Begin a wait."""
        self._since = self._loop.time()

    def end(self) -> None:
        """End the wait."""
        self._since = inf

    def stop(self) -> None:
        """Call nothing from now on."""
        self._timer.cancel()

    def _look(self) -> None:
        waited = max(0.0, self._loop.time() - self._since)
        if waited >= self._seconds:
            waited = 0.0
            self.begin()
            self._call()
        self._timer = self._loop.call_later(self._seconds - waited, self._look)
