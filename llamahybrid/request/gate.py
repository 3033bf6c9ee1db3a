"""As many requests at a time as there are slots: tickets, turns, making room for others, and cancelling.

A request holds a *ticket* from its first step to its end, never a thread: a pool's thread serves many users,
an ident is given out again after its thread died, and a finaliser runs anywhere. A *step* is one stretch of
work for a ticket. Nothing else happens on the context meanwhile, but where it steps aside itself, to have a
token decoded together with those of others. Between its steps a ticket stays *seated* until it is over.
Another one takes its place earlier where the same thread asks for both, or where nobody has advanced it for
`patience` seconds; the old one is then parked, and goes on when it is advanced.

Ctrl-C may come between any two lines, and nothing trusts that the next one is run: who waits looks again, a
place in the line that is not renewed expires, and a lock is replaced whose holder is not in `run`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from llamahybrid.errors import LlamaHybridError, ModelClosed, RequestCancelled
from llamahybrid.request.ends import Ends
from llamahybrid.request.finalisers import in_finaliser
from llamahybrid.request.line import POLL, Line
from llamahybrid.request.seats import Seats
from llamahybrid.request.step_frames import Step, StepFrames, executes
from llamahybrid.request.step_lock import StepLock
from llamahybrid.request.ticket import Tenant, Ticket, this_thread

YIELD_SECONDS = 5e-5
"""So long a thread sleeps that lets others have the lock."""

Result = TypeVar("Result")


class RequestGate:
    """Lets as many requests in at a time as there are slots."""

    def __init__(self, wait: bool | float, tenant: Tenant) -> None:
        """`wait`: True waits for the running request, False raises `Busy` at once, seconds do both."""
        self.wait = wait
        self.telling = False
        """A user's callback runs inside a step: it is no part of what the step does."""
        self.seats = Seats()
        self._tenant = tenant
        self._ends = Ends(tenant, self.seats)
        self._stepping: Ticket | None = None
        self._line = Line()
        self._closed = self._shut = False
        self._frames = StepFrames()
        self._lock = StepLock(self._frames)
        self.held = self._lock.held
        """The same as `inside`, for who asks many times a token."""

    # -- who is in -------------------------------------------------------------------------------

    @property
    def inside(self) -> bool:
        """The calling thread is in a step."""
        return self._lock.held()

    @property
    def current(self) -> Ticket | None:
        """The request that made the last step, if it is not over: inside a step that very one."""
        return self.seats.current

    @property
    def running(self) -> Ticket:
        """The request whose step this is; only inside of one."""
        ticket = self.seats.current
        assert ticket is not None, "decoding is part of a request's step"
        return ticket

    @property
    def seated(self) -> list[Ticket]:
        """The requests that are in, oldest first."""
        return list(self.seats)

    @property
    def closed(self) -> bool:
        """No step is made any more."""
        return self._closed

    def nested(self) -> bool:
        """The caller is part of a step."""
        if self.inside and self.telling:
            raise LlamaHybridError("on_request and on_progress cannot use their model; do that afterwards")
        return self._in_step()

    def _in_step(self) -> bool:
        """The same; its stack is asked, since an interrupt may have left the lock."""
        if self.inside and not self._frames.run_in():
            self._lock.give_up()
            self._heal()
        return self.inside

    # -- a request -------------------------------------------------------------------------------

    def run(self, ticket: Ticket, work: Callable[..., Result], *args: Any) -> Result:
        """`work(*args)` as a step of `ticket`, once it is its turn; what that returned.

        Raises Busy when another request is in and `wait` does not allow to wait for the first step (later
        ones wait as long as it takes), ModelClosed after `close`, RuntimeError inside a step,
        RequestCancelled where it waits and is unwanted, and what `Tenant.resume` raises.
        """
        if self._in_step():
            raise RuntimeError("a request cannot be advanced from inside another one's step")
        self._frames.enter()
        later = ticket.thread is not None or ticket.after is not None
        deadline = None if later or self.wait is True else time.monotonic() + float(self.wait)
        try:
            ticket.step = Step()
            while True:
                if self._closed:
                    raise ModelClosed("the model is closed")
                if ticket.unwanted and ticket.thread is None:  # a prompt of another one may take long
                    raise RequestCancelled("the request was given up while it waited")
                if ticket not in self.seats or (self.seats.slots == 1 and self._busy is not None):
                    self._await(ticket, deadline)
                if self.seats.slots > 1 and not self.lonely(ticket):
                    self._tenant.joined(ticket)
                if self.crowded:
                    time.sleep(YIELD_SECONDS)
                self._lock.want()
                if not self._lock.acquire():
                    self._heal()
                elif self._take(ticket):
                    break
                else:
                    self._lock.release()
            self._line.leave(ticket)
            try:
                self._stepping = ticket
                ticket.thread = this_thread()
                return work(*args)
            finally:
                ticket.idle_since = time.monotonic()
                self._stepping = None
                if self.seats.slots > 1:
                    self._tenant.stepped(ticket)
        finally:
            ticket.step = None
            self._lock.want_no_more()
            if self._stepping is ticket:
                self._stepping = None
            self._lock.release()
            if self._line:
                self._line.leave(ticket)
                if self.seats.free:
                    self._line.ring()
            self._frames.leave()

    @property
    def crowded(self) -> int:
        """Other threads that want the lock: who gives it up and takes it again would always be faster."""
        return self._lock.wanted if self.seats.slots > 1 else 0

    def lonely(self, ticket: Ticket) -> bool:
        """No other request is in, and no thread is about to make a step."""
        return self.seats.only(ticket) and not self._lock.wanted

    def step_aside(self, ticket: Ticket, wait: Callable[[], object]) -> None:
        """Let others make their steps while this one waits in the middle of its own.

        However `wait` ends, the step goes on only when it has its place back.
        """
        try:
            self._stepping = None
            self._lock.release()
            wait()
        finally:
            self._go_on(ticket)

    def _go_on(self, ticket: Ticket) -> None:
        """Back to the step of a ticket: what is below us must not run without its place, or in another's."""
        back, late = False, None
        while not back:
            try:
                if not self.inside and not self._lock.acquire():
                    self._heal()
                    continue
                self._stepping = ticket
                self._switch(ticket)
                back = True
            except BaseException as error:
                late = error
        if late is not None:
            raise late

    def alone(self, work: Callable[..., Result], *args: Any, ticket: Ticket | None = None) -> Result:
        """A single operation (eval, reset, load_state): part of the step it is called in, or its own."""
        if self.nested():
            return work(*args)
        ticket = ticket or Ticket()
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
        if self.seats.slots > 1 and not (self.inside and self.current is ticket):
            self._go_on(ticket)  # an interrupt came right where it had stepped aside
        if not ticket.over:
            ticket.over = True
            self._ends.tell(ticket)
        self.seats.leave(ticket)

    def abandon(self, ticket: Ticket) -> None:
        """A request is given up between two steps, maybe by a finaliser: leave word; tidy up if that is safe.

        Nothing native is done and no lock waited for where the collector runs, or under code of ours.
        """
        if ticket.over or ticket.thread is None:
            ticket.over = True
            return
        ticket.over = True
        self._ends.leave_word(ticket)
        self._line.ring()
        if in_finaliser():
            return
        if not self._closed:
            self._tidy(ticket)
        elif ticket.parked is not None:  # to be told of; what was live `close` has ended itself
            self._ends.tell_quietly(ticket)

    def _tidy(self, ticket: Ticket) -> None:
        """End what was given up, if nobody is in: who has just come does it otherwise."""
        if self._busy is not None or (ticket not in self.seats and not self.seats.free):
            return
        self._in_step()  # or it would take once more what an interrupt left it, while others replace that
        self._frames.enter()
        try:
            if self._lock.acquire(wait=False):
                self._ends.tell_of_abandoned()
        finally:
            self._lock.release()
            self._frames.leave()

    # -- cancelling ------------------------------------------------------------------------------

    def cancel(self, ticket: Ticket | None = None) -> None:
        """End this request, or all that are in; takes no lock, so that a signal handler may call it."""
        for each in self.seated if ticket is None else (ticket,):
            if not each.over:
                each.cancelled = True
                self.seats.stop.request(each.number)  # does nothing where it is not this one that runs

    def stop_native(self) -> None:
        """End what native code does for the current request alone: who waits for it was interrupted."""
        if (current := self.current) is not None and self.seats.stop.armed:
            self.seats.stop.request(current.number)

    def check(self) -> None:
        """Raise RequestCancelled if the current request is to end."""
        if (current := self.seats.current) is not None and current.cancelled:
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
            while not self._lock.acquire() or not self._all_outside():
                self.cancel()  # who was just being seated, too
                self._heal()
            self.cancel()
            self._ends.tell_of_abandoned()
            for ticket in self.seated:
                if not ticket.over and ticket.parked is None:
                    self._switch(ticket)
                    self.finish(ticket)
            work()
            self._shut = True
        finally:
            self._lock.release()
            self._frames.leave()
            self._line.ring()

    # -- whose turn it is ------------------------------------------------------------------------

    def _take(self, ticket: Ticket) -> bool:
        """Seat a ticket, inside the lock; False where it is not its turn after all."""
        self._ends.tell_of_abandoned()
        if ticket not in self.seats:
            if self._closed or not self._may_enter(ticket):
                return False
            self._stepping = ticket  # from here on others are told that it is busy
            while (victim := self.seats.victim(ticket)) is not None:
                self._remove(victim)
            if not self.seats.fits(ticket):
                self._stepping = None  # the victim has just been advanced: it must not wait for us
                return False
            self.seats.take(ticket)
            self._line.leave(ticket)
            if self.seats.free:  # for the next one: what follows may take long, and step aside
                self._line.ring()
            self._switch(ticket)
            if ticket.thread is None:
                self._tenant.begin(ticket)
        else:
            self._switch(ticket)
        if ticket.parked is not None:
            self._stepping = ticket
            # an interrupt on the way leaves it parked, and it is resumed again
            self._tenant.resume(ticket)
            ticket.parked = None
        return True

    def _switch(self, ticket: Ticket) -> None:
        """From here on it is this ticket's step."""
        self._lock.want_no_more()
        self.seats.switch(ticket)
        if self.seats.slots > 1:
            self._tenant.switch(ticket)

    def _may_enter(self, ticket: Ticket) -> bool:
        """It is this ticket's turn, as far as can be told without the lock."""
        if self._busy not in (None, ticket) and self.seats.slots == 1:
            return False
        if ticket in self.seats:
            return True
        return not ticket.too_early and self.seats.has_room(ticket) and self._line.is_first(ticket)

    def _await(self, ticket: Ticket, deadline: float | None) -> None:
        """Wait in the line until it is a ticket's turn, or the gate closed. Raises Busy at the deadline."""
        self._lock.want_no_more()
        if not self._may_enter(ticket):
            ticket.asked = 0  # others came in first
        self._line.wait(
            ticket,
            lambda: self._closed or self._may_enter(ticket),
            self._heal,
            every=self.seats.patience,
            deadline=deadline,
        )
        ticket.asks()

    def _remove(self, victim: Ticket) -> None:
        """Another request takes this one's place: park it, or end it if it was given up meanwhile."""
        if victim.over:
            self._ends.end_seated(victim)
        elif victim.parked is None:
            self._tenant.park(victim)
        self.seats.leave(victim)

    def _all_outside(self) -> bool:
        """Nobody is in the middle of a step, with the lock in hand; else it is given up again."""
        if any(ticket.inside for ticket in self.seated):
            self._lock.release()
            time.sleep(POLL / 10)
            return False
        return True

    # -- repairs ---------------------------------------------------------------------------------

    @property
    def _busy(self) -> Ticket | None:
        """Whose step is made, unless an interrupt has ended it."""
        ticket = self._stepping
        return None if ticket is None or not ticket.inside else ticket

    def _heal(self) -> None:
        """Take back what an interrupted thread left: a ticket that it was inside for, and the lock."""
        for ticket in (*self.seated, self._stepping):
            step = None if ticket is None else ticket.step
            if step is not None and not executes(step.frame):
                step.left = True  # an interrupt came before it could say so
        if self._lock.heal():
            self._line.ring()
