"""A process that is forked copies memory and no threads: a lock that another thread holds would stay locked.

So a fork waits for the locks of the RAM tier; what a lock protects is whole then, in the child, too. The disk
tier looks after itself (`disk_shelf`, `write_behind`): its child reads the folder again.
"""

from __future__ import annotations

import os
import threading
import weakref

FORK_SECONDS = 5.0
"""How long a fork waits for a lock."""


class ForkGuard:
    """Held by whoever owns a lock, for as long as forks are to wait for it."""

    def __init__(self, lock: threading.Lock) -> None:
        self.lock = lock
        self.held = False
        _guards.add(self)


def _before() -> None:
    for guard in list(_guards):
        guard.held = guard.lock.acquire(timeout=FORK_SECONDS)


def _after() -> None:
    for guard in list(_guards):
        if guard.held:
            guard.held = False
            guard.lock.release()


_guards: weakref.WeakSet[ForkGuard] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after)
