"""Experience with a store outside RAM: counts, the pause after failures, and the time that reading takes."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from statistics import median

logger = logging.getLogger("llamahybrid")

FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS = 1.0, 60.0
"""The pause after a failure of a store; doubled by each further failure."""

READ_SAMPLES = 15
"""Recent reads that say what reading costs."""

LARGE_READ = 1 << 20
"""Bytes from which a read tells the bandwidth."""

FADE_SECONDS = 60.0
"""A measured cost counts half this long after the last read: a disk had to spin up, a network was busy."""


@dataclass
class Counts:
    """Counters of this process at a store."""

    written: int = 0
    written_bytes: int = 0
    loaded: int = 0
    damaged: int = 0
    """Records that did not prove right, twice; they are removed."""
    gone: int = 0
    """Records that were not there any more when they were to be read."""
    late: int = 0
    """Looks that another process's lock, or a store that was not open yet, made a miss; and removals that a
    longer write delays."""
    dropped: int = 0
    """Evicted from RAM before they could be written."""
    superseded: int = 0
    """States that waited to be written until the conversation had gone on: they never were."""
    deferred: int = 0
    """Not written because the hour's `disk_write_bytes` were used up."""
    evicted: int = 0
    errors: int = 0
    """Times that the store failed; it is left alone for a while then."""


class Breaker:
    """The pause after failures of a store, and one warning of them."""

    def __init__(self, what: str, counts: Counts) -> None:
        """`what`: "reading from the disk cache", as the warning names it."""
        self._counts = counts
        self.broken = False
        """The last try failed."""
        self._what = what
        self._warned = False
        self._until = 0.0
        self._seconds = 0.0

    def left(self) -> float:
        """Seconds until the store may be tried again; 0: now."""
        return max(0.0, self._until - time.monotonic())

    def failed(self, error: BaseException) -> None:
        """Count a failure, and leave the store alone, longer each time."""
        self._counts.errors += 1
        self.broken = True
        self._seconds = min(LONGEST_BACKOFF_SECONDS, max(FIRST_BACKOFF_SECONDS, 2 * self._seconds))
        self._until = time.monotonic() + self._seconds
        self.warn(error)

    def warn(self, error: BaseException) -> None:
        """Log the first failure."""
        if not self._warned:
            self._warned = True
            logger.warning("%s failed, and is tried again later: %s", self._what, error)

    def worked(self) -> None:
        """Note a success."""
        self.broken, self._seconds = False, 0.0


class ReadCosts:
    """Measured times of recent reads."""

    def __init__(self) -> None:
        self._latencies: deque[float] = deque(maxlen=READ_SAMPLES)
        self._rates: deque[float] = deque(maxlen=READ_SAMPLES)
        self._last = 0.0

    def measured(self, n_bytes: int, seconds: float) -> None:
        """Note the time of a read; a small one says little of the bandwidth."""
        self._last = time.monotonic()
        if n_bytes < LARGE_READ:
            self._latencies.append(seconds)
        else:
            self._rates.append(seconds / n_bytes)

    def seconds(self, n_bytes: int) -> float:
        """Expected time of a read, fading with the age of the measurement; 0 while not measured."""
        latency = median(self._latencies) if self._latencies else 0.0
        measured = latency + (n_bytes * median(self._rates) if self._rates else 0.0)
        age = max(0.0, time.monotonic() - self._last)  # a clock that a test has frozen may go back
        return float(measured * 0.5 ** (age / FADE_SECONDS))
