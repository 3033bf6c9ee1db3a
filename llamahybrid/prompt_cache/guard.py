"""The lock of a store: an exception in the middle of a change costs what the store holds, and no more.

A KeyboardInterrupt may come between any two bytecodes. Nothing is undone then: the next call finds the mark
of a change that did not come to its end, and starts the store anew, so that half a change is never read.

A thread that has the lock may come in again: a finaliser that the collector runs there, a signal or log
handler. Half a change is not read there, either: such a call is answered as by an empty store. A
removal, a pin or a release is left until the change that runs has come to its end.
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


class Pause(Exception):
    """Raised in a guarded method where it may begin again: something takes time and comes first."""

    def spend(self, store: Any) -> None:
        """Do that, without the lock; then the method is called again."""
        raise NotImplementedError


class Later(Pause):
    """The pause of a deferred call, which is put back behind it: what is done then has the lock, too."""

    def __init__(self, pause: Pause, call: Callable[[], object]) -> None:
        self._pause, self._call = pause, call

    def spend(self, store: Any) -> None:
        """See `Pause.spend`."""
        try:
            self._pause.spend(store)
        finally:
            store.guard.deferred.appendleft(self._call)


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
        """Calls from inside, left to whoever has the lock next."""
        self.dropped: list[object] = []
        """Objects that go once the lock is given up."""
        self._untold = False
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
            self._untold, self.changing = True, False
        while self.deferred:
            self.changing, self.changes = True, self.changes + 1
            call = self.deferred.popleft()
            try:
                call()
            except Pause as pause:
                raise Later(pause.with_traceback(None), call) from None
            self.changing = False

    def leave(self) -> None:
        """Give up the lock, however it is held: a tracer may raise right before a `with` gives it up."""
        while self.inside():
            self.lock.release()

    def left(self) -> None:
        """Free what was dropped, and log a restart: the lock was given up, as handlers are anybody's code."""
        self.dropped.clear()
        untold, self._untold = self._untold, False
        if untold:
            logger.warning("an exception came while the prompt cache was changed; its content in RAM is gone")


def guarded(
    inside: Callable[..., Any] | None = None, *, later: bool = False, changes: bool = True
) -> Callable[[Callable[Concatenate[Any, P], R]], Callable[Concatenate[Any, P], R]]:
    """Have a method of a store (with a `guard`) hold the lock while it runs, again after each `Pause`.

    `inside`: makes, of the arguments, the answer for a thread that is in the middle of a change; otherwise it
    is None. `later`: the call is then deferred. `changes`: an exception may leave half a change; without
    `inside` a method that changes nothing runs there, too.
    """

    def decorate(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
        @functools.wraps(method)
        def call(store: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
            guard: Guard = store.guard
            if guard.inside():
                if not changes and (inside is None or not guard.changing):
                    return method(store, *args, **kwargs)
                if later:
                    guard.deferred.append(functools.partial(method, store, *args, **kwargs))
                return None if inside is None else inside(*args, **kwargs)  # type: ignore[return-value]
            try:
                while True:
                    # The lock's own methods are C: no signal can come between taking it and the `with`.
                    with guard.lock:
                        result = _attempt(store, changes, method, *args, **kwargs)
                        guard.changing = False
                    guard.left()
                    if not isinstance(result, Pause):
                        break
                    result.spend(store)
                    del result  # its bytes go back to the system without the lock
                if guard.deferred:
                    _look_in(store)
                return result
            except BaseException:
                guard.leave()
                raise

        return call

    return decorate


def _attempt(store: Any, changes: bool, method: Callable[..., R], /, *args: Any, **kwargs: Any) -> R | Pause:
    """Return the result of a method that has the lock, or the Pause that it raised.

    Not inside the `with`: a tracer could raise at a `try` there, which CPython covers by no handler.
    """
    guard: Guard = store.guard
    try:
        guard.enter(store.restart)
        guard.changing, guard.changes = changes, guard.changes + changes
        return method(store, *args, **kwargs)
    except Pause as raised:
        return raised.with_traceback(None)  # its frames hold bytes


@guarded(changes=False)
def _look_in(store: Any) -> None:
    """Do what was deferred."""


_guards: weakref.WeakSet[Guard] = weakref.WeakSet()


def _after_fork() -> None:
    """In a child: the thread that held a lock is not there to give it up."""
    for guard in list(_guards):
        guard.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
