"""The lock of a store: an exception in the middle of a change costs what the store holds, and no more.

A KeyboardInterrupt may come between any two bytecodes. Nothing is undone then: the next call finds the mark
of a change that did not come to its end, and starts the store anew, so that half a change is never read.

A thread that has the lock may come in again: a finaliser that the collector runs there, a signal or log
handler. Such a call may look; what it is to change another thread changes, behind the change that runs.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

logger = logging.getLogger("llamahybrid")

P = ParamSpec("P")
R = TypeVar("R")


class Pause(Exception):
    """Raised in a guarded method where it may begin again: something takes time and comes first."""

    def spend(self, store: Any) -> None:
        """Do that, without the lock; then the method is called again."""
        raise NotImplementedError


class Guard:
    """The lock of one store."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changing = False
        """A change has begun and has not come to its end."""
        self.changes = 0
        """Changes that have begun."""
        self.restarts = 0
        self.dropped: list[object] = []
        """Objects that go once the lock is given up."""
        _guards.add(self)

    def inside(self) -> bool:
        """Return whether the calling thread has the lock."""
        return self.lock._is_owned()  # type: ignore[attr-defined, no-any-return, unused-ignore]

    def enter(self, restart: Callable[[], None]) -> None:
        """Start anew what was left half changed; the lock was taken just now.

        `restart`: starts the store anew; called again where it did not come to its end. The guard
        keeps no reference to it, so that an unused store is freed at once.
        """
        if self.changing:
            restart()
            self.restarts += 1
            self.changing = False
            logger.warning("an exception came while the prompt cache was changed; its content in RAM is gone")


def guarded(
    *, changes: bool = True
) -> Callable[[Callable[Concatenate[Any, P], R]], Callable[Concatenate[Any, P], R]]:
    """Have a method of a store (with a `guard`) hold the lock while it runs, again after each `Pause`.

    `changes`: an exception may leave half a change; None is the answer to a thread that has the lock already.
    """

    def decorate(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
        @functools.wraps(method)
        def call(store: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
            guard: Guard = store.guard
            if guard.inside():
                if not changes:
                    return method(store, *args, **kwargs)
                threading.Thread(target=call, args=(store, *args), kwargs=kwargs).start()
                return None  # type: ignore[return-value]
            while True:
                pause: Pause | None = None
                # The lock's own methods are C: no signal can come between taking it and the `with`.
                with guard.lock:
                    guard.enter(store.restart)
                    guard.changing, guard.changes = changes, guard.changes + changes
                    try:
                        result = method(store, *args, **kwargs)
                    except Pause as raised:
                        pause = raised.with_traceback(None)  # its frames hold bytes
                    guard.changing = False
                guard.dropped.clear()
                if pause is None:
                    return result
                pause.spend(store)

        return call

    return decorate


_guards: weakref.WeakSet[Guard] = weakref.WeakSet()


def _after_fork() -> None:
    """In a child: the thread that held a lock is not there to give it up."""
    for guard in list(_guards):
        guard.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
