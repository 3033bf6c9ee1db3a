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
"""The thread ends when nothing came for so long."""

FLUSH_SECONDS = 60.0
"""How long is waited for what is queued, unless somebody says otherwise; the interpreter's end, too."""

REST_SECONDS = 1.0

POLL_SECONDS = 0.002
"""How often who waits looks. A condition variable would stay locked after an interrupt at the wrong line."""


class Work(Protocol):
    """What a job says of itself."""

    due: float
    """`time.monotonic` from which on it is done."""
    cancelled: bool
    """It is not to be done, or to leave nothing behind."""
    refused: bool
    """It was tried, and waits to be tried once more (`WriteBehind.again`)."""


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
        """Nothing waits and nothing runs: in a process that was forked, whatever its parent had to do."""
        self._jobs: list[Job] = []
        self.rests = False
        """Nothing is expected any more."""
        self._running: Job | None = None
        self.lock = threading.RLock()  # who comes in again, from a finaliser, does not wait for itself
        self._turn = threading.Lock()  # held by the thread that works
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def change(self, change: Callable[[list[Job]], Iterable[Job]]) -> None:
        """Have `change(jobs that wait)` say which jobs wait from now on; what runs is not among them."""
        with self.lock:
            self.rests = False
            self._jobs = [job for job in change(self._jobs) if not job.cancelled]
        self._go_on()

    def again(self, job: Job, seconds: float) -> None:
        """A job that runs could not be done: try it again after so long, or when everything is flushed."""
        with self.lock:
            job.due, job.refused = time.monotonic() + seconds, True
            if not job.cancelled:
                self._jobs = [*self._jobs, job]

    def cancel(self, which: Callable[[Job], bool], seconds: float) -> bool:
        """Take jobs out, and wait for one of them that runs, at most so long; False if it still does.

        Each is marked as cancelled: it is for one that runs to leave nothing behind.
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
        """Have everything tried now and wait for it, at most so long; False if that takes longer.

        What could not be done waits for its next try. None: `FLUSH_SECONDS`.
        """
        with self.lock:
            for job in self._jobs:
                job.due, job.refused = 0.0, False
        self._go_on()
        end = time.monotonic() + (FLUSH_SECONDS if seconds is None else seconds)
        return _waited(self._is_idle, end - time.monotonic())

    def rest(self) -> None:
        """Nothing is expected any more: the thread ends as soon as nothing waits but for another try.

        A thread that has nothing to do is waited for.
        """
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
                    except BaseException as error:  # nobody would ever write again
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
        """The first job that is due, which runs from now on; or how long none is."""
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
    """Wait until it is so, at most so long; whether it is."""
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
        if len(writer) and not writer.rests:  # who closed it was told
            logger.warning("%d states were not written to the disk cache", len(writer))


def _in_child() -> None:
    for writer in list(_open):
        writer.start_anew()


_open: weakref.WeakSet[WriteBehind[Any]] = weakref.WeakSet()
atexit.register(_flush_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
