"""A thread for work outside RAM: it comes and goes, and every wait for it has a bound.

An interrupt between any two lines, an exception of the work, or a fork leaves a worker that works: the work
lies in a queue without a lock of Python's, and the thread is made anew when it is not there.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from llamahybrid.prompt_cache.block_store import Busy

P = ParamSpec("P")
R = TypeVar("R")

IDLE_SECONDS = 5.0
"""Idle time after which the thread ends."""

REST_SECONDS = 1.0
"""The longest wait for a thread that is to end."""


class Late(Busy):
    """A request has stopped waiting; what it waited for may be sound."""


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
        self._turn = threading.Lock()  # held by the thread that works: an interrupt may have left two
        self._thread: threading.Thread | None = None
        self._given_up: Future[Any] | None = None
        self._rests = False

    def call(self, seconds: float, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The result of `work`, or its exception; raises Late where it takes longer.

        Work that has begun goes on, and while it does all other calls are late at once.
        """
        given_up = self._given_up
        if given_up is not None and not given_up.done():
            raise Late("what was given up still runs")
        self._given_up = None
        future = self.post(work, *args, **kwargs)
        try:
            return future.result(seconds)
        except (NotYet, CancelledError) as error:
            if future.done() and not future.cancelled():
                return future.result()  # it ended just then, or raises such an error itself
            raise Late(f"it took longer than {seconds:.3f} s") from error
        finally:
            if not (future.done() or future.cancel()):  # also where the wait was interrupted
                self._given_up = future
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
        """Have the thread look again for what is due."""
        with suppress(Late):
            self._put(_nothing)

    def rest(self) -> None:
        """Let the thread end once nothing is due."""
        with self._lock:
            self._rests, thread = True, self._thread
            self._inbox.put(_nothing)
        if thread is not None and thread is not threading.current_thread():
            thread.join(REST_SECONDS)

    def _put(self, do: Callable[[], None]) -> None:
        self._inbox.put(do)
        with self._lock:
            self._rests = False
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    self._thread.start()
                except RuntimeError as error:  # the interpreter is ending, or there are too many threads
                    raise Late(str(error)) from error

    def _run(self) -> None:
        with self._turn:
            try:
                while self._goes_on():
                    pass
            finally:
                waits = self._leave()
                self._ended()
                if waits:
                    self.wake()

    def _leave(self) -> bool:
        """Note that an exception ends this thread; return whether work waits for another one."""
        with self._lock:
            if self._thread is not threading.current_thread():
                return False
            self._thread = None
            return not self._inbox.empty()

    def _goes_on(self) -> bool:
        """Do one thing, or wait for one; False when the thread is to end."""
        wait = self._tick() if self._inbox.empty() else 0.0
        if not self._rests or wait == 0.0 or not self._inbox.empty():
            try:
                do = self._inbox.get(timeout=IDLE_SECONDS if wait is None else min(wait, IDLE_SECONDS))
            except queue.Empty:
                if wait is not None:
                    return True
            else:
                do()
                return True
        with self._lock:
            ends = self._inbox.empty()
            if ends:
                self._thread = None
        return not ends
