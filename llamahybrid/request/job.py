"""Job: one token of an answer that waits for a batch, and how that can fail."""

from __future__ import annotations

from llamahybrid.errors import LlamaHybridError
from llamahybrid.memory.compute_thread import new_bell, ring
from llamahybrid.memory.sequence import LiveSequence
from llamahybrid.request.ticket import Ticket


class BatchLost(LlamaHybridError):
    """A token was not decoded with those of others, or nobody knows; its own request has to see to it."""


class Job:
    """One token of an answer that waits to be decoded."""

    def __init__(self, ticket: Ticket, live: LiveSequence, token: int) -> None:
        self.ticket = ticket
        self.slot = ticket.slot
        self.live = live
        self.token = token
        self.position = live.n
        self.done = False
        self.error: Exception | None = None
        self.bell = new_bell()

    @property
    def stands(self) -> bool:
        """Its request waits for it, and the sequence is still what it was."""
        ticket, live = self.ticket, self.live
        waits = ticket.acts and ticket.slot is self.slot
        return waits and live.n == self.position and not live.state.is_invalid

    @property
    def owed(self) -> bool:
        """It was decoded, and its owner has yet to come for it."""
        return self.ticket.acts and self.live.n == self.position + 1

    def end(self, error: Exception | None = None) -> None:
        """It was decoded, or it cannot be: its owner is told."""
        self.note(error)
        ring(self.bell)

    def note(self, error: Exception | None) -> None:
        """The same; its owner is told later."""
        self.done, self.error = True, error
