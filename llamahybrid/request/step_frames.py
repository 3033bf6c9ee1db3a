"""StepFrames: which threads are in the middle of a step, as can be told after an interrupt at any line.

A frame that is being executed refuses to be cleared, one that was left does not (`frame.clear`). That is
asked here, and no stack of another thread is walked: what `f_back` of a generator's frame points to is freed
memory once that was suspended (seen with CPython 3.11: frames that were dictionaries). Nor is it asked which
threads there are: `sys._current_frames` may run a garbage collection under the interpreter's list of threads,
and its finalisers then wait for a thread that waits for that list (seen with 3.11.7: all stood still).
"""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType
from weakref import WeakSet


class StepFrames:
    """The calls that make steps, by thread."""

    def __init__(self) -> None:
        self._frames: dict[int, list[FrameType]] = {}
        _all.add(self)

    def enter(self) -> None:
        """The caller is in a step, until it calls `leave` or is left."""
        self._frames.setdefault(threading.get_ident(), []).append(sys._getframe(1))

    def leave(self) -> None:
        """The caller is in it no more."""
        thread, frame = threading.get_ident(), sys._getframe(1)
        left = [f for f in self._frames.get(thread, ()) if f is not frame and executes(f)]
        if left:
            self._frames[thread] = left
        else:
            self._frames.pop(thread, None)

    def run_in(self, thread: int | None = None) -> bool:
        """A thread, the calling one by default, is in the middle of a step."""
        thread = threading.get_ident() if thread is None else thread
        return any(executes(frame) for frame in list(self._frames.get(thread, ())))

    def forget_others(self) -> None:
        """Of all threads there is only the calling one left, in a process that was forked from it."""
        thread = threading.get_ident()
        self._frames = {thread: self._frames[thread]} if thread in self._frames else {}


class Step:
    """One stretch of work for a request: the call that makes this, in its thread.

    What others find out about it they say of this very step, never of its request: they may have looked long
    ago, and the request's next step have begun meanwhile.
    """

    __slots__ = ("frame", "left", "thread")

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.frame = sys._getframe(1)
        self.left = False
        """An interrupt ended it, as others found."""


def executes(frame: FrameType) -> bool:
    """A function's call has not come to its end."""
    try:
        frame.clear()
    except RuntimeError:
        return True
    return False


_all: WeakSet[StepFrames] = WeakSet()


def _forked() -> None:
    for frames in list(_all):
        frames.forget_others()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
