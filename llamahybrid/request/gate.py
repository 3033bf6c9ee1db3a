"""One request at a time: tickets, turns, requests that make room for another, and cancelling.

A request holds a *ticket* from its first step to its end, never a thread: a pool's thread serves many users,
an ident is given out again after its thread died, and a finaliser runs anywhere. A *step* is one stretch of
work for a ticket; nothing else happens on the context meanwhile. Between its steps a ticket stays *current*
until it is over. Another one takes its place earlier where the same thread asks for both, or where nobody has
advanced the current one for `PATIENCE` seconds; the old one is then parked, and goes on when it is advanced.

Ctrl-C may come between any two lines. Nothing here trusts that a line after another one is run: who waits
looks again several times a second, a place in the line that nobody renews is void, and a lock that is held by
a thread which is not in `run` is replaced.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from llamahybrid.capi.shim import Stop
from llamahybrid.errors import Busy, LlamaHybridError, ModelClosed, RequestCancelled
from llamahybrid.request.finalisers import in_finaliser
from llamahybrid.request.step_frames import StepFrames
from llamahybrid.request.ticket import Tenant, Ticket, this_thread

PATIENCE = 1.0
"""Seconds after which a request that nobody advances makes room for one that waits."""

POLL = 0.1
"""Seconds after which who waits looks again, whether or not a bell rang."""

PLACE_EXPIRES = 2.0
"""A place in the line that was not renewed for so many seconds is nobody's."""

Result = TypeVar("Result")

logger = logging.getLogger("llamahybrid")


class RequestGate:
    """Lets one request in at a time."""

    def __init__(self, wait: bool | float = True, tenant: Tenant | None = None) -> None:
        """`wait`: True waits for the running request, False raises `Busy` at once, seconds do both."""
        self.wait = wait
        self.patience = PATIENCE
        self.telling = False
        """A user's callback runs inside a step: it is no part of what the step does."""
        self.stop = Stop()
        """Polled by native code while it works for the current request."""
        self._tenant = tenant
        self._work = threading.RLock()
        """Held during a step."""
        self._stepping: Ticket | None = None
        self._current: Ticket | None = None
        self._abandoned: deque[Ticket] = deque()
        """Requests that were given up; whoever comes next ends them."""
        self._line: dict[Ticket, float] = {}
        """Tickets that wait, in order of arrival, and when each last said so."""
        self._bells: list[threading.Lock] = []
        self._closed = self._shut = False
        self._frames = StepFrames()
        self._steps = 0
        self._suspect: tuple[object, ...] = ()
        self._suspected_at = 0.0

    # -- who is in -------------------------------------------------------------------------------

    @property
    def inside(self) -> bool:
        """The calling thread is in a step."""
        return bool(self._work._is_owned())  # type: ignore[attr-defined]

    @property
    def current(self) -> Ticket | None:
        """The request whose state the context holds."""
        return self._current

    @property
    def completing(self) -> bool:
        """The current request is a completion."""
        return self._current is not None and self._current.completing

    @property
    def closed(self) -> bool:
        """No step is made any more."""
        return self._closed

    def nested(self) -> bool:
        """The caller is part of a step; its stack is asked, since an interrupt may have left the lock."""
        if not self.inside:
            return False
        if self.telling:
            raise LlamaHybridError("on_request cannot use its model; do that when it has returned")
        if self._frames.run_in():
            return True
        self._replace_lock()
        return False

    # -- a request -------------------------------------------------------------------------------

    def ticket(self, completing: bool = False, rows: bool = False) -> Ticket:
        """A ticket for a request that has not begun."""
        return Ticket(completing, rows)

    def run(self, ticket: Ticket, work: Callable[..., Result], *args: Any) -> Result:
        """`work(*args)` as a step of `ticket`, once it is its turn; what that returned.

        Raises Busy when another request is in and `wait` does not allow to wait for the first step (later
        ones wait as long as it takes), ModelClosed after `close`, RuntimeError inside a step, and what
        `Tenant.resume` raises.
        """
        if self.inside:
            if self._frames.run_in():
                raise RuntimeError("a request cannot be advanced from inside another one's step")
            self._replace_lock()
        frame = self._frames.enter()
        deadline = None if ticket.thread is not None else self._deadline()
        try:
            while True:
                if self._closed:
                    raise ModelClosed("the model is closed")
                if self._current is not ticket or self._stepping is not None:
                    self._await(ticket, deadline)
                if not self._work.acquire(timeout=POLL):
                    self._heal()
                elif self._take(ticket):
                    break
                else:
                    self._work.release()
            self._line.pop(ticket, None)
            try:
                self._stepping = ticket
                self._steps += 1
                ticket.thread = this_thread()
                return work(*args)
            finally:
                ticket.idle_since = time.monotonic()
                self._stepping = None
        finally:
            if self._stepping is ticket:
                self._stepping = None
            if self.inside:
                self._work.release()
            if self._line:
                self._line.pop(ticket, None)
                if self._current is None:
                    self._ring()
            self._frames.leave(frame)

    def alone(self, work: Callable[..., Result], *args: Any, ticket: Ticket | None = None) -> Result:
        """A single operation (eval, reset, load_state): part of the step it is called in, or its own."""
        if self.nested():
            return work(*args)
        ticket = ticket or self.ticket()
        try:
            result: Result = self.run(ticket, self._only, ticket, work, *args)
            return result
        finally:
            self.abandon(ticket)

    def _only(self, ticket: Ticket, work: Callable[..., Result], *args: Any) -> Result:
        try:
            return work(*args)
        finally:
            self.finish(ticket)

    def finish(self, ticket: Ticket) -> None:
        """A request ends, inside its last step."""
        if not ticket.over:
            ticket.over = True
            self._end(ticket)
        if self._current is ticket:
            self.stop.end()
            self._current = None

    def abandon(self, ticket: Ticket) -> None:
        """A request is given up between two steps, maybe by a finaliser: leave word; tidy up if that is safe.

        Nothing native is done and no lock waited for where the collector runs, or under code of ours.
        """
        if ticket.over or ticket.thread is None:
            ticket.over = True
            return
        ticket.over = True
        self._abandoned.append(ticket)
        self._ring()
        if in_finaliser():
            return
        if not self._closed:
            self._tidy(ticket)
        elif ticket.parked is not None:  # to be told of; what was live `close` has ended itself
            self._end_quietly(ticket)

    def _tidy(self, ticket: Ticket) -> None:
        """End what was given up, if nobody is in: who has just come does it otherwise."""
        if self._stepping is not None or (self._current is not ticket and self._current is not None):
            return
        frame = self._frames.enter()
        try:
            if self._work.acquire(blocking=False):
                self._end_abandoned()
        finally:
            if self.inside:
                self._work.release()
            self._frames.leave(frame)

    # -- cancelling ------------------------------------------------------------------------------

    def cancel(self, ticket: Ticket | None = None) -> None:
        """End this request, or the current one; takes no lock, so that a signal handler may call it."""
        ticket = self._current if ticket is None else ticket
        if ticket is None or ticket.over:
            return
        ticket.cancelled = True
        self.stop.request(ticket.number)  # does nothing where it is not this one that runs

    def check(self) -> None:
        """Raise RequestCancelled if the current request is to end."""
        current = self._current
        if current is not None and current.cancelled:
            raise RequestCancelled("the request was cancelled; ask again to go on from where it stopped")

    def close(self, work: Callable[[], None]) -> None:
        """Let nobody in any more, cancel what runs, and do `work` when its step is over; once.

        Raises RuntimeError inside a step: what it works with cannot be taken from under it.
        """
        if self._shut:
            return
        if self.nested():
            raise RuntimeError("a model cannot be closed from inside one of its own requests")
        self._closed = True
        self.cancel()
        frame = self._frames.enter()
        try:
            while not self._work.acquire(timeout=POLL):
                self._heal()
            current = self._current
            self._end_abandoned()
            if current is not None and not current.over and current.parked is None:
                self.finish(current)
            work()
            self._shut = True
        finally:
            if self.inside:
                self._work.release()
            self._frames.leave(frame)
            self._ring()

    # -- whose turn it is ------------------------------------------------------------------------

    def _take(self, ticket: Ticket) -> bool:
        """Make a ticket the current one, inside the lock; False where it is not its turn after all."""
        current = self._current
        if self._abandoned:
            self._end_abandoned()
            current = self._current
        if current is not ticket:
            if self._closed or not self._may_enter(ticket):
                return False
            self._stepping = ticket  # from here on others are told that it is busy
            if current is not None:
                if current.over:  # given up this very moment
                    self._end_quietly(current)
                elif current.parked is None and self._tenant is not None:
                    self._tenant.park(current)
                self._current = None
            ticket.number = self.stop.begin()
            self._current = ticket
            if ticket.cancelled:
                self.stop.request(ticket.number)
            if ticket.thread is None and self._tenant is not None:
                self._tenant.begin(ticket)
        if ticket.parked is not None:
            self._stepping = ticket
            # an interrupt on the way leaves it parked, and it is resumed again
            if self._tenant is not None:
                self._tenant.resume(ticket)
            ticket.parked = None
        return True

    def _may_enter(self, ticket: Ticket) -> bool:
        """It is this ticket's turn, as far as can be told without the lock."""
        if self._stepping not in (None, ticket):
            return False
        current = self._current
        if current is ticket:
            return True
        now = time.monotonic()
        if current is not None and not current.over:
            if current.thread is this_thread():
                current.idle_since = -self.patience  # its own thread wants something else
            if now - current.idle_since < self.patience:
                return False
        for other, seen in list(self._line.items()):
            if other is ticket:
                break
            if now - seen < PLACE_EXPIRES and not other.over:
                return False
        return True

    def _await(self, ticket: Ticket, deadline: float | None) -> None:
        """Wait in the line until it is a ticket's turn, or the gate closed. Raises Busy at the deadline."""
        if self._may_enter(ticket):
            return
        bell = threading.Lock()
        bell.acquire()
        try:
            self._bells.append(bell)
            since = now = time.monotonic()
            while True:
                self._line[ticket] = now
                if self._closed or self._may_enter(ticket):
                    return
                if deadline is not None and now >= deadline:
                    self._heal()
                    if self._may_enter(ticket):
                        return
                    raise Busy("another request is running on this Llama; wait for it, or pass wait=True")
                bell.acquire(timeout=POLL if deadline is None else min(POLL, deadline - now))
                now = time.monotonic()
                if now - since > self.patience:
                    self._heal()
                    since = now
        finally:
            if bell in self._bells:
                self._bells.remove(bell)

    def _deadline(self) -> float | None:
        if self.wait is True:
            return None
        return time.monotonic() + float(self.wait)

    def _ring(self) -> None:
        """Have everybody who waits look again."""
        for bell in list(self._bells):
            try:
                bell.release()
            except RuntimeError:  # it rings already
                continue

    # -- ends and repairs ------------------------------------------------------------------------

    def _end_abandoned(self) -> None:
        """End the requests that were given up, inside the lock."""
        while self._abandoned:
            ticket = self._abandoned.popleft()
            if self._current is ticket:
                self.stop.end()
                self._current = None
            self._end_quietly(ticket)

    def _end_quietly(self, ticket: Ticket) -> None:
        try:
            self._end(ticket)
        except Exception:  # of the user's callback: not for the request that comes by here
            logger.exception("the end of a request that was given up failed")

    def _end(self, ticket: Ticket) -> None:
        if self._tenant is not None and not ticket.ended:
            ticket.ended = True
            self._tenant.end(ticket)

    def _heal(self) -> None:
        """Replace a lock whose holder is in no step: an interrupt came before it was given back."""
        work, steps = self._work, self._steps
        if work.acquire(blocking=False):  # nobody is in
            try:
                self._stepping = None
            finally:
                work.release()
            return
        owner = re.search(r"owner=(\d+)", repr(work))
        if owner is None or self._frames.run_in(int(owner[1])):
            self._suspect = ()
            return
        # Between the two looks the owner may have left, and somebody come: only one that stays is void.
        suspect, now = (work, owner[1], steps), time.monotonic()
        if self._suspect != suspect:
            self._suspect, self._suspected_at = suspect, now
        elif now - self._suspected_at >= POLL / 2:
            self._replace_lock()

    def _replace_lock(self) -> None:
        self._stepping = None
        self._work = threading.RLock()
        self._ring()
