"""StepLock: held during a step, and replaced where an interrupted thread left without giving it back.

Whoever is replaced although it lives, would go on in the middle of a step without the lock, beside another.
And to live does not show: a thread that has just got the lock is not its owner yet, by what an RLock says,
until it has CPython's interpreter lock, too, for which it may wait long where others want the processor.

So each side first says what it is about, and then looks at what the other one said. Who takes a lock becomes
its owner, then looks whether it is doubted; who would replace it says that it is doubted, for good, and then
looks who the owner is. One of the two sees the other. A doubted lock serves whoever has it until that one
gives it back, and is replaced by the next one that gets it.

Nothing is ever taken back or written over: a lock that was replaced says by which, once. However long ago
somebody looked, and whatever line an interrupt came at, it changes nothing for a lock that came later.
"""

from __future__ import annotations

import re
import threading
import time

from llamahybrid.request.line import POLL
from llamahybrid.request.step_frames import StepFrames


class _Lock:
    """A lock, until another one takes its place."""

    __slots__ = ("doubted", "next", "rlock")

    def __init__(self) -> None:
        self.rlock = threading.RLock()
        self.doubted = False
        """Who takes it from now on replaces it."""
        self.next: list[_Lock] = []
        """By what it was replaced: the first; several may have done so at once."""

    @property
    def mine(self) -> bool:
        """The calling thread has it."""
        return bool(self.rlock._is_owned())  # type: ignore[attr-defined]

    def replace(self) -> None:
        """It serves no more. Only where nobody is in with it, found after it was doubted."""
        self.next.append(_Lock())


class StepLock:
    """A lock whose holder has to be in the middle of a step."""

    def __init__(self, frames: StepFrames) -> None:
        """`frames`: who is in a step."""
        self._frames = frames
        self._first = _Lock()
        self._wanting: set[int] = set()
        """Threads that are about to take it."""
        self._taken = 0
        """How often it was."""
        self._suspect: tuple[object, ...] = ()
        self._suspected_at = 0.0

    @property
    def _lock(self) -> _Lock:
        """The one that serves."""
        lock = self._first
        while lock.next:
            # an older one, written by a thread that was slow, leads to the same
            self._first = lock = lock.next[0]
        return lock

    def held(self) -> bool:
        """The calling thread has it. Asked many times a token."""
        lock = self._first
        if lock.next:
            lock = self._lock
        return bool(lock.rlock._is_owned())  # type: ignore[attr-defined]

    @property
    def wanted(self) -> int:
        """Threads that are about to take it; one that an interrupt took away from there is none."""
        return len(self._wanting) and sum(map(self._frames.run_in, list(self._wanting)))

    def want(self) -> None:
        """The calling thread is about to take it."""
        self._wanting.add(threading.get_ident())

    def want_no_more(self) -> None:
        """It has it, or went away."""
        self._wanting.discard(threading.get_ident())

    def acquire(self, wait: bool = True) -> bool:
        """Take it; False if others have it, with `wait` for `POLL` seconds."""
        while True:
            lock = self._first
            if lock.next:
                lock = self._lock
            again = lock.rlock._is_owned()  # type: ignore[attr-defined]
            if not lock.rlock.acquire(wait, POLL if wait else -1):
                return False
            if again or not lock.doubted:
                self._taken += 1
                return True
            lock.replace()  # it was ours: nobody is in with it
            lock.rlock.release()

    def release(self) -> None:
        """Give it back, if the calling thread has it still."""
        lock = self._first
        if lock.next:
            lock = self._lock
        if lock.rlock._is_owned():  # type: ignore[attr-defined]
            lock.rlock.release()

    def give_up(self) -> None:
        """The calling thread is in no step: it gives back what an interrupt left it, however often taken."""
        lock = self._lock
        while lock.mine:
            lock.rlock.release()

    def heal(self) -> bool:
        """Replace it if its holder is in no step: an interrupt came before it was given back; True if so."""
        lock, taken = self._lock, self._taken
        if (owner := self._left_by(lock)) is None:
            self._suspect = ()
            return False
        # Between two looks the owner may have left, and somebody come: only one that stays is doubted.
        suspect, now = (lock, owner, taken), time.monotonic()
        if self._suspect != suspect:
            self._suspect, self._suspected_at = suspect, now
            return False
        if now - self._suspected_at < POLL / 2:
            return False
        lock.doubted = True  # from here on nobody goes in with it
        if self._left_by(lock) is None:  # somebody had, and keeps it
            return False
        lock.replace()
        return True

    def _left_by(self, lock: _Lock) -> str | None:
        """Who has a lock and is in no step, "0" for one that nobody is known to have; None if all is well."""
        if lock.rlock.acquire(blocking=False):
            lock.rlock.release()
            return None
        owner = re.search(r"owner=(\d+)", repr(lock.rlock))
        return None if owner is None or self._frames.run_in(int(owner[1])) else owner[1]
