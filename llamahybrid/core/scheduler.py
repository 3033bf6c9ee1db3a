"""Admission and Scheduler: which request gets a slot, and which tokens the next batch holds.

A request waits for a free slot, or preempts one whose reader is away; and where another request decodes the
same beginning, for that.

A batch holds one token of each running answer and chunks of the waiting prompts. Each batch reads all
weights, so that small chunks slow the prompts down; large ones delay the answers. A step of few answers takes
hardly less time than one of many, so that chunks are larger beside few answers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from llamahybrid.core.request import Decode, Feed, Reader, Request, Task
from llamahybrid.core.slot import Slot
from llamahybrid.core.slots import Slots
from llamahybrid.errors import Busy
from llamahybrid.memory.costs import CostMeter
from llamahybrid.prompt_cache.base import Tokens
from llamahybrid.prompt_cache.nodes import common_prefix
from llamahybrid.prompt_cache.placement import MIN_SPACING

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


CHUNK_STEPS = 16
"""Duration of the prompt chunks in a batch, in steps of answers,"""

CHUNK_SECONDS = 0.4
"""or in seconds, whichever is longer: two tokens a second still read as a text that is being written. Both
are divided by the share of answers among all requests that decode."""

SMALLEST_CHUNK = 32
"""Fewest tokens of the prompt chunks in a batch."""

UNMEASURED = 128
"""The same before the first measurement."""

MIN_TIMED = 16
"""Fewest prompt tokens in a batch that is used to measure the time of one."""

GRACE_SHARE = 0.25
"""Longest delay of a batch for answers whose readers asked at once the last time: a share of a step,"""

GRACE_SECONDS = 2e-3
"""and at least this many seconds."""


Waiting: TypeAlias = tuple[Task, Decode]
"""A task, and the tokens that it waits for."""


class Scheduler:
    """Chooses batches, and measures the time of steps and chunks."""

    def __init__(self, meter: CostMeter, n_batch: int, merges: bool = True) -> None:
        """`merges`: tokens of several sequences may be in one batch."""
        self._meter = meter
        self._n_batch = n_batch
        self._merges = merges
        self._turn = 0
        self._steps: deque[float] = deque(maxlen=2)
        """Seconds of the last steps of answers, of which the shorter counts: a single one may include a pause
        of the process or the machine."""
        self._tokens: deque[float] = deque(maxlen=2)
        """The same for a token of a prompt."""

    def grace_seconds(self, slots: Slots, wanted: int) -> float:
        """Seconds for which a batch still waits for the next tokens of answers with fast readers.

        `wanted`: number of tasks whose tokens are there.
        """
        if wanted == len(slots):
            return 0
        now, grace = time.monotonic(), max(GRACE_SECONDS, GRACE_SHARE * min(self._steps, default=0.0))
        left = 0.0
        for request in slots.seated:
            expected = request.progress is not None and not request.over
            ready = request.task is not None and isinstance(request.task.wanted, Decode)
            if expected and not ready and request.away < grace:
                left = max(left, request.asked_at + grace - now)
        return left

    def choose(self, tasks: list[Waiting]) -> list[Waiting]:
        """Choose those of the next batch and set their `count`; in order of sequences.

        `tasks`: at least one, the oldest request first.
        """
        self._turn += 1
        if len(tasks) == 1:
            wanted = tasks[0][1]
            wanted.count = len(wanted.tokens)
            return tasks
        alone = [each for each in tasks if each[1].alone or each[0].alone]
        together = [each for each in tasks if each not in alone]
        if not self._merges or (alone and (not together or self._turn % 2)):
            task, wanted = (alone or tasks)[self._turn // 2 % len(alone or tasks)]
            most = self._prompt_tokens(len(tasks) - 1, 1) if wanted.prompt else self._n_batch
            wanted.count = min(len(wanted.tokens), most)
            return [(task, wanted)]
        return sorted(self._together(together), key=lambda each: each[1].live.native.seq)

    def _together(self, tasks: Sequence[Waiting]) -> list[Waiting]:
        batch = [each for each in tasks if each[1].step][: self._n_batch]
        prompts = [each for each in tasks if not each[1].step]
        room = self._n_batch - len(batch)
        if batch and prompts:
            room = min(room, self._prompt_tokens(len(batch), len(prompts)))
        prompts.sort(key=lambda each: len(each[1].tokens))  # a short one leaves its share to the others
        for number, (task, wanted) in enumerate(prompts):
            wanted.count = min(len(wanted.tokens), room // (len(prompts) - number))
            if wanted.count:
                batch.append((task, wanted))
                room -= wanted.count
        return batch

    def _prompt_tokens(self, answers: int, prompts: int) -> int:
        """Number of tokens of prompts between two steps of answers, by the numbers of both."""
        token = max(min(self._tokens, default=0.0), self._meter.costs().prefill_seconds)
        if not token:
            return UNMEASURED
        seconds = max(CHUNK_STEPS * min(self._steps, default=0.0), CHUNK_SECONDS)
        return max(SMALLEST_CHUNK, int(seconds * (answers + prompts) / answers / token))

    def took(self, batch: Sequence[Waiting], seconds: float) -> None:
        """Note the duration of a batch."""
        tokens = answers = 0
        for _, wanted in batch:
            tokens += wanted.count
            answers += wanted.step
        if answers == len(batch):
            self._steps.append(seconds)
            self._meter.together = answers
            if answers == 1:
                self._meter.decoded(1, seconds)
            return
        if tokens - answers >= MIN_TIMED:
            self._tokens.append(seconds / tokens)
        if len(batch) == 1:
            self._meter.decoded(tokens, seconds)
