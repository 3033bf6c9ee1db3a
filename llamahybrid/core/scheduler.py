"""Scheduler: choose the tokens of the next batch.

A batch holds one token of each running answer and chunks of the waiting prompts; `pace` limits the chunks so
that answers keep their pace.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from llamahybrid.core.batch import Decode
from llamahybrid.core.pace import RecentMin, chunk_tokens, largest_chunk, prefill_seconds
from llamahybrid.core.request import Request, Task
from llamahybrid.memory.costs import CostMeter

MIN_TIMED = 16
"""Fewest prompt tokens in a batch that is used to measure the time of one."""

GRACE_SHARE = 0.25
"""Longest delay of a batch for answers whose readers asked at once the last time: a share of a step,"""

GRACE_SECONDS = 2e-3
"""and at least this many seconds."""


@dataclass(frozen=True)
class Part:
    """The first `count` tokens of those that a task has to decode."""

    task: Task
    wanted: Decode
    count: int


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

    def grace_seconds(self, seated: Sequence[Request]) -> float:
        """Seconds for which a batch still waits for the next tokens of answers with fast readers."""
        if len(seated) < 2:
            return 0.0
        now, grace = time.monotonic(), max(GRACE_SECONDS, GRACE_SHARE * self._step.seconds)
        ready, left = False, 0.0
        for request in seated:
            if request.task is not None and isinstance(request.task.wanted, Decode):
                ready = True
            elif request.away < grace and request.progress is not None and not request.progress.over:
                left = max(left, request.asked_at + grace - now)
        return left if ready else 0.0

    def choose(self, tasks: Sequence[tuple[Task, Decode]]) -> list[Part]:
        """The parts of the next batch, ordered by sequence; `tasks`: the oldest request first."""
        if not tasks:
            return []
        self._turn += 1
        if len(tasks) == 1:
            task, wanted = tasks[0]
            return [Part(task, wanted, len(wanted.tokens))]
        alone = [each for each in tasks if each[1].alone or each[0].alone]
        together = [each for each in tasks if each not in alone]
        if not self._merges or (alone and (not together or self._turn % 2)):
            task, wanted = (alone or tasks)[self._turn // 2 % len(alone or tasks)]
            return [Part(task, wanted, self._chunk(wanted, len(tasks) - 1))]
        parts = self._parts(together)
        return sorted(parts, key=lambda part: part.wanted.live.native.seq)

    def _parts(self, tasks: Sequence[tuple[Task, Decode]]) -> list[Part]:
        answers = [each for each in tasks if not _in_prompt(each[1])][: self._n_batch]
        prompts = [each for each in tasks if _in_prompt(each[1])]
        parts = [Part(task, wanted, 1) for task, wanted in answers]
        room = self._n_batch - len(answers)
        if answers and prompts:
            room = min(room, self._budget(len(answers), len(prompts)))
        prompts.sort(key=lambda each: len(each[1].tokens))  # a short one leaves its share to the others
        for number, (task, wanted) in enumerate(prompts):
            count = min(len(wanted.tokens), room // (len(prompts) - number))
            if count:
                parts.append(Part(task, wanted, count))
                room -= count
        return parts

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

    def took(self, parts: Sequence[Part], seconds: float) -> None:
        """Note the duration of a batch."""
        tokens = sum(part.count for part in parts)
        answers = sum(not _in_prompt(part.wanted) for part in parts)
        if answers == len(parts):
            self._step.took(seconds)
            self._meter.together = len(parts)
            if tokens == 1:
                self._meter.decoded(1, seconds)
            return
        if tokens - answers >= MIN_TIMED:
            self._token.took(seconds / tokens)
        if len(parts) == 1:
            self._meter.decoded(tokens, seconds)


def _in_prompt(wanted: Decode) -> bool:
    return wanted.prompt or len(wanted.tokens) > 1
