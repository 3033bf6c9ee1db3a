"""The process of all decode loops: they are held while it forks, start anew in the child, end at its exit."""

from __future__ import annotations

import _thread
import atexit
import logging
import os
import time
from threading import Event, local
from typing import Protocol
from weakref import WeakSet

FORK_SECONDS = 10.0
"""Longest wait of a fork for the operations of all loops: a child that continues on half of one may crash."""

LOOK_SECONDS = 0.02
"""Time after which a fork looks again whether a loop waits for another one."""

logger = logging.getLogger("llamahybrid")


class Loop(Protocol):
    """A loop with a thread of its own."""

    def hold(self, over: Event) -> Event:
        """Hold the thread between two operations until `over`; return an event: it is there."""

    @property
    def awaits_another(self) -> bool:
        """The thread waits for the reply of another loop, in code of the caller: no operation runs."""

    def renew_in_child(self) -> None:
        """Start anew in a forked process."""

    def end_at_exit(self) -> None:
        """End the thread at exit of the interpreter."""


_loops: WeakSet[Loop] = WeakSet()
_forks = local()
"""`over`: the event that ends the calling thread's fork. `interrupted`: Ctrl-C came while it waited."""


def add(loop: Loop) -> None:
    """Include a loop until it is collected."""
    _loops.add(loop)


@atexit.register
def _end_all() -> None:
    for loop in list(_loops):
        loop.end_at_exit()


def _hold_all() -> None:
    over = _forks.over = Event()
    _forks.interrupted = False
    loops, held = list(_loops), list[tuple[Loop, Event]]()
    ends = time.monotonic() + FORK_SECONDS
    while True:
        try:
            while loops:
                held.append((loops[-1], loops[-1].hold(over)))
                loops.pop()
            _wait(held, ends)
            return
        except KeyboardInterrupt:  # CPython prints and drops what a hook raises
            _forks.interrupted = True


def _wait(held: list[tuple[Loop, Event]], ends: float) -> None:
    """Wait until each loop is held, or waits for one that is, at most until `ends`, by `time.monotonic`."""
    while late := [(loop, there) for loop, there in held if not there.is_set()]:
        busy = [there for loop, there in late if not loop.awaits_another]
        rest = ends - time.monotonic()
        if not busy:
            return
        if rest <= 0:
            logger.warning("a fork did not wait for the end of a batch: its child may crash if it goes on")
            return
        busy[0].wait(min(rest, LOOK_SECONDS))


def _release_all() -> None:
    _forks.over.set()
    if _forks.interrupted:  # raised behind this hook, in which it would be dropped, too
        _thread.start_new_thread(_thread.interrupt_main, ())


def _renew_all() -> None:
    for loop in list(_loops):
        loop.renew_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_all, after_in_parent=_release_all, after_in_child=_renew_all)
