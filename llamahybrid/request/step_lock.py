"""StepLock: held during a step, and replaced where an interrupted thread left without giving it back."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

from llamahybrid.request.line import POLL
from llamahybrid.request.step_frames import StepFrames


class StepLock:
    """A lock whose holder has to be in the middle of a step."""

    def __init__(self, frames: StepFrames) -> None:
        """`frames`: who is in a step."""
        self._frames = frames
        self._lock = threading.RLock()
        self._wanting: set[int] = set()
        """Threads that are about to take it."""
        self._taken = 0
        """How often it was."""
        self._suspect: tuple[object, ...] = ()
        self._suspected_at = 0.0

    @property
    def held(self) -> bool:
        """The calling thread has it."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]

    @property
    def wanted(self) -> bool:
        """A thread is about to take it."""
        return bool(self._wanting)

    def want(self) -> None:
        """The calling thread is about to take it."""
        self._wanting.add(threading.get_ident())

    def want_no_more(self) -> None:
        """It has it, or went away."""
        self._wanting.discard(threading.get_ident())

    def acquire(self, wait: bool = True) -> bool:
        """Take it; False if others have it, with `wait` for `POLL` seconds."""
        if not self._lock.acquire(wait, POLL if wait else -1):
            return False
        self._taken += 1
        return True

    def release(self) -> None:
        """Give it back, if the calling thread has it still."""
        if self.held:
            self._lock.release()

    def heal(self, nobody_in: Callable[[], object]) -> bool:
        """Replace it if its holder is in no step: an interrupt came before it was given back; True if so.

        `nobody_in` is called where nobody is in a step, before somebody can be.
        """
        lock, taken = self._lock, self._taken
        if lock.acquire(blocking=False):
            try:
                nobody_in()
            finally:
                lock.release()
            return False
        owner = re.search(r"owner=(\d+)", repr(lock))
        if owner is None or self._frames.run_in(int(owner[1])):
            self._suspect = ()
            return False
        # Between two looks the owner may have left, and somebody come: only one that stays is replaced.
        suspect, now = (lock, owner[1], taken), time.monotonic()
        if self._suspect != suspect:
            self._suspect, self._suspected_at = suspect, now
            return False
        if now - self._suspected_at < POLL / 2 or self._lock is not lock:  # another one who waits replaced it
            return False
        nobody_in()
        self.replace()
        return True

    def replace(self) -> None:
        """A new one, which nobody has."""
        self._lock = threading.RLock()
