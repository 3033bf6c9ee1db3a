"""Work that is done later, on a thread of its own that comes and goes: the disk tier's writes.

An interrupt between any two lines, an exception of a job, or a fork leaves a queue that works: what waits is
a list under a plain lock, the thread is made anew when it is not there, and nothing waits without a bound.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

logger = logging.getLogger("llamahybrid")

IDLE_SECONDS = 1.0
"""Idle time after which the thread ends."""

FLUSH_SECONDS = 60.0
"""The longest wait for the queue by default, and at the interpreter's end."""

REST_SECONDS = 1.0

POLL_SECONDS = 0.002
"""Interval of polling. A condition variable would stay locked after an interrupt at the wrong line."""


class Work(Protocol):
    """A job of the queue."""

    due: float
    """The earliest `time.monotonic` to do the job."""
    cancelled: bool
    """The job must not be done; one that runs must leave nothing behind."""
    refused: bool
    """Tried once, the job waits for another try (`WriteBehind.again`)."""


Job = TypeVar("Job", bound=Work)


class WriteBehind(Generic[Job]):
    """A queue and its thread. Jobs should name their data by place: the queue has no limit."""

    def __init__(self, do: Callable[[Job], None], ended: Callable[[], None]) -> None:
        """`do(job)` runs on the thread; what it raises is counted, logged once, and ends nothing.

        `ended()` is called last on a thread that ends.
        """
        self._do = do
        self._ended = ended
        self.failures = 0
        """Exceptions of jobs."""
        self.start_anew()
        _open.add(self)

    def start_anew(self) -> None:
        """Empty the queue: the parent of a forked process does its own jobs."""
        self._jobs: list[Job] = []
        self.rests = False
        """Nothing is expected any more."""
        self._running: Job | None = None
        self.lock = threading.RLock()  # a finaliser may come in again on the same thread
        self._turn = threading.Lock()  # held by the thread that works
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def change(self, change: Callable[[list[Job]], Iterable[Job]]) -> None:
        """Replace the waiting jobs by `change(waiting jobs)`; a running job is not among them."""
        with self.lock:
            self.rests = False
            self._jobs = [job for job in change(self._jobs) if not job.cancelled]
        self._go_on()

    def again(self, job: Job, seconds: float) -> None:
        """Queue a running job that failed for another try in `seconds`, or at the next flush."""
        with self.lock:
            job.due, job.refused = time.monotonic() + seconds, True
            if not job.cancelled:
                self._jobs = [*self._jobs, job]

    def cancel(self, which: Callable[[Job], bool], seconds: float) -> bool:
        """Cancel jobs, and wait at most `seconds` for one of them that runs; False if it still does.

        A running job sees its mark, and leaves nothing behind.
        """
        with self.lock:
            for job in filter(which, self._jobs):
                job.cancelled = True
            self._jobs = [job for job in self._jobs if not job.cancelled]
            running = self._running
            if running is None or not which(running):
                return True
            running.cancelled = True
        return _waited(lambda: self._running is not running, seconds)

    def flush(self, seconds: float | None = None) -> bool:
        """Try all jobs now and wait at most `seconds` (None: `FLUSH_SECONDS`); False if that takes longer.

        Jobs that fail wait for their next try.
        """
        with self.lock:
            for job in self._jobs:
                job.due, job.refused = 0.0, False
        self._go_on()
        end = time.monotonic() + (FLUSH_SECONDS if seconds is None else seconds)
        return _waited(self._is_idle, end - time.monotonic())

    def rest(self) -> None:
        """Let the thread end as soon as no job waits, except for another try; an idle one is joined."""
        with self.lock:
            self.rests, thread = True, self._thread
            self._wake.put(None)
        if thread is not None and thread is not threading.current_thread() and self._running is None:
            thread.join(REST_SECONDS)

    def __len__(self) -> int:
        """Jobs that are not done; without the lock, so that a signal handler may ask at any time."""
        return len(self._jobs) + (self._running is not None)

    def _is_idle(self) -> bool:
        with self.lock:
            return self._running is None and all(job.refused for job in self._jobs)

    def _go_on(self) -> None:
        """Wake the thread; make one if there is none."""
        with self.lock:
            if not self._jobs:
                return
            if self._thread is not None and self._thread.is_alive():
                self._wake.put(None)
                return
            self._thread = threading.Thread(target=self._run, name="llamahybrid-disk", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # the interpreter is ending, or there are too many threads
                self._failed(error)

    def _run(self) -> None:
        with self._turn:  # an interrupt may have left two threads: one after the other
            while True:
                job, wait = self._next()
                if job is not None:
                    try:
                        self._do(job)
                    except BaseException as error:  # the thread must go on
                        self._failed(error)
                    self._running = None
                    continue
                try:
                    self._wake.get(timeout=min(wait, IDLE_SECONDS))
                    idle = False
                except queue.Empty:
                    idle = True
                with self.lock:
                    ends = (self.rests and all(job.refused for job in self._jobs)) or (
                        idle and not self._jobs
                    )
                    if ends:
                        self._thread = None
                if ends:
                    self._ended()
                    return

    def _next(self) -> tuple[Job | None, float]:
        """Return the first job that is due, which runs from now on, or the seconds until one is."""
        with self.lock:
            now = time.monotonic()
            job = next((job for job in self._jobs if job.due <= now), None)
            if job is not None:
                self._running = job
                self._jobs = [other for other in self._jobs if other is not job]
                return job, 0.0
            return None, min((job.due - now for job in self._jobs), default=IDLE_SECONDS)

    def _failed(self, error: BaseException) -> None:
        self.failures += 1
        if self.failures == 1:
            logger.warning("a write to the disk cache failed: %s: %s", type(error).__name__, error)


def _waited(done: Callable[[], bool], seconds: float) -> bool:
    """Wait at most `seconds` until `done()`; return whether that came true."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() >= end:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _flush_all() -> None:
    end = time.monotonic() + FLUSH_SECONDS
    for writer in list(_open):
        writer.flush(max(0.0, end - time.monotonic()))
        if len(writer) and not writer.rests:  # else `close` has warned
            logger.warning("%d states were not written to the disk cache", len(writer))


def _in_child() -> None:
    for writer in list(_open):
        writer.start_anew()


_open: weakref.WeakSet[WriteBehind[Any]] = weakref.WeakSet()
atexit.register(_flush_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
