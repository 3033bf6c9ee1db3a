"""The lock of a store: an exception in the middle of a change costs what the store holds, and no more.

A KeyboardInterrupt may come between any two bytecodes. Nothing is undone then: the next call finds the mark
of a change that did not come to its end, and starts the store anew, so that half a change is never read.

A thread that has the lock may come in again: a finaliser that the collector runs there, a signal or log
handler. Its call is answered as by an empty store, or is left to the next call.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

logger = logging.getLogger("llamahybrid")

P = ParamSpec("P")
R = TypeVar("R")


class Pause:
    """Answer of a guarded method that has to be called again: something takes time and comes before."""

    def spend(self, store: Any) -> None:
        """Do that, without the lock."""
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
        self.deferred: deque[Callable[[], object]] = deque()
        """Calls from inside, left to the next call."""
        self.dropped: list[object] = []
        """Objects that go once the lock is given up."""
        self._told = False
        _guards.add(self)

    def inside(self) -> bool:
        """Return whether the calling thread has the lock."""
        return self.lock._is_owned()  # type: ignore[attr-defined, no-any-return, unused-ignore]

    def enter(self, restart: Callable[[], None]) -> None:
        """Start anew what was left half changed, and do what was deferred; the lock was taken just now.

        `restart`: starts the store anew; called again where it did not come to its end. The guard
        keeps no reference to it, so that an unused store is freed at once.
        """
        if self.changing:
            restart()
            self.restarts += 1
            self.changing = False
        while self.deferred:
            self.changing, self.changes = True, self.changes + 1
            self.deferred.popleft()()
            self.changing = False

    def leave(self) -> None:
        """Give up the lock, however it is held: a tracer may raise right before a `with` gives it up."""
        while self.inside():
            self.lock.release()

    def tell(self) -> None:
        """Log a restart once; never under the lock, as handlers are anybody's code."""
        if self.restarts and not self._told:
            self._told = True
            logger.warning("an exception came while the prompt cache was changed; its content in RAM is gone")


def guarded(
    inside: object = None, *, later: bool = False, changes: bool = True
) -> Callable[[Callable[Concatenate[Any, P], R | Pause]], Callable[Concatenate[Any, P], R]]:
    """Have a method of a store (with a `guard`) hold the lock while it runs, again after each `Pause`.

    `inside`: its answer for a thread that has the lock already, or a function of its arguments that makes it.
    `later`: the call is then left to the next one. `changes`: an exception may leave half a change.
    """

    def decorate(method: Callable[Concatenate[Any, P], R | Pause]) -> Callable[Concatenate[Any, P], R]:
        @functools.wraps(method)
        def call(store: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
            guard: Guard = store.guard
            if guard.inside():
                if later:
                    guard.deferred.append(functools.partial(method, store, *args, **kwargs))
                return inside(*args, **kwargs) if callable(inside) else inside  # type: ignore[return-value]
            try:
                while True:
                    # The lock's own methods are C: no signal can come between taking it and the `with`.
                    with guard.lock:
                        guard.enter(store.restart)
                        guard.changing, guard.changes = changes, guard.changes + changes
                        result = method(store, *args, **kwargs)
                        guard.changing = False
                    guard.dropped.clear()
                    guard.tell()
                    if not isinstance(result, Pause):
                        return result
                    result.spend(store)
                    del result  # its bytes go back to the system without the lock
            except BaseException:
                guard.leave()
                raise

        return call

    return decorate


_guards: weakref.WeakSet[Guard] = weakref.WeakSet()


def _after_fork() -> None:
    """In a child: the thread that held a lock is not there to give it up."""
    for guard in list(_guards):
        guard.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
