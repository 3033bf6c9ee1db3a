"""What reads take; those that took longer than they would have saved, from a slow place or for little."""

from __future__ import annotations

import time
from collections import deque
from statistics import median

READ_SAMPLES = 15
"""Recent reads that say what reading costs."""

LARGE_READ = 1 << 20
"""Bytes from which a read tells the bandwidth."""

FADE_SECONDS = 60.0
"""What was measured counts half so long after the last read. Else a disk that had to spin up, or a network
that was busy, would be taken for slow for ever: nobody would read from it, and see that it is not."""

ENOUGH_SECONDS = 0.2
"""A read that had so long and did not come is the place's fault; one that had less was not worth it."""

REMEMBERED_SECONDS = 5.0
"""For so long nobody waits again who would have to give up as soon."""


class ReadLate(OSError):
    """A read was given up when its time was over; what is read may be sound."""


class Lateness:
    """How long reads were waited for in vain, lately."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._until = 0.0

    def seconds(self) -> float:
        """Longer than so long is needed, as far as is known; 0 where nothing is."""
        return self._seconds if time.monotonic() < self._until else 0.0

    def gave_up(self, seconds: float) -> None:
        """A read had not come after so long."""
        self._seconds = max(seconds, self.seconds())
        self._until = time.monotonic() + REMEMBERED_SECONDS

    def worked(self) -> None:
        """A read came in time."""
        self._seconds = 0.0


class ReadCosts:
    """What reads took, lately."""

    def __init__(self) -> None:
        self._latencies: deque[float] = deque(maxlen=READ_SAMPLES)
        self._rates: deque[float] = deque(maxlen=READ_SAMPLES)
        self._last = 0.0

    def measured(self, n_bytes: int, seconds: float) -> None:
        """A read of so many bytes took so long; a small one says little of the bandwidth."""
        self._last = time.monotonic()
        if n_bytes < LARGE_READ:
            self._latencies.append(seconds)
        else:
            self._rates.append(seconds / n_bytes)

    def seconds(self, n_bytes: int) -> float:
        """What reading so many bytes takes, as measured, less the longer ago that is; 0 while it was not."""
        latency = median(self._latencies) if self._latencies else 0.0
        measured = latency + (n_bytes * median(self._rates) if self._rates else 0.0)
        return float(measured * 0.5 ** ((time.monotonic() - self._last) / FADE_SECONDS))
