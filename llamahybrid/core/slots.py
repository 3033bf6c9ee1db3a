"""Slots: the live sequences of one context, which request has which, and which requests wait for one.

A request waits for a free slot, or preempts one whose reader is away; and where another request decodes the
same beginning, for that.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from operator import attrgetter

from llamahybrid.core.answering import preempt
from llamahybrid.core.request import Decode, Feed, Reader, Request, Task
from llamahybrid.core.runner import Runner
from llamahybrid.core.slot import Slot
from llamahybrid.errors import Busy
from llamahybrid.prompt_cache.base import LiveState, Tokens
from llamahybrid.prompt_cache.ladder import MIN_SPACING
from llamahybrid.prompt_cache.nodes import common_prefix

logger = logging.getLogger("llamahybrid")

PAYING_STEPS = 16
"""Steps of an answer that pay for moving a chat next to running ones: a gap makes each half as long again."""

PATIENCE = 0.02
"""Shortest absence of a reader, in seconds, after which its request may be preempted;"""

PATIENT_SWITCHES = 3
"""also the duration of this many switches of the slot."""

LONG_PATIENCE = 1.0
"""The same where the caller is inside its request: in a logits processor, say."""

SETTLE_SECONDS = 0.005
"""Time behind a decoded prompt before its end is stored, where its caller asks for no token: one who does is
not to wait for that."""

LATE_LOOK = 0.05
"""Seconds after the end of its patience during which a request is looked at every millisecond."""


class Slots:
    """The slots of one model; changed by its decode loop alone."""

    def __init__(self, slots: list[Slot]) -> None:
        self.all = slots
        self.waiting: list[Request] = []
        """Requests that have a task and no slot."""
        self.running: Request | None = None
        """The request whose task runs, or did last; None after an end."""
        self.patience: float | None = None
        """Seconds instead of `PATIENCE`, measured switches left out."""
        self._uses = itertools.count(1)
        self._freed = False
        """A slot was released since waiting requests were looked at."""
        for slot in slots:
            slot.runner.others_waiting, slot.runner.is_awaited = self.others_waiting, self.is_awaited

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)

    @property
    def runners(self) -> list[Runner]:
        """The runner of each slot."""
        return [slot.runner for slot in self.all]

    @property
    def seated(self) -> list[Request]:
        """The requests that have a slot, oldest first; from any thread."""
        found = [request for slot in self.all if (request := slot.request) is not None]
        return sorted(found, key=attrgetter("born"))

    def wanted(self) -> list[tuple[Task, Decode]]:
        """Tasks that wait for decoded tokens, and these tokens; the oldest request first."""
        found = []
        for slot in self.all:
            request = slot.request
            task = None if request is None else request.task
            if task is not None and isinstance(task.wanted, Decode):
                found.append((task, task.wanted))
        if len(found) > 1:
            found.sort(key=lambda each: each[0].request.born)
        return found

    def free(self) -> list[Slot]:
        """Slots that no request has."""
        return [slot for slot in self.all if slot.request is None]

    # -- waiting requests ------------------------------------------------------------------------------

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

    def clear(self) -> None:
        """Release all slots, and forget the waiting requests; begun ones continue like preempted ones."""
        for request in self.seated:
            request.park(request.view.ids())
            self.leave(request)
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
        idle = (request.asked_at + self._patience(request) - now for request in self.seated)
        times += [seconds for seconds in idle if seconds > -LATE_LOOK]  # longer ago: looked at since
        return max(1e-3, min(times, default=LONG_PATIENCE))

    def leave(self, request: Request) -> None:
        """Release the slot of a request."""
        slot = request.slot
        if slot is not None:
            slot.used = next(self._uses)
            if slot.request is request:
                slot.request = None
            if slot.current is request:
                slot.current = None
            request.slot = None
        self._freed = True

    # -- questions of the running request --------------------------------------------------------------

    def others_waiting(self) -> int:
        """Number of requests that decode or wait, without the running one."""
        others = (request for request in (*self.seated, *self.waiting) if request is not self.running)
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
        if any(other.whole for other in self.seated):
            return False
        prompt = request.prompt
        if prompt is None or request.parked or request.whole or len(self.all) == 1:
            return True
        return not any(self._decodes_beginning(other, request, prompt) for other in self.seated)

    def _decodes_beginning(self, other: Request, request: Request, prompt: Tokens) -> bool:
        prefilling = other.task is not None and (other.progress is None or other.progress.prefilling)
        if (
            not prefilling
            or other.prompt is None
            or other.salt != request.salt
            or request.rests_on is not None
        ):
            return False
        runner = self.all[0].runner
        if not runner.live.profile.keeps_chats:
            return False
        shared = common_prefix(prompt, other.prompt)
        if shared < MIN_SPACING:
            return False
        free = self.free()
        return shared >= MIN_SPACING + max(
            (slot.runner.checkpoints.depth(prompt, request.salt) for slot in free), default=0
        )

    # -- which slot ------------------------------------------------------------------------------------

    def _seat(self, request: Request) -> Slot | BaseException | None:
        """Give a request a slot; the error where that failed, and None where there is no room."""
        try:
            while self.seated if request.whole else not self.free():
                if (victim := self._victim(request)) is None:
                    return None
                self.running = victim
                self._park(victim)
            self.running = request
            slot = self.best(request)
            self._give(slot, request)
        except BaseException as error:
            return error
        return slot

    def _victim(self, request: Request) -> Request | None:
        """The request to preempt for this one: with the longest absent reader, or one of the same thread."""
        now = time.monotonic()
        idle = [
            other
            for other in self.seated
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
        costs = self.all[0].runner.meter.costs()
        tokens = 0 if request.slot is None else request.slot.live.n
        switch = costs.snapshot_seconds + costs.restore_seconds + tokens * costs.segment_seconds
        return max(PATIENCE, PATIENT_SWITCHES * switch)

    def best(self, request: Request) -> Slot:
        """The free slot from which most of a request's prompt can be resumed."""
        free, salt = self.free(), request.salt
        prompt = request.prompt
        if request.whole:
            return self.all[0]
        if prompt is None or not len(prompt):
            return min(free, key=lambda slot: slot.used)
        if request.rests_on is not None:
            return max(free, key=lambda slot: slot.live_prefix(prompt, salt))
        if len(free) == 1:
            return free[0]

        busy = {number for number, slot in enumerate(self.all) if slot.request is not None}
        rows = {id(slot): _rows({*busy, number}) for number, slot in enumerate(self.all)}

        def merit(slot: Slot) -> tuple[int, ...]:
            depth, live = slot.runner.checkpoints.depth(prompt, salt), slot.live_prefix(prompt, salt)
            return depth, live, -rows[id(slot)], -slot.used

        best = max(free, key=merit)
        nearer = [slot for slot in free if rows[id(slot)] < rows[id(best)]]
        if nearer and best.live_prefix(prompt, salt) and _moves(best.runner):
            best.runner.share()
            other = max(nearer, key=merit)
            best = other if merit(other)[0] >= merit(best)[0] else best
        return best

    def _give(self, slot: Slot, request: Request) -> None:
        """A request gets a slot; what another one holds of its prompt is stored, so that it serves here."""
        request.slot, slot.request = slot, request
        prompt = request.prompt
        if len(self.all) > 1 and prompt is not None and len(prompt) and not request.whole:
            self._share(slot, prompt, request.salt)
        slot.take(request)

    def _share(self, slot: Slot, prompt: Tokens, salt: bytes) -> None:
        there = max(self.all, key=lambda each: each.live_prefix(prompt, salt))
        if there is slot:
            return
        held = there.live_prefix(prompt, salt)
        if held >= slot.runner.checkpoints.depth(prompt, salt) + MIN_SPACING:
            there.runner.share()

    def _park(self, request: Request) -> None:
        """Preempt a request, which continues later; the cache follows its tokens until then."""
        slot = request.slot
        assert slot is not None, "only a request with a slot is parked"
        ids = preempt(slot, request)
        known = LiveState(lambda: ids)
        slot.runner.cache.follow(known, ids)
        request.known = known
        request.park(ids)
        self.leave(request)

    # -- all of them -----------------------------------------------------------------------------------

    def empty_others(self) -> None:
        """Store and empty all slots but the first, for a request that has the whole context."""
        for slot in self.all[1:]:
            slot.runner.save_tip()
            slot.live.empty()

    def store(self, *, tips: bool = False) -> None:
        """Store unstored attention of all slots, and `tips`: checkpoints at their tips (see `Runner.store`).

        A running answer has not stored its attention, and starts again from it where buffers are zeroed for
        another slot.
        """
        for slot in self.all:
            slot.runner.store(tip=tips)

    def settle(self) -> float | None:
        """Store the ends of prompts that were decoded `SETTLE_SECONDS` ago; the time until the next, if any.

        Not while its caller's code runs, which may use the context.
        """
        now, soon = time.monotonic(), None
        for slot in self.all:
            if (due := slot.runner.checkpoints.due) is None:
                continue
            left = due.since + SETTLE_SECONDS - now
            if slot.request is not None and slot.request.entered:
                left = max(left, SETTLE_SECONDS)
            if left <= 0:
                slot.runner.checkpoints.settle()
            else:
                soon = left if soon is None else min(left, soon)
        return soon

    def owing(self) -> list[Slot]:
        """Free slots whose last answer did not wait for its attention, unless that is stored before it goes.

        A request that has such a slot stores it at its end, and does not wait for it before.
        """
        owing = [slot for slot in self.free() if slot.runner.checkpoints.owes_since is not None]
        return [s for s in owing if (pager := s.live.profile.pager) is None or not pager.reads_whole]

    def store_owed(self) -> None:
        """Store the attention of `owing` slots, while no request waits."""
        for slot in self.owing():
            if not self.waiting:
                slot.runner.checkpoints.owes_since = None
                try:
                    slot.runner.store()
                except Exception:  # of a request that is over
                    logger.exception("attention was not stored")


def _same_thread(other: Request, request: Request) -> bool:
    """Return whether one thread reads both, other than as answers of one call."""
    return other.reader is request.reader and (other.bell is None or other.bell is not request.bell)


def _away(request: Request) -> bool:
    """The reader of a request waits for nothing."""
    task = request.task
    if task is None:
        return True
    return isinstance(task.wanted, Reader) and isinstance(task.reply, Feed) and not task.reply.due


def _moves(runner: Runner) -> bool:
    """Loading a chat into another slot takes less time than its answer saves there."""
    if not runner.live.profile.keeps_chats:
        return False
    costs = runner.meter.costs()
    seconds = costs.restore_seconds + 2 * runner.live.n * costs.segment_seconds  # it is read first
    return seconds < PAYING_STEPS * costs.token_seconds


def _rows(numbers: set[int]) -> int:
    """Count runs of consecutive numbers: each is a native batch in a step of answers.

    (src/llama-batch.cpp, split_equal)
    """
    return sum(number - 1 not in numbers for number in numbers)
