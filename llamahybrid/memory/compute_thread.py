"""ComputeThread: decodes for several requests, so that no interrupt can leave a batch half noted.

Ctrl-C raises between any two lines of the main thread. A batch of one request says what it was when that
happens; one of several is the others' too, and they go on. So it is decoded, and noted for each, in a thread
where no signal is ever raised, and the interrupt hits who waits for it. That this is one thread for all has
another side: OpenMP keeps a team of threads for each caller, and teams fight for cores.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

POLL = 0.1
"""Seconds after which who waits looks again, whether or not a bell rang."""


class _Task:
    """Work that is to be done there."""

    def __init__(self, work: Callable[[], object], after: Callable[[], object] | None) -> None:
        self._work = work
        self._after = after
        self._error: BaseException | None = None
        self.over = False
        self.bell = new_bell()

    def do(self) -> None:
        """Do it; what it raises is for who waits."""
        try:
            self._work()
        except BaseException as error:
            self._error = error

    def tell(self) -> None:
        """Do what comes after it."""
        _do_unwatched(self._after)

    def outcome(self) -> None:
        """Raise what it raised."""
        if self._error is not None:
            raise self._error


class _Desk:
    """Where tasks are handed over; the thread knows this alone, so that it keeps nothing else alive.

    Whether a thread is there is not asked of `Thread.is_alive`: an interrupt inside of that marks a running
    one as stopped (CPython 3.11, Thread._wait_for_tstate_lock), and its task would be done twice.
    """

    def __init__(self) -> None:
        self.task: _Task | None = None
        self.closed = False
        self.bell = new_bell()
        self.thread: threading.Thread | None = None
        """Who serves it, once it does."""
        self._claim = threading.Lock()
        self._process = os.getpid()

    @property
    def serves(self) -> bool:
        """A thread is there, and not in a parent process."""
        return self.thread is not None and self._process == os.getpid()

    @property
    def void(self) -> bool:
        """It is that of a parent process."""
        return self._process != os.getpid()

    def start(self) -> None:
        """Have a thread serve it; one that comes second, after an interrupt here, leaves."""
        threading.Thread(target=self._serve, name="llamahybrid-compute", daemon=True).start()

    def _serve(self) -> None:
        if not self._claim.acquire(blocking=False):
            return
        self.thread = threading.current_thread()
        while not self.closed:
            self.bell.acquire()
            task = self.task
            if task is not None:
                task.do()
                task.over = True  # first: what is not over and lies on no desk is handed over
                self.task = None
                ring(task.bell)
                task.tell()
            del task

    def close(self) -> None:
        """Let the thread end when it has done what it does."""
        self.closed = True
        ring(self.bell)


class ComputeThread:
    """One thread, started when it is first needed; another one takes its place in a forked process."""

    def __init__(self) -> None:
        self._desk: _Desk | None = None

    def run(
        self,
        work: Callable[[], object],
        interrupted: Callable[[], object],
        after: Callable[[], object] | None = None,
    ) -> None:
        """Do `work` there and wait for it; what it raises. Then `after`, which raises nothing, unwaited for.

        An exception that comes while it waits (KeyboardInterrupt) is raised when `work` is through, and
        `interrupted()` is called at once.
        """
        desk = self._desk
        if sys.is_finalizing() or (desk is not None and desk.thread is threading.current_thread()):
            try:
                work()
            finally:
                _do_unwatched(after)
            return
        task = _Task(work, after)
        late: BaseException | None = None
        while not task.over:
            try:
                if late is not None:
                    interrupted()
                self._hand_over(task)
                task.bell.acquire(timeout=POLL)
            except BaseException as error:
                late = error
        if late is not None:
            raise late
        task.outcome()

    def settle(self) -> None:
        """Wait for work whose owner was interrupted twice and waits no more."""
        while (desk := self._desk) is not None and (task := desk.task) is not None and desk.serves:
            task.bell.acquire(timeout=POLL / 100)

    def close(self) -> None:
        """Let the thread end; it is started again if there is work after all."""
        desk, self._desk = self._desk, None
        if desk is not None:
            desk.close()

    def _hand_over(self, task: _Task) -> None:
        """Put a task on the desk, unless it lies there or is done already."""
        desk = self._desk
        if desk is None or desk.void:
            self._desk = desk = _Desk()
            weakref.finalize(self, desk.close).atexit = False
        if not desk.serves:
            try:
                desk.start()
            except RuntimeError:  # no more threads can be had
                task.over = True  # first: what an interrupt leaves is not done twice
                task.do()
                task.tell()
                return
        if desk.task is not task:
            self.settle()
        if desk.task is None and not task.over:
            desk.task = task
        if desk.task is task:
            ring(desk.bell)


def _do_unwatched(work: Callable[[], object] | None) -> None:
    """Do what nobody waits for, nor learns that it failed: the thread goes on."""
    if work is not None:
        with suppress(Exception):
            work()


def new_bell() -> threading.Lock:
    """A lock that is held: who waits acquires it, and `ring` lets one of them."""
    bell = threading.Lock()
    bell.acquire()
    return bell


def ring(bell: threading.Lock) -> None:
    """Wake who waits for it, or is about to; from any thread."""
    with suppress(RuntimeError):  # it rings already
        bell.release()
