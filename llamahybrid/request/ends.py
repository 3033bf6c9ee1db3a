"""Ends: requests that are over are told of once, those that were given up by whoever comes next."""

from __future__ import annotations

import logging
from collections import deque

from llamahybrid.request.seats import Seats
from llamahybrid.request.ticket import Tenant, Ticket

logger = logging.getLogger("llamahybrid")


class Ends:
    """Tells the tenant of each request that is over. All but `leave_word` is called inside a step."""

    def __init__(self, tenant: Tenant, seats: Seats) -> None:
        self._tenant = tenant
        self._seats = seats
        self._abandoned: deque[Ticket] = deque()

    def leave_word(self, ticket: Ticket) -> None:
        """A request was given up between two steps. Takes no lock."""
        self._abandoned.append(ticket)

    def tell(self, ticket: Ticket) -> None:
        """A request is over; what the tenant raises is for its caller."""
        if not ticket.ended:
            ticket.ended = True
            self._tenant.end(ticket)

    def tell_quietly(self, ticket: Ticket) -> None:
        """The same of one that was given up: what is raised is not for the request that comes by here."""
        try:
            self.tell(ticket)
        except Exception:  # of the user's callback
            logger.exception("the end of a request that was given up failed")

    def tell_of_abandoned(self) -> None:
        """End the requests that were given up."""
        while self._abandoned:
            self.end_seated(self._abandoned.popleft())

    def end_seated(self, ticket: Ticket) -> None:
        """End a request that was given up, where it is seated."""
        if self._seats.slots > 1 and ticket in self._seats:
            self._tenant.switch(ticket)
        self._seats.leave(ticket)
        self.tell_quietly(ticket)
