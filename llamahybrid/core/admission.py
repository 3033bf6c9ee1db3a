"""Admission: the requests that wait for a slot, and which of them gets one.

A request waits for a free slot, for one whose reader is away, and for the request that decodes its beginning.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from llamahybrid.core.batch import Reader
from llamahybrid.core.messages import Feed
from llamahybrid.core.request import Request
from llamahybrid.core.slots import Slot, Slots
from llamahybrid.errors import Busy
from llamahybrid.prompt_cache.base import Tokens
from llamahybrid.prompt_cache.ladder import MIN_SPACING
from llamahybrid.prompt_cache.nodes import common_prefix

PATIENCE = 0.02
"""Seconds after which a request whose reader is away gives its slot to one that waits, at least;"""

PATIENT_SWITCHES = 3
"""and as long as so many switches of the slot take."""

LONG_PATIENCE = 1.0
"""The same for one whose caller is at work on a token: in a logits processor, say."""

LATE_LOOK = 0.05
"""Seconds after its patience ended for which a request is looked at again, once a millisecond."""


class Admission:
    """Gives waiting requests the slots of one model, oldest first; used by its decode loop alone."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.waiting: list[Request] = []
        """Requests that have a task and no slot."""
        self.running: Request | None = None
        """The request that a batch is decoded for alone, or whose task goes on."""
        self.patience: float | None = None
        """Seconds instead of `PATIENCE`, measured switches left out."""
        self._freed = False
        """A slot was given back since waiting requests were looked at."""

    def queue(self, request: Request) -> None:
        """A request with a task waits for a slot."""
        if request.begun:
            request.deadline = None  # it was let in before
        self.waiting.append(request)
        self.waiting.sort(key=lambda each: each.born)

    def drop(self, request: Request) -> None:
        """A request waits no longer."""
        if request in self.waiting:
            self.waiting.remove(request)

    def leave(self, request: Request) -> None:
        """A request gives its slot back."""
        self.slots.leave(request)
        self._freed = True

    def admitted(self) -> Iterator[tuple[Request, Slot | BaseException | None]]:
        """Requests that wait no longer: with a slot, with an error, or, where they were cancelled, with None.

        Each is to be begun before the next one is asked for.
        """
        self._freed = False
        for request in list(self.waiting):
            if request.cancelled:
                self.waiting.remove(request)
                yield request, None
            elif self._may_begin(request):
                if self._room_for(request):
                    yield request, self._seat(request)
                elif request.whole:
                    break  # those behind it would come in for ever
        now = time.monotonic()
        for request in list(self.waiting):
            if request.deadline is not None and now >= request.deadline:
                self.waiting.remove(request)
                yield request, Busy("another request runs; wait=True waits for it")

    def seconds(self) -> float | None:
        """Seconds after which waiting requests are to be looked at again; None: after a message."""
        if not self.waiting:
            return None
        if self._freed:
            return 0
        now = time.monotonic()
        times = [request.deadline - now for request in self.waiting if request.deadline is not None]
        idle = (request.asked_at + self._patience(request) - now for request in self.slots.seated)
        times += [seconds for seconds in idle if seconds > -LATE_LOOK]  # longer ago: looked at since, in vain
        return max(1e-3, min(times, default=LONG_PATIENCE))

    # -- what the running request knows of others ------------------------------------------------------

    def waiting_beside(self) -> int:
        """Requests that want to decode, or wait for a slot, beside the one that runs."""
        others = (request for request in (*self.slots.seated, *self.waiting) if request is not self.running)
        return sum(request.task is not None for request in others)

    def wait_for(self, prompt: Tokens) -> bool:
        """Others of its salt that begin alike wait for what the prompt that is decoded leaves, or will."""
        current = self.running
        if current is None:
            return False
        return current.leads or any(
            other.salt == current.salt
            and other.prompt is not None
            and common_prefix(prompt, other.prompt) >= MIN_SPACING
            for other in self.waiting
        )

    # -- which request ---------------------------------------------------------------------------------

    def _may_begin(self, request: Request) -> bool:
        """What it builds on is there: the prompt of another request that begins alike is decoded."""
        if request.after is not None and not request.after.begun:
            return False
        if any(other.whole for other in self.slots.seated):
            return False
        prompt = request.prompt
        if prompt is None or request.parked or request.whole or len(self.slots) == 1:
            return True
        return not any(self._decodes_beginning(other, request, prompt) for other in self.slots.seated)

    def _decodes_beginning(self, other: Request, request: Request, prompt: Tokens) -> bool:
        prefilling = other.task is not None and (other.progress is None or other.progress.prefilling)
        if (
            not prefilling
            or other.prompt is None
            or other.salt != request.salt
            or request.rests_on is not None
        ):
            return False
        runner = self.slots.all[0].runner
        if not runner.live.profile.keeps_chats:
            return False
        shared = common_prefix(prompt, other.prompt)
        if shared < MIN_SPACING:
            return False
        free = self.slots.free()
        return shared >= MIN_SPACING + max(
            (slot.runner.checkpoints.depth(prompt, request.salt) for slot in free), default=0
        )

    # -- which slot ------------------------------------------------------------------------------------

    def _room_for(self, request: Request) -> bool:
        """There is a slot for a request, or another one makes room."""
        if request.whole:
            while (victim := self._victim(request)) is not None:
                self._park(victim)
            return not self.slots.seated
        if self.slots.free():
            return True
        if (victim := self._victim(request)) is None:
            return False
        self._park(victim)
        return True

    def _seat(self, request: Request) -> Slot | BaseException:
        self.waiting.remove(request)
        slot = self.slots.best(request)
        self.running = request
        try:
            self.slots.give(slot, request)
        except BaseException as error:
            return error
        finally:
            self.running = None
        return slot

    def _victim(self, request: Request) -> Request | None:
        """Who gives its slot up for this one: away for longest, or asked for by the same thread."""
        now = time.monotonic()
        idle = [
            other
            for other in self.slots.seated
            if _away(other)
            and (other.thread == request.thread or now - other.asked_at >= self._patience(other))
        ]
        return min(idle, key=lambda other: other.asked_at, default=None)

    def _patience(self, request: Request) -> float:
        """How long the reader of a request may be away before another one may have its slot."""
        if self.patience is not None:
            return self.patience
        if request.entered:
            return LONG_PATIENCE
        costs = self.slots.all[0].runner.meter.costs()
        tokens = 0 if request.slot is None else request.slot.executor.live.n
        switch = costs.snapshot_seconds + costs.restore_seconds + tokens * costs.segment_seconds
        return max(PATIENCE, PATIENT_SWITCHES * switch)

    def _park(self, request: Request) -> None:
        self.running = request
        try:
            self.slots.park(request)
        finally:
            self.running = None


def _away(request: Request) -> bool:
    """Nobody waits for what the request does next."""
    task = request.task
    if task is None:
        return True
    return isinstance(task.wanted, Reader) and isinstance(task.reply, Feed) and not task.reply.due
