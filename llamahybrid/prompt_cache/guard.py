"""One lock for a store, and what an exception in the middle of a change leaves behind: nothing of it.

A KeyboardInterrupt may come between any two bytecodes, under the lock, too. Nothing is undone then: whoever
takes the lock next finds the mark of a change that did not come to its end, and starts the store anew: what
lay in RAM is gone, what lies in a folder is read again.
No half of a change is ever read, whatever the exception was and wherever it came from.

The same thread may come in again while it is inside: a finaliser that the garbage collector runs there, a
signal handler, a log handler. It would wait for itself, so it does not wait: it is answered as by an empty
store, or what it wants done is done by whoever takes the lock next.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

logger = logging.getLogger("llamahybrid")

SLICE_SECONDS = 0.01
"""How long others are kept out at once by what takes its time."""

YIELD_SECONDS = 5e-5
"""So long a thread sleeps that lets others have the lock."""

P = ParamSpec("P")
R = TypeVar("R")


class Guard:
    """The lock of one store."""

    def __init__(self, warning: str = "") -> None:
        """`warning`: said once when an exception has cost what the store held."""
        self.lock = threading.RLock()
        self._warning = warning
        self.changing = False
        """A change has begun and has not come to its end."""
        self.deferred: deque[Callable[[], object]] = deque()
        """Left by calls from inside, to be done next."""
        self.restarts = 0
        """How often an exception cost the store what it held."""
        _guards.add(self)

    def inside(self) -> bool:
        """The calling thread has the lock."""
        return self.lock._is_owned()  # type: ignore[attr-defined, no-any-return, unused-ignore]

    def enter(self, store: Guarded) -> None:
        """The lock was taken: start anew what was left half changed, and do what was left to be done."""
        if self.changing:
            store.restart()
            self.restarts += 1
            self.changing = False
        while self.deferred:
            self.changing = True
            self.deferred.popleft()()
            self.changing = False

    def leave(self) -> None:
        """Give up the lock, however it is held: a tracer may raise right before a `with` gives it up."""
        while self.inside():
            self.lock.release()

    def tell(self) -> None:
        """Say once that a store was started anew; never under the lock, as handlers are anybody's code."""
        if self.restarts and self._warning:
            warning, self._warning = self._warning, ""
            logger.warning(warning)


class Guarded(Protocol):
    """A store with a guard."""

    @property
    def guard(self) -> Guard:
        """Its lock."""

    def restart(self) -> None:
        """Begin again with nothing; may be called again when it did not come to its end."""


G = TypeVar("G", bound=Guarded)


def guarded(
    inside: Callable[..., Any], *, later: bool = False, changes: bool = True
) -> Callable[[Callable[Concatenate[G, P], R]], Callable[Concatenate[G, P], R]]:
    """A method of a store that has the lock while it runs.

    `inside(store, ...)`: what it gives to a thread that has the lock already. `later`: it is then done by
    the next call. `changes`: it may leave half a change from its first line on; else it has to set
    `guard.changing` itself before it changes anything, and exceptions before that cost nothing.
    """

    def decorate(method: Callable[Concatenate[G, P], R]) -> Callable[Concatenate[G, P], R]:
        @functools.wraps(method)
        def call(store: G, /, *args: P.args, **kwargs: P.kwargs) -> R:
            guard = store.guard
            if guard.inside():
                if later:
                    guard.deferred.append(functools.partial(method, store, *args, **kwargs))
                answer: R = inside(store, *args, **kwargs)
                return answer
            try:
                # The lock's own methods are C: no signal can come between taking it and the `with`.
                with guard.lock:
                    guard.enter(store)
                    guard.changing = changes
                    result = method(store, *args, **kwargs)
                    guard.changing = False
                guard.tell()
                return result
            except BaseException:
                guard.leave()
                raise

        return call

    return decorate


def in_slices(work: Callable[[float], bool]) -> None:
    """`work(seconds)` until it says that no more is to be done; others have the lock in between.

    It takes the lock, and gives it up after about so long.
    """
    while work(SLICE_SECONDS):
        time.sleep(YIELD_SECONDS)


def nothing(*_: object, **__: object) -> None:
    """Answers None."""


def no(*_: object, **__: object) -> bool:
    """Answers False."""
    return False


def zero(*_: object, **__: object) -> int:
    """Answers 0."""
    return 0


_guards: weakref.WeakSet[Guard] = weakref.WeakSet()


def _after_fork() -> None:
    """In a child: whoever held a lock is not there to give it up; what it changed is started anew."""
    for guard in list(_guards):
        guard.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
