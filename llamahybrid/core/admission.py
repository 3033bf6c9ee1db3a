"""Admission: give slots to waiting requests, oldest first.

A request waits for a free slot, or preempts one whose reader is away; and where another request decodes the
same beginning, for that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from llamahybrid.core.reply import Feed
from llamahybrid.core.request import Reader, Request
from llamahybrid.core.slot import Slot
from llamahybrid.core.slots import Slots
from llamahybrid.errors import Busy
from llamahybrid.prompt_cache.base import Tokens
from llamahybrid.prompt_cache.ladder import MIN_SPACING
from llamahybrid.prompt_cache.nodes import common_prefix

PATIENCE = 0.02
"""Shortest absence of a reader, in seconds, after which its request may be preempted;"""

PATIENT_SWITCHES = 3
"""also the duration of this many switches of the slot."""

LONG_PATIENCE = 1.0
"""The same where the caller is inside its request: in a logits processor, say."""

LATE_LOOK = 0.05
"""Seconds after the end of its patience during which a request is looked at every millisecond."""


class Admission:
    """Gives waiting requests the slots of one model; used by its decode loop alone."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.waiting: list[Request] = []
        """Requests that have a task and no slot."""
        self.running: Request | None = None
        """The request whose task runs, or did last; None after an end."""
        self.patience: float | None = None
        """Seconds instead of `PATIENCE`, measured switches left out."""
        self._freed = False
        """A slot was released since waiting requests were looked at."""

    def queue(self, request: Request) -> None:
        """Add a request with a task to those that wait."""
        if request.begun:
            request.deadline = None  # admitted in time before
        self.waiting.append(request)
        self.waiting.sort(key=lambda each: each.born)

    def drop(self, request: Request) -> None:
        """Remove a request from those that wait."""
        if request in self.waiting:
            self.waiting.remove(request)

    def leave(self, request: Request) -> None:
        """Release the slot of a request."""
        self.slots.leave(request)
        self._freed = True

    def clear(self) -> None:
        """Release all slots, and forget the waiting requests; begun ones continue like preempted ones."""
        for request in self.slots.seated:
            request.park(request.view.ids())
            self.slots.leave(request)
        self.waiting, self.running = [], None

    def admitted(self) -> Iterator[tuple[Request, Slot | BaseException | None]]:
        """Yield requests whose wait ends: with a slot, an error, or None where they were cancelled.

        Each must have begun before the next one is asked for.
        """
        self._freed = False
        for request in list(self.waiting):
            if request.cancelled:
                self.waiting.remove(request)
                yield request, None
            elif self._may_begin(request):
                found = self._seat(request)
                if found is not None:
                    self.waiting.remove(request)
                    yield request, found
                elif request.whole:
                    break  # later requests would keep it from the whole context
        now = time.monotonic()
        for request in list(self.waiting):
            if request.deadline is not None and now >= request.deadline:
                self.waiting.remove(request)
                yield request, Busy("another request runs; wait=True waits for it")

    def seconds(self) -> float | None:
        """Seconds until waiting requests must be looked at again; None: not before the next message."""
        if not self.waiting:
            return None
        if self._freed:
            return 0
        now = time.monotonic()
        times = [request.deadline - now for request in self.waiting if request.deadline is not None]
        idle = (request.asked_at + self._patience(request) - now for request in self.slots.seated)
        times += [seconds for seconds in idle if seconds > -LATE_LOOK]  # longer ago: looked at since
        return max(1e-3, min(times, default=LONG_PATIENCE))

    # -- questions of the running request --------------------------------------------------------------

    def others_waiting(self) -> int:
        """Number of requests that decode or wait, without the running one."""
        others = (request for request in (*self.slots.seated, *self.waiting) if request is not self.running)
        return sum(request.task is not None for request in others)

    def is_awaited(self, prompt: Tokens) -> bool:
        """Other requests of the same salt wait for checkpoints of this prompt, which is decoded now."""
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
        """No other request still decodes a beginning that this one shares."""
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

    def _seat(self, request: Request) -> Slot | BaseException | None:
        """Give a request a slot; the error where that failed, and None where there is no room."""
        try:
            while self.slots.seated if request.whole else not self.slots.free():
                if (victim := self._victim(request)) is None:
                    return None
                self.running = victim
                self.slots.park(victim)
            self.running = request
            slot = self.slots.best(request)
            self.slots.give(slot, request)
        except BaseException as error:
            return error
        return slot

    def _victim(self, request: Request) -> Request | None:
        """The request to preempt for this one: with the longest absent reader, or one of the same thread."""
        now = time.monotonic()
        idle = [
            other
            for other in self.slots.seated
            if _away(other)
            and (_same_thread(other, request) or now - other.asked_at >= self._patience(other))
        ]
        return min(idle, key=lambda other: other.asked_at, default=None)

    def _patience(self, request: Request) -> float:
        """Seconds of absence of its reader after which a request may be preempted."""
        if self.patience is not None:
            return self.patience
        if request.entered:
            return LONG_PATIENCE
        costs = self.slots.all[0].runner.meter.costs()
        tokens = 0 if request.slot is None else request.slot.live.n
        switch = costs.snapshot_seconds + costs.restore_seconds + tokens * costs.segment_seconds
        return max(PATIENCE, PATIENT_SWITCHES * switch)


def _same_thread(other: Request, request: Request) -> bool:
    """Return whether one thread reads both, other than as answers of one call."""
    return other.reader is request.reader and (other.bell is None or other.bell is not request.bell)


def _away(request: Request) -> bool:
    """The reader of a request waits for nothing."""
    task = request.task
    if task is None:
        return True
    return isinstance(task.wanted, Reader) and isinstance(task.reply, Feed) and not task.reply.due
