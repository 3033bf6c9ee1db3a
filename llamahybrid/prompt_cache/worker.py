"""A thread for work outside RAM: it comes and goes, and every wait for it has a bound.

An interrupt between any two lines, an exception of the work, or a fork leaves a usable worker: the work
lies in a queue without a lock of Python's, and a missing thread is made anew.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from llamahybrid.prompt_cache.block_store import Busy

P = ParamSpec("P")
R = TypeVar("R")

IDLE_SECONDS = 5.0
"""Idle time after which the thread ends."""

STOP_SECONDS = 1.0
"""The longest wait for a thread that is to end."""


class Late(Busy):
    """A request has stopped waiting; the store may be sound."""


def _nothing() -> None:
    return None


class Worker:
    """One thread: it does the work that is handed over, in order, and between that the work that is due."""

    def __init__(
        self, name: str, ended: Callable[[], None], tick: Callable[[], float | None] = _nothing
    ) -> None:
        """`ended()` is called last on a thread that ends.

        `tick()` does one thing that is due, if there is one, and returns the seconds until the next one; None
        where nothing waits. Work that is handed over comes first. An exception of `tick` ends the thread.
        """
        self._name = name
        self._ended = ended
        self._tick = tick
        self.fork()

    def fork(self) -> None:
        """In a process that was forked: the parent's thread is not there, and does the parent's work."""
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.RLock()  # a finaliser may come in again on the same thread
        self._running = threading.Lock()  # an interrupt may have made two threads: one works at a time
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._late_work: Future[Any] | None = None
        """Work that nobody waits for any more."""

    def call(self, seconds: float, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the result of `work`, or raise its exception, or Late where it takes longer.

        Work that has begun goes on, and while it does all other calls are late at once.
        """
        late_work = self._late_work
        if late_work is not None and not late_work.done():
            raise Late("an earlier call still runs")
        self._late_work = None
        future = self.post(work, *args, **kwargs)
        try:
            wait([future], seconds)
            if not future.done():
                raise Late(f"it took longer than {seconds:.3f} s")
            return future.result()
        finally:
            if not (future.done() or future.cancel()):  # also where the wait was interrupted
                self._late_work = future
            del future  # its result is not to stay here

    def post(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Have `work` done next. Raises Late where no thread can be made."""
        future: Future[R] = Future()

        def do() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(*args, **kwargs))
                except BaseException as error:  # the thread must go on
                    future.set_exception(error)

        self._put(do)
        return future

    def wake(self) -> None:
        """Have the thread look again for due work."""
        with suppress(Late):
            self._put(_nothing)

    def stop(self) -> None:
        """Let the thread end once its inbox is empty; later work starts another one."""
        with self._lock:
            self._stopping, thread = True, self._thread
            self._inbox.put(_nothing)
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOP_SECONDS)

    def _put(self, do: Callable[[], None]) -> None:
        self._inbox.put(do)
        with self._lock:
            self._stopping = False
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    self._thread.start()
                except RuntimeError as error:  # the interpreter is ending, or there are too many threads
                    raise Late(str(error)) from error

    def _run(self) -> None:
        with self._running:
            try:
                while not self._may_end(self._step()):
                    pass
            finally:
                failed = self._thread is threading.current_thread()  # an exception ends it
                if failed:
                    self._thread = None
                self._ended()
                if failed and not self._inbox.empty():
                    self.wake()

    def _step(self) -> float | None:
        """Do one thing, or wait for one; return the seconds until work is due, 0 after work."""
        left = self._tick() if self._inbox.empty() else 0.0
        longest = 0.0 if self._stopping else IDLE_SECONDS
        try:
            do = self._inbox.get(timeout=longest if left is None else min(left, longest))
        except queue.Empty:
            return left
        do()
        return 0.0

    def _may_end(self, left: float | None) -> bool:
        """Return whether the thread is to end, as nothing waits, and note it."""
        if left == 0.0 or (left is not None and not self._stopping):
            return False
        with self._lock:
            ends = self._inbox.empty()
            if ends:
                self._thread = None
        return ends
