"""Pieces: how much of a prompt is decoded between two steps of the answers that wait for it.

Each piece costs a batch that reads all weights, and each step between two one of few rows, which takes hardly
less than one of all: the requests that answer already could have waited for those that decode their prompts.
"""

from __future__ import annotations

import math
from collections import deque

PIECE_STEPS = 16
"""A piece takes about as long as so many steps,"""

PIECE_SECONDS = 0.4
"""or so long, where that is more: about two tokens a second still read as a text that is being written."""

SMALLEST_PIECE = 32

UNMEASURED = 128
"""Tokens of a piece while nothing was measured."""

PIECE_OVER = 1.25
"""By so much a piece may be larger, rather than leave a small rest to a batch of its own."""


class Lately:
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


def pace(step_seconds: float, answers: int, prompts: int) -> float:
    """Seconds that prompts may take between two steps of so many answers, the last of which took that long.

    The fewer of those that want to decode are answers, the longer: their steps are the less worth it.
    """
    share = max(1, answers) / max(1, answers + prompts)
    return max(PIECE_STEPS * step_seconds, PIECE_SECONDS) / share


def piece_of(tokens: int, seconds: float, each: float) -> int:
    """How many of a prompt's next tokens are decoded at once, if that is to take about so long.

    `tokens`: those up to the next border; pieces of them are of one size. `each`: seconds that one of them
    takes; 0: that was not measured.
    """
    largest = max(SMALLEST_PIECE, int(seconds / each)) if each else UNMEASURED
    if tokens <= PIECE_OVER * largest:
        return tokens
    return math.ceil(tokens / math.ceil(tokens / largest))
