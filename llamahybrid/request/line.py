"""Line: who waits for a place, in order of arrival, and the bells that have them look again.

A thread that was interrupted may never come back: its place is nobody's when it was not renewed for a while,
and nobody who waits trusts a bell alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llamahybrid.errors import Busy, RequestCancelled
from llamahybrid.memory.compute_thread import POLL as POLL
from llamahybrid.memory.compute_thread import new_bell, ring
from llamahybrid.request.ticket import Ticket

PLACE_EXPIRES = 2.0
"""A place in the line that was not renewed for so many seconds is nobody's."""


class Line:
    """Tickets that wait."""

    def __init__(self) -> None:
        self._places: dict[Ticket, float] = {}
        """When each last said that it waits."""
        self._bells: list[threading.Lock] = []

    def __len__(self) -> int:
        return len(self._places)

    def renew(self, ticket: Ticket) -> None:
        """A ticket waits, at its place or at the end."""
        self._places[ticket] = time.monotonic()

    def leave(self, ticket: Ticket) -> None:
        """It waits no more."""
        self._places.pop(ticket, None)

    def is_first(self, ticket: Ticket) -> bool:
        """Nobody came before it, in the line or not."""
        now = time.monotonic()
        for other, seen in list(self._places.items()):
            if other is ticket:
                break
            if now - seen < PLACE_EXPIRES and not other.over:
                return False
        return True

    def wait(
        self,
        ticket: Ticket,
        ready: Callable[[], bool],
        heal: Callable[[], object],
        *,
        every: float,
        deadline: float | None,
    ) -> None:
        """Wait at a ticket's place until `ready()`; `heal` is called `every` so many seconds.

        Raises Busy at the deadline, by `time.monotonic`, and RequestCancelled for one that is unwanted.
        """
        if ready():
            return
        with self.bell() as wait:
            since = now = time.monotonic()
            while True:
                if not ticket.too_early:  # or the one that it comes after would stand behind it
                    self.renew(ticket)
                if ready():
                    return
                if ticket.unwanted:
                    raise RequestCancelled("the request was given up while it waited")
                if deadline is not None and now >= deadline:
                    heal()
                    if ready():
                        return
                    raise Busy("another request is running on this Llama; wait for it, or pass wait=True")
                wait(POLL if deadline is None else min(POLL, deadline - now))
                now = time.monotonic()
                if now - since > every:
                    heal()
                    since = now

    @contextmanager
    def bell(self) -> Iterator[Callable[[float], object]]:
        """`wait(seconds)`: until somebody rings, or so long."""
        bell = new_bell()
        try:
            self._bells.append(bell)
            yield lambda seconds: bell.acquire(timeout=seconds)
        finally:
            if bell in self._bells:
                self._bells.remove(bell)

    def ring(self) -> None:
        """Have everybody who waits look again."""
        for bell in list(self._bells):
            ring(bell)
