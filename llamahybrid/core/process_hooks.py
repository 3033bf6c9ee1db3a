"""Hooks of the process: decode loops end at exit, and start anew in a forked child."""

from __future__ import annotations

import atexit
import os
from typing import Protocol
from weakref import WeakSet


class Hooked(Protocol):
    """A decode loop."""

    def end_at_exit(self) -> None:
        """Called at exit of the interpreter, before native code is unloaded."""

    def renew_in_child(self) -> None:
        """Called in a forked child, by the thread that forked."""


_all: WeakSet[Hooked] = WeakSet()


def register(loop: Hooked) -> None:
    """Call the hooks of a loop while it lives."""
    _all.add(loop)


@atexit.register
def _end_all() -> None:
    for loop in list(_all):
        loop.end_at_exit()


def _renew_all() -> None:
    for loop in list(_all):
        loop.renew_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
