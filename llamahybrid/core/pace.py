"""How much of the waiting prompts goes into a batch with tokens of running answers.

Each batch reads all weights, and a step of few rows takes hardly less than one of all: answers that run
already could have waited for the prompts beside them.
"""

from __future__ import annotations

import math
from collections import deque

CHUNK_STEPS = 16
"""The prompts of a batch take about as long as so many steps of answers,"""

CHUNK_SECONDS = 0.4
"""or so long, where that is more: two tokens a second still read as a text that is being written. Beside few
answers both are more (`prefill_seconds`)."""

SMALLEST_CHUNK = 32
"""Tokens of a prompt that are decoded at once at least, where it has so many."""

UNMEASURED = 128
"""Tokens of a chunk while nothing was measured."""

CHUNK_OVER = 1.25
"""By so much a chunk may be larger, rather than leave a small rest to a batch of its own."""


class RecentMin:
    """Seconds that something takes now: the fewer of its last two times.

    One may have been held up, by a process that was stopped and goes on, or a machine that slept.
    """

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=2)

    def took(self, seconds: float) -> None:
        """Once more, and so long."""
        self._times.append(seconds)

    @property
    def seconds(self) -> float:
        """0 while it never was timed."""
        return min(self._times, default=0.0)


def prefill_seconds(step_seconds: float, answers: int, prompts: int) -> float:
    """Seconds that prompts may take between two steps of so many answers, whose step takes that long lately.

    The fewer of those that want to decode are answers, the longer: their steps are the less worth it.
    """
    share = max(1, answers) / max(1, answers + prompts)
    return max(CHUNK_STEPS * step_seconds, CHUNK_SECONDS) / share


def chunk_tokens(tokens: int, seconds: float, each: float) -> int:
    """How many of a prompt's next tokens are decoded at once, if that is to take about so long.

    `tokens`: those up to the next border; chunks of them are of one size. `each`: seconds that one of them
    takes; 0: that was not measured.
    """
    largest = largest_chunk(seconds, each)
    if tokens <= CHUNK_OVER * largest:
        return tokens
    return math.ceil(tokens / math.ceil(tokens / largest))


def largest_chunk(seconds: float, each: float) -> int:
    """Tokens of prompts that take about so long; `each` as for `chunk_tokens`."""
    return max(SMALLEST_CHUNK, int(seconds / each)) if each else UNMEASURED
