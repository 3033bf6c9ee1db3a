"""Seats: the requests that are in, which of them makes its step, and who has to make room.

A request is seated from its first step to its end, unless another takes its place while nobody advances it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from llamahybrid.capi.shim import Stop
from llamahybrid.request.ticket import Ticket, this_thread

PATIENCE = 1.0
"""Seconds after which a request that nobody advances makes room for one that waits."""


class Seats:
    """As many requests as there are slots, in the order that they came in."""

    def __init__(self) -> None:
        self.slots = 1
        """How many may be in at a time."""
        self.patience = PATIENCE
        self.stop = Stop()
        """Polled by native code while it works for the current request."""
        self.current: Ticket | None = None
        """Who made the last step, if that request is not over."""
        self._seated: list[Ticket] = []

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._seated)

    def __contains__(self, ticket: object) -> bool:
        return ticket in self._seated

    def only(self, ticket: Ticket) -> bool:
        """This ticket sits alone."""
        return self._seated == [ticket]

    @property
    def free(self) -> bool:
        """Not all are taken."""
        return len(self._seated) < self.slots

    def fits(self, ticket: Ticket) -> bool:
        """There is one for this ticket; one that needs the whole context sits alone."""
        return len(self._seated) < (1 if ticket.whole else self.slots)

    def has_room(self, ticket: Ticket) -> bool:
        """There is one for this ticket, or somebody can make room."""
        alone = any(t.whole and not t.over for t in list(self._seated))
        return (self.fits(ticket) and not alone) or self.victim(ticket) is not None

    def take(self, ticket: Ticket) -> None:
        """A ticket comes in."""
        self._seated.append(ticket)

    def leave(self, ticket: Ticket) -> None:
        """It is out, if it was in."""
        if ticket in self._seated:
            self._seated.remove(ticket)
        if self.current is ticket:
            self.stop.end()
            self.current = None

    def switch(self, ticket: Ticket) -> None:
        """It is this one's step; a cancel that came before ends what native code begins for it."""
        if self.current is not ticket:
            ticket.number = self.stop.begin()
            self.current = ticket
            if ticket.cancelled:
                self.stop.request(ticket.number)

    def idle(self) -> Ticket | None:
        """Who is over, or has been advanced by nobody for longest, and for `patience` seconds."""
        now = time.monotonic()
        idle = [t for t in self._seated if not t.inside and (t.over or now - t.idle_since >= self.patience)]
        return min(idle, key=lambda t: (not t.over, t.idle_since), default=None)

    def victim(self, ticket: Ticket) -> Ticket | None:
        """Who has to leave before this one comes in; None where it fits in, or nobody can."""
        if self.fits(ticket):
            return None
        for other in self._seated:
            if other.thread is this_thread() and not other.inside:
                other.idle_since = -self.patience  # its own thread wants something else
        return self.idle()
