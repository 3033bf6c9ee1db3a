"""As many requests at a time as there are slots: tickets, turns, making room for others, and cancelling.

A request holds a *ticket* from its first step to its end, never a thread: a pool's thread serves many users,
an ident is given out again after its thread died, and a finaliser runs anywhere. A *step* is one stretch of
work for a ticket. Nothing else happens on the context meanwhile, but where it steps aside itself, to have a
token decoded together with those of others. Between its steps a ticket stays *seated* until it is over.
Another one takes its place earlier where the same thread asks for both, or where nobody has advanced it for
`PATIENCE` seconds; the old one is then parked, and goes on when it is advanced.

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
from functools import partial
from typing import Any, TypeVar

from llamahybrid.capi.shim import Stop
from llamahybrid.errors import Busy, LlamaHybridError, ModelClosed, RequestCancelled
from llamahybrid.request.finalisers import in_finaliser
from llamahybrid.request.line import Line
from llamahybrid.request.step_frames import StepFrames
from llamahybrid.request.ticket import Tenant, Ticket, this_thread

PATIENCE = 1.0
"""Seconds after which a request that nobody advances makes room for one that waits."""

YIELD_SECONDS = 5e-5
"""So long a thread sleeps that lets others have the lock."""

POLL = 0.1
"""Seconds after which who waits looks again, whether or not a bell rang."""

Result = TypeVar("Result")

logger = logging.getLogger("llamahybrid")


class RequestGate:
    """Lets as many requests in at a time as there are slots."""

    def __init__(self, wait: bool | float = True, tenant: Tenant | None = None) -> None:
        """`wait`: True waits for the running request, False raises `Busy` at once, seconds do both."""
        self.wait = wait
        self.slots = 1
        """How many requests may be in at a time."""
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
        self._seated: list[Ticket] = []
        """Those that are in, in the order that they came in."""
        self._abandoned: deque[Ticket] = deque()
        """Requests that were given up; whoever comes next ends them."""
        self._line = Line()
        self._closed = self._shut = False
        self._arriving: set[int] = set()
        """Threads that are about to take the lock."""
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
        """The request that made the last step, if it is not over: inside a step that very one."""
        return self._current

    @property
    def seated(self) -> list[Ticket]:
        """The requests that are in, oldest first."""
        return list(self._seated)

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
        ones wait as long as it takes), ModelClosed after `close`, RuntimeError inside a step,
        RequestCancelled where it waits and is unwanted, and what `Tenant.resume` raises.
        """
        if self.inside:
            if self._frames.run_in():
                raise RuntimeError("a request cannot be advanced from inside another one's step")
            self._replace_lock()
        self._frames.enter()
        later = ticket.thread is not None or ticket.after is not None
        deadline = None if later else self._deadline()
        try:
            ticket.inside = threading.get_ident()
            while True:
                if self._closed:
                    raise ModelClosed("the model is closed")
                if ticket.unwanted and ticket.thread is None:  # a prompt of another one may take long
                    raise RequestCancelled("the request was given up while it waited")
                if ticket not in self._seated or (self.slots == 1 and self._stepping is not None):
                    self._await(ticket, deadline)
                if self.crowded:
                    time.sleep(YIELD_SECONDS)
                self._arriving.add(threading.get_ident())
                if not self._work.acquire(timeout=POLL):
                    self._heal()
                elif self._take(ticket):
                    break
                else:
                    self._work.release()
            self._arriving.discard(threading.get_ident())
            self._line.leave(ticket)
            try:
                self._stepping = ticket
                self._steps += 1
                ticket.thread = this_thread()
                return work(*args)
            finally:
                ticket.idle_since = time.monotonic()
                self._stepping = None
                if self.slots > 1 and self._tenant is not None:
                    self._tenant.stepped(ticket)
        finally:
            ticket.inside = 0
            self._arriving.discard(threading.get_ident())
            if self._stepping is ticket:
                self._stepping = None
            if self.inside:
                self._work.release()
            if self._line:
                self._line.leave(ticket)
                if len(self._seated) < self.slots:
                    self._line.ring()
            self._frames.leave()

    @property
    def crowded(self) -> bool:
        """Other threads want the lock: who gives it up and takes it again would always be faster."""
        return self.slots > 1 and bool(self._arriving)

    def let_in(self, ticket: Ticket) -> None:
        """Let those who want the lock have it, in the middle of a step."""
        if self.crowded:
            self.step_aside(ticket, partial(time.sleep, YIELD_SECONDS))

    def step_aside(self, ticket: Ticket, wait: Callable[[], object]) -> None:
        """Let others make their steps while this one waits in the middle of its own.

        However `wait` ends, the step goes on only when it has its place back.
        """
        try:
            self._stepping = None
            self._work.release()
            wait()
        finally:
            self._go_on(ticket)

    def _go_on(self, ticket: Ticket) -> None:
        """Back to the step of a ticket: what is below us must not run without its place, or in another's."""
        back, late = False, None
        while not back:
            try:
                if not self.inside and not self._work.acquire(timeout=POLL):
                    self._heal()
                    continue
                self._stepping = ticket
                self._switch(ticket)
                back = True
            except BaseException as error:
                late = error
        if late is not None:
            raise late

    def make_way(self, ticket: Ticket) -> bool:
        """Park the request that nobody advances, in a step of `ticket`; False if there is none."""
        now = time.monotonic()
        idle = [t for t in self._seated if not t.inside and now - t.idle_since >= self.patience]
        victim = min(idle, key=lambda t: t.idle_since, default=None)
        if victim is None:
            return False
        try:
            self._remove(victim)
        finally:
            self._go_on(ticket)
        return True

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
        if self.slots > 1 and not (self.inside and self._current is ticket):
            self._go_on(ticket)  # an interrupt came right where it had stepped aside
        if not ticket.over:
            ticket.over = True
            self._end(ticket)
        self._unseat(ticket)

    def abandon(self, ticket: Ticket) -> None:
        """A request is given up between two steps, maybe by a finaliser: leave word; tidy up if that is safe.

        Nothing native is done and no lock waited for where the collector runs, or under code of ours.
        """
        if ticket.over or ticket.thread is None:
            ticket.over = True
            return
        ticket.over = True
        self._abandoned.append(ticket)
        self._line.ring()
        if in_finaliser():
            return
        if not self._closed:
            self._tidy(ticket)
        elif ticket.parked is not None:  # to be told of; what was live `close` has ended itself
            self._end_quietly(ticket)

    def _tidy(self, ticket: Ticket) -> None:
        """End what was given up, if nobody is in: who has just come does it otherwise."""
        if self._stepping is not None or (ticket not in self._seated and len(self._seated) >= self.slots):
            return
        self._frames.enter()
        try:
            if self._work.acquire(blocking=False):
                self._end_abandoned()
        finally:
            if self.inside:
                self._work.release()
            self._frames.leave()

    # -- cancelling ------------------------------------------------------------------------------

    def cancel(self, ticket: Ticket | None = None) -> None:
        """End this request, or all that are in; takes no lock, so that a signal handler may call it."""
        for each in self.seated if ticket is None else (ticket,):
            if not each.over:
                each.cancelled = True
                self.stop.request(each.number)  # does nothing where it is not this one that runs

    def stop_native(self) -> None:
        """End what native code does for the current request alone: who waits for it was interrupted."""
        if self._current is not None and self.stop.armed:
            self.stop.request(self._current.number)

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
        self._frames.enter()
        try:
            while not self._work.acquire(timeout=POLL) or not self._all_outside():
                self._heal()
            self._end_abandoned()
            for ticket in self.seated:
                if not ticket.over and ticket.parked is None:
                    self._switch(ticket)
                    self.finish(ticket)
            work()
            self._shut = True
        finally:
            if self.inside:
                self._work.release()
            self._frames.leave()
            self._line.ring()

    # -- whose turn it is ------------------------------------------------------------------------

    def _take(self, ticket: Ticket) -> bool:
        """Seat a ticket, inside the lock; False where it is not its turn after all."""
        if self._abandoned:
            self._end_abandoned()
        if ticket not in self._seated:
            if self._closed or not self._may_enter(ticket):
                return False
            self._stepping = ticket  # from here on others are told that it is busy
            while (victim := self._victim(ticket)) is not None:
                self._remove(victim)
            if len(self._seated) >= (1 if ticket.whole else self.slots):
                return False
            self._seated.append(ticket)
            self._switch(ticket)
            if ticket.thread is None and self._tenant is not None:
                self._tenant.begin(ticket)
        else:
            self._switch(ticket)
        if ticket.parked is not None:
            self._stepping = ticket
            # an interrupt on the way leaves it parked, and it is resumed again
            if self._tenant is not None:
                self._tenant.resume(ticket)
            ticket.parked = None
        return True

    def _switch(self, ticket: Ticket) -> None:
        """From here on it is this ticket's step."""
        if self._current is not ticket:
            ticket.number = self.stop.begin()
            self._current = ticket
            if ticket.cancelled:
                self.stop.request(ticket.number)
        if self.slots > 1 and self._tenant is not None:
            self._tenant.switch(ticket)

    def _unseat(self, ticket: Ticket) -> None:
        if ticket in self._seated:
            self._seated.remove(ticket)
        if self._current is ticket:
            self.stop.end()
            self._current = None

    def _victim(self, ticket: Ticket) -> Ticket | None:
        """Who has to leave before this one comes in; None where there is room, or nobody can."""
        if len(self._seated) < (1 if ticket.whole else self.slots):
            return None
        now = time.monotonic()
        for other in self._seated:
            if other.thread is this_thread() and not other.inside:
                other.idle_since = -self.patience  # its own thread wants something else
        idle = [t for t in self._seated if not t.inside and (t.over or now - t.idle_since >= self.patience)]
        return min(idle, key=lambda t: (not t.over, t.idle_since), default=None)

    def _may_enter(self, ticket: Ticket) -> bool:
        """It is this ticket's turn, as far as can be told without the lock."""
        if self._stepping not in (None, ticket) and self.slots == 1:
            return False
        if ticket in self._seated:
            return True
        if too_early(ticket):
            return False
        if any(t.whole and not t.over for t in self.seated):
            room = 0
        else:
            room = (1 if ticket.whole else self.slots) - len(self._seated)
        if room <= 0 and self._victim(ticket) is None:
            return False
        return self._line.is_first(ticket)

    def _await(self, ticket: Ticket, deadline: float | None) -> None:
        """Wait in the line until it is a ticket's turn, or the gate closed. Raises Busy at the deadline."""
        if self._may_enter(ticket):
            return
        with self._line.bell() as wait:
            since = now = time.monotonic()
            while True:
                if not too_early(ticket):  # or the one that it comes after would stand behind it
                    self._line.renew(ticket)
                if self._closed or self._may_enter(ticket):
                    return
                if ticket.unwanted:
                    raise RequestCancelled("the request was given up while it waited")
                if deadline is not None and now >= deadline:
                    self._heal()
                    if self._may_enter(ticket):
                        return
                    raise Busy("another request is running on this Llama; wait for it, or pass wait=True")
                wait(POLL if deadline is None else min(POLL, deadline - now))
                now = time.monotonic()
                if now - since > self.patience:
                    self._heal()
                    since = now

    def _deadline(self) -> float | None:
        if self.wait is True:
            return None
        return time.monotonic() + float(self.wait)

    # -- ends and repairs ------------------------------------------------------------------------

    def _end_abandoned(self) -> None:
        """End the requests that were given up, inside the lock."""
        while self._abandoned:
            ticket = self._abandoned.popleft()
            self._end_there(ticket)

    def _remove(self, victim: Ticket) -> None:
        """Another request takes this one's place: park it, or end it if it was given up meanwhile."""
        if victim.over:
            self._end_there(victim)
        elif victim.parked is None and self._tenant is not None:
            self._tenant.park(victim)
        self._unseat(victim)

    def _end_there(self, ticket: Ticket) -> None:
        """End a request that was given up, where it is seated."""
        if self.slots > 1 and ticket in self._seated and self._tenant is not None:
            self._tenant.switch(ticket)
        self._unseat(ticket)
        self._end_quietly(ticket)

    def _all_outside(self) -> bool:
        """Nobody is in the middle of a step, with the lock in hand; else it is given up again."""
        if any(ticket.inside for ticket in self.seated):
            self._work.release()
            time.sleep(POLL / 10)
            return False
        return True

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
        for ticket in self.seated:
            if ticket.inside and not self._frames.run_in(ticket.inside):
                ticket.inside = 0  # an interrupt came before it could say that it left
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
        self._line.ring()


def too_early(ticket: Ticket) -> bool:
    """The one that it comes after is not in yet."""
    first = ticket.after
    return first is not None and first.thread is None and not first.over
