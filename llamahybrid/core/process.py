"""The process of all decode loops: they are held while it forks, start anew in the child, end at its exit."""

from __future__ import annotations

import atexit
import os
from threading import Event, local
from typing import Protocol
from weakref import WeakSet

FORK_SECONDS = 10.0
"""Longest wait of a fork for the operation of a loop: a child that continues on half of one may crash."""


class Loop(Protocol):
    """A loop with a thread of its own."""

    def hold(self, over: Event, seconds: float) -> None:
        """Hold the thread between two operations until `over`; wait until it is there, at most `seconds`."""

    def renew_in_child(self) -> None:
        """Start anew in a forked process."""

    def end_at_exit(self) -> None:
        """End the thread at exit of the interpreter."""


_loops: WeakSet[Loop] = WeakSet()
_forks = local()
"""`over`: the event that ends the calling thread's fork."""


def add(loop: Loop) -> None:
    """Include a loop until it is collected."""
    _loops.add(loop)


@atexit.register
def _end_all() -> None:
    for loop in list(_loops):
        loop.end_at_exit()


def _hold_all() -> None:
    _forks.over = Event()
    for loop in list(_loops):
        loop.hold(_forks.over, FORK_SECONDS)


def _release_all() -> None:
    _forks.over.set()


def _renew_all() -> None:
    for loop in list(_loops):
        loop.renew_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_all, after_in_parent=_release_all, after_in_child=_renew_all)
