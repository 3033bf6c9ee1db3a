"""LoopThread: the thread of a decode loop, started on first use, and again in a forked process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType


class LoopThread:
    """A thread that is started once, even where a start is interrupted or two threads ask for it."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Forget the thread of the process that this one was forked from."""
        self._start = threading.RLock()  # a signal handler may ask for something in the middle of a start
        self._claim = threading.Lock()
        """Acquired by the thread that serves, and never released."""
        self._started: threading.Thread | None = None
        self._server: threading.Thread | None = None
        self.serves = False
        """The thread has begun to serve."""

    @property
    def _thread(self) -> threading.Thread | None:
        """The thread that serves, or that was started to."""
        return self._server or self._started

    @property
    def here(self) -> bool:
        """The calling thread is this one."""
        return self._thread is threading.current_thread()

    @property
    def asked(self) -> bool:
        """Its start was begun."""
        return self._thread is not None

    @property
    def alive(self) -> bool:
        """The thread runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def frame(self) -> FrameType | None:
        """The innermost frame of Python that it executes."""
        ident = None if self._thread is None else self._thread.ident
        return None if ident is None else sys._current_frames().get(ident)

    def settled(self) -> bool:
        """Wait for a start that another thread has begun; return `alive`."""
        with self._start:
            return self.alive

    def start(self, serve: Callable[[], None]) -> None:
        """Start the thread with `serve()`, unless it was started before.

        Raises RuntimeError where the system refuses a new thread.
        """
        if self._thread is not None and self._thread.ident is not None:
            return
        with self._start:
            if not self._claim.locked():  # the first of several half-started ones serves
                self._started = threading.Thread(
                    target=self._run, args=(serve,), name="llamahybrid-decode", daemon=True
                )
                try:
                    self._started.start()
                except RuntimeError as error:
                    interrupt = error.__context__
                    if interrupt is None or str(error) != "release unlocked lock":
                        raise
                    raise interrupt from None  # it came where CPython waits for the new thread

    def _run(self, serve: Callable[[], None]) -> None:
        if not self._claim.acquire(blocking=False):
            return  # another thread serves, although its start was interrupted
        self._server = threading.current_thread()
        self.serves = True
        serve()

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread, at most `seconds`."""
        if self._thread is not None:
            self._thread.join(seconds)
