"""Scheduler: choose the tokens of the next batch.

A batch holds one token of each running answer and chunks of the waiting prompts; `pace` limits the chunks so
that answers keep their pace.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeAlias

from llamahybrid.core.batch import Decode
from llamahybrid.core.pace import RecentMin, chunk_tokens, largest_chunk, prefill_seconds
from llamahybrid.core.request import Task
from llamahybrid.core.slots import Slots
from llamahybrid.memory.costs import CostMeter

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
        self._step, self._token = RecentMin(), RecentMin()
        """Seconds a step of answers, and a token of a prompt."""

    def grace_seconds(self, slots: Slots, wanted: int) -> float:
        """Seconds for which a batch still waits for the next tokens of answers with fast readers.

        `wanted`: number of tasks whose tokens are there.
        """
        if wanted == len(slots):
            return 0
        now, grace = time.monotonic(), max(GRACE_SECONDS, GRACE_SHARE * self._step.seconds)
        left = 0.0
        for request in slots.seated:
            expected = request.progress is not None and not request.progress.over
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
            wanted.count = self._chunk(wanted, len(tasks) - 1)
            return [(task, wanted)]
        return sorted(self._together(together), key=lambda each: each[1].live.native.seq)

    def _together(self, tasks: Sequence[Waiting]) -> list[Waiting]:
        batch = [each for each in tasks if each[1].step][: self._n_batch]
        prompts = [each for each in tasks if not each[1].step]
        room = self._n_batch - len(batch)
        if batch and prompts:
            room = min(room, self._budget(len(batch), len(prompts)))
        prompts.sort(key=lambda each: len(each[1].tokens))  # a short one leaves its share to the others
        for number, (task, wanted) in enumerate(prompts):
            wanted.count = min(len(wanted.tokens), room // (len(prompts) - number))
            if wanted.count:
                batch.append((task, wanted))
                room -= wanted.count
        return batch

    def _budget(self, answers: int, prompts: int) -> int:
        """Number of prompt tokens in a batch with this number of answers and prompts."""
        seconds = prefill_seconds(self._step.seconds, answers, prompts)
        return largest_chunk(seconds, self._token_seconds())

    def _chunk(self, wanted: Decode, others: int) -> int:
        """Number of tokens in a batch that holds one sequence alone."""
        if not wanted.prompt or len(wanted.tokens) == 1:
            return len(wanted.tokens)
        seconds = prefill_seconds(self._step.seconds, others, 1)
        return chunk_tokens(len(wanted.tokens), seconds, self._token_seconds())

    def _token_seconds(self) -> float:
        return max(self._token.seconds, self._meter.costs().prefill_seconds)

    def took(self, batch: Sequence[Waiting], seconds: float) -> None:
        """Note the duration of a batch."""
        tokens = answers = 0
        for _, wanted in batch:
            tokens += wanted.count
            answers += wanted.step
        if answers == len(batch):
            self._step.took(seconds)
            self._meter.together = answers
            if answers == 1:
                self._meter.decoded(1, seconds)
            return
        if tokens - answers >= MIN_TIMED:
            self._token.took(seconds / tokens)
        if len(batch) == 1:
            self._meter.decoded(tokens, seconds)
