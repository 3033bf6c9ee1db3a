"""Work that is done later, on a thread of its own that comes and goes: the disk tier's writes."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

IDLE_SECONDS = 1.0
"""The thread ends when nothing came for so long."""

EXIT_SECONDS = 60.0
"""How long the interpreter's end waits for what is queued."""

Job = TypeVar("Job")


class WriteBehind(Generic[Job]):
    """A queue and its thread. Jobs should name their data by weak references: the queue has no limit."""

    def __init__(self, do: Callable[[Job], None]) -> None:
        """`do(job)` runs on the thread and must not raise."""
        self._do = do
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self._thread: threading.Thread | None = None
        _open.add(self)

    def add(self, jobs: Iterable[Job]) -> None:
        """Have jobs done, in this order, behind those that wait."""
        with self._changed:
            self._jobs.extend(jobs)
            self._changed.notify_all()
            if self._jobs and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._run, name="llamahybrid-disk", daemon=True)
                self._thread.start()

    def flush(self, seconds: float | None = None) -> bool:
        """Wait until everything is done, at most so long; False if it is not."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._busy, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                if not self._changed.wait_for(lambda: bool(self._jobs), IDLE_SECONDS):
                    self._thread = None
                    return
                job, self._busy = self._jobs.popleft(), True
            self._do(job)


def _flush_all() -> None:
    for queue in list(_open):
        queue.flush(EXIT_SECONDS)


_open: weakref.WeakSet[WriteBehind[Any]] = weakref.WeakSet()
atexit.register(_flush_all)
