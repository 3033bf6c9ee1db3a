"""Scheduler: which tokens the next batch holds.

A batch holds one token of each running answer and chunks of the waiting prompts. Each batch reads all
weights, so that small chunks slow the prompts down; large ones delay the answers. A step of few answers takes
hardly less time than one of many, so that chunks are larger beside few answers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

from llamahybrid.core.request import Decode, Task
from llamahybrid.core.slots import Slots
from llamahybrid.memory.costs import CostMeter

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

UNNOTICED_SECONDS = 0.1
"""Duration of a batch during which nobody notices that Ctrl-C waits for it."""


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

    def grace(self, slots: Slots) -> float:
        """Seconds for which a batch still waits for the next tokens of answers with fast readers."""
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

    def is_short(self, tokens: int) -> bool:
        """Return whether a batch of a prompt is expected to take less than `UNNOTICED_SECONDS`."""
        costs = self._meter.costs()
        seconds = tokens * costs.prefill_seconds + costs.token_seconds
        return costs.prefill_seconds > 0 and seconds < UNNOTICED_SECONDS

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
