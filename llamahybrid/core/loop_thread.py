"""LoopThread: the thread of a decode loop, started on first use and anew in a forked process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


class LoopThread:
    """A thread that is started once, even where a start is interrupted or two threads ask for it."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Forget the thread of the process that this one was forked from."""
        self._start = threading.RLock()  # a signal handler may ask for something in the middle of a start
        self._claim = threading.Lock()
        """Held by the thread that serves, for ever."""
        self._started: threading.Thread | None = None
        self._server: threading.Thread | None = None
        self._process = os.getpid()  # last: from here on `forked` says no

    @property
    def _thread(self) -> threading.Thread | None:
        """The thread that serves, or that was started to."""
        return self._server or self._started

    @property
    def here(self) -> bool:
        """The calling thread is this one."""
        return self._thread is threading.current_thread()

    @property
    def forked(self) -> bool:
        """This process was forked from the thread's, and has none."""
        return self._process != os.getpid()

    @property
    def asked(self) -> bool:
        """Its start was begun, in this process or in the one that it was forked from."""
        return self._thread is not None

    @property
    def alive(self) -> bool:
        """The thread runs, in this process."""
        return self._thread is not None and self._thread.is_alive() and not self.forked

    def settled(self) -> bool:
        """Wait for a start that another thread has begun; return `alive`."""
        with self._start:
            return self.alive

    def start(self, serve: Callable[[], None]) -> None:
        """Have it call `serve()`, if no start is over yet.

        Raises RuntimeError where the system has no thread to give.
        """
        if self._thread is not None and self._thread.ident is not None:
            return
        with self._start:
            if not self._claim.locked():  # of several half started ones the first serves
                self._started = threading.Thread(
                    target=self._run, args=(serve,), name="llamahybrid-decode", daemon=True
                )
                self._started.start()

    def _run(self, serve: Callable[[], None]) -> None:
        if not self._claim.acquire(blocking=False):
            return  # the start of another was interrupted, but it serves
        self._server = threading.current_thread()
        serve()

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread, at most `seconds`."""
        if self._thread is not None:
            self._thread.join(seconds)
