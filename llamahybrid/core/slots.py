"""Slots: the live sequences of one context, and which request has which."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from operator import attrgetter

from llamahybrid.core.answering import preempt
from llamahybrid.core.request import Decode, Request, Task
from llamahybrid.core.runner import Runner
from llamahybrid.core.slot import Slot
from llamahybrid.prompt_cache.base import LiveState, Tokens
from llamahybrid.prompt_cache.placement import MIN_SPACING

logger = logging.getLogger("llamahybrid")

PAYING_STEPS = 16
"""Steps of an answer that pay for moving a chat next to running ones: a gap makes each half as long again."""


class Slots:
    """The slots of one model; changed by its decode loop alone."""

    def __init__(self, slots: list[Slot]) -> None:
        self.all = slots
        self._uses = itertools.count(1)

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

    def give(self, slot: Slot, request: Request) -> None:
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

    def empty_others(self) -> None:
        """Store and empty all slots but the first, for a request that has the whole context."""
        for slot in self.all[1:]:
            slot.runner.save_tip()
            slot.live.empty()

    def park(self, request: Request) -> None:
        """Preempt a request, which continues later; the cache follows its tokens until then."""
        slot = request.slot
        assert slot is not None, "only a request with a slot is parked"
        ids = preempt(slot, request)
        known = LiveState(lambda: ids)
        slot.runner.cache.follow(known, ids)
        request.known = known
        request.park(ids)
        self.leave(request)

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

    def store_live(self) -> None:
        """Store the live tokens of all slots, before the model is closed."""
        for slot in self:
            slot.runner.store_live()

    def store_attention(self) -> None:
        """Store unstored attention of all slots (see `Runner.store_attention`)."""
        for slot in self.all:
            slot.runner.store_attention()

    def owing(self) -> list[Slot]:
        """Slots whose last answer did not wait for its attention; not those that store it before it goes."""
        owing = [slot for slot in self.all if slot.runner.checkpoints.owes_since is not None]
        return [s for s in owing if (pager := s.live.profile.pager) is None or not pager.reads_whole]

    def store_owed(self, quiet: Callable[[], bool]) -> None:
        """Store the attention of `owing` slots, while `quiet()`."""
        for slot in self.owing():
            if quiet():
                slot.runner.checkpoints.owes_since = None
                try:
                    slot.runner.store_owed()
                except Exception:  # of a request that is over
                    logger.exception("attention was not stored")


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
