"""Waits of requests outside RAM: one thread, a bound on each wait, a pause after a failure."""

from __future__ import annotations

import errno
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from statistics import median
from typing import Any, ParamSpec, TypeVar

from llamahybrid.prompt_cache.disk import Busy

P = ParamSpec("P")
R = TypeVar("R")

FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS = 1.0, 60.0
"""The pause after a failure of a store; doubled by each further failure."""

REST_SECONDS = 1.0

READ_SAMPLES = 15
"""Recent reads that say what reading costs."""

LARGE_READ = 1 << 20
"""Bytes from which a read tells the bandwidth."""

FADE_SECONDS = 60.0
"""A measured cost counts half this long after the last read: a disk had to spin up, a network was busy."""

_ONE_FILE = frozenset((errno.EACCES, errno.EPERM, errno.EIO, errno.ELOOP))


def affects_one_file(error: BaseException) -> bool:
    """An error is about one file or folder (its permissions, a bad sector), not about the store."""
    return isinstance(error, NotADirectoryError) or (isinstance(error, OSError) and error.errno in _ONE_FILE)


class Late(Busy):
    """A request has stopped waiting; what it waited for may be sound."""


class Reader:
    """A thread for what a request waits for, which it may give up: the thread then goes on alone."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.fork()
        _readers.add(self)

    def fork(self) -> None:
        """In a process that was forked: its parent's thread is not there."""
        self._pool: ThreadPoolExecutor | None = None
        self._given_up: Future[Any] | None = None

    def call(self, seconds: float, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The result of `work`, or its exception; raises Late where it takes longer.

        While a call that was given up still runs, all others are late at once.
        """
        if self._given_up is not None and not self._given_up.done():
            raise Late("a read that was given up still runs")
        self._given_up = None
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, self._name)
        try:
            future = self._pool.submit(work, *args, **kwargs)
        except RuntimeError as error:  # the interpreter is ending
            raise Late(str(error)) from error
        try:
            return future.result(seconds)
        except (NotYet, CancelledError) as error:
            if future.done() and not future.cancelled():
                raise
            if not future.cancel():
                self._given_up = future
            raise Late(f"it took longer than {seconds:.3f} s") from error
        finally:
            del future  # its result is not to stay here

    def rest(self, last: Callable[[], None]) -> None:
        """End the thread, which calls `last` before; the next call makes another."""
        if self._pool is None:
            return
        with suppress(OSError):
            self.call(REST_SECONDS, last)
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)


class Breaker:
    """The pause after failures of a store."""

    def __init__(self) -> None:
        self._until = 0.0
        self._seconds = 0.0

    def left(self) -> float:
        """Seconds until it may be tried."""
        return max(0.0, self._until - time.monotonic())

    def failed(self) -> None:
        """Leave it alone, longer each time."""
        self._seconds = min(LONGEST_BACKOFF_SECONDS, max(FIRST_BACKOFF_SECONDS, 2 * self._seconds))
        self._until = time.monotonic() + self._seconds

    def worked(self) -> None:
        """Note a success."""
        self._seconds = 0.0


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
        return float(measured * 0.5 ** ((time.monotonic() - self._last) / FADE_SECONDS))


def _in_child() -> None:
    for reader in list(_readers):
        reader.fork()


_readers: weakref.WeakSet[Reader] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
