"""The size of prompt chunks in batches that also hold tokens of running answers.

Each batch reads all weights, so that small chunks slow the prompts down; large ones delay the answers. A step
of few answers takes hardly less time than one of many, so that chunks are larger beside few answers.
"""

from __future__ import annotations

import math
from collections import deque

CHUNK_STEPS = 16
"""Duration of the prompt chunks in a batch, in steps of answers,"""

CHUNK_SECONDS = 0.4
"""or in seconds, whichever is longer: two tokens a second still read as a text that is being written. Both
grow where few answers run (`prefill_seconds`)."""

SMALLEST_CHUNK = 32
"""Smallest chunk, in tokens, of a prompt that is not shorter."""

UNMEASURED = 128
"""Chunk size before the first measurement, in tokens."""

CHUNK_OVER = 1.25
"""Factor by which a chunk may exceed its size to avoid a small last chunk."""


class RecentMin:
    """A duration in seconds: the shorter of the last two measurements.

    A single measurement may include a pause of the process or the machine.
    """

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=2)

    def took(self, seconds: float) -> None:
        """Add a measurement."""
        self._times.append(seconds)

    @property
    def seconds(self) -> float:
        """0 before the first measurement."""
        return min(self._times, default=0.0)


def prefill_seconds(step_seconds: float, answers: int, prompts: int) -> float:
    """Seconds of prompt chunks between two steps of `answers` running answers.

    `step_seconds`: measured duration of such a step. Inversely proportional to the share of answers among
    all requests that decode.
    """
    share = max(1, answers) / max(1, answers + prompts)
    return max(CHUNK_STEPS * step_seconds, CHUNK_SECONDS) / share


def chunk_tokens(tokens: int, seconds: float, each: float) -> int:
    """The size of the next chunk of a prompt that takes about `seconds`.

    `tokens`: number of tokens up to the next batch border, which is divided into equal chunks. `each`:
    seconds a token; 0 before the first measurement.
    """
    largest = largest_chunk(seconds, each)
    if tokens <= CHUNK_OVER * largest:
        return tokens
    return math.ceil(tokens / math.ceil(tokens / largest))


def largest_chunk(seconds: float, each: float) -> int:
    """Number of prompt tokens that take about `seconds`; `each` as for `chunk_tokens`."""
    return max(SMALLEST_CHUNK, int(seconds / each)) if each else UNMEASURED
