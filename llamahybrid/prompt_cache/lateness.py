"""Reads that took longer than they would have saved: the place is slow, or there was little to save."""

from __future__ import annotations

import time

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
