"""NativeCalls: calls into a model outside of its requests, which `close` waits for and then refuses.

Any thread tokenizes at any time, without a ticket: upstream's chat handlers do it before they ask for one.
The library reads freed memory where the model goes meanwhile.

A call leaves its frame here while it runs. One that an interrupt ended before it could take it away again
is told by that (see `executes`), and no lock is waited for, so that finalisers may do all of it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import wraps
from inspect import isfunction
from sys import _getframe
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakSet

from llama_cpp._internals import LlamaModel

from llamahybrid.errors import ModelClosed

POLL = 0.01
"""Seconds between two looks whether calls still run."""

Result = TypeVar("Result")


class NativeCalls:
    """The calls that run on a model outside of its requests, and whether there may be more."""

    def __init__(self) -> None:
        self.frames: set[FrameType] = set()
        """Of calls that run, and of some that an interrupt ended."""
        self.closed = False
        """Calls are refused."""
        _all.add(self)

    def run(self, work: Callable[..., Result], *args: Any) -> Result:
        """`work(*args)`, which `end` waits for. Raises ModelClosed after that."""
        self.frames.add(_getframe())
        try:
            self.require_open()  # who ends them says so first, and looks at the frames then
            return work(*args)
        finally:
            self.frames.discard(_getframe())

    def require_open(self) -> None:
        """Raise ModelClosed where calls are refused."""
        if self.closed:
            raise ModelClosed("the model is closed")

    def require_outside(self) -> None:
        """Raise RuntimeError in the middle of a call of this thread, where finalisers may run."""
        if self._below():
            raise RuntimeError("a model cannot be closed from inside one of its own calls")

    def end(self) -> None:
        """Refuse calls from now on, and wait for those that run. Raises RuntimeError inside of one."""
        self.require_outside()
        self.closed = True
        while self._running():
            time.sleep(POLL)

    def end_unless_running(self) -> bool:
        """Refuse calls from now on; False, with nothing changed, where one runs. For finalisers."""
        if not self.closed:
            self.closed = True
            self.closed = not self._running()
        return self.closed

    def forget_others(self) -> None:
        """Of all threads there is only the calling one left, in a process that was forked from it."""
        self.frames = self._below()

    def _running(self) -> bool:
        over = [frame for frame in list(self.frames) if not executes(frame)]
        self.frames.difference_update(over)
        return bool(self.frames)

    def _below(self) -> set[FrameType]:
        """The calls that this thread is in."""
        found, frame = set(), sys._getframe(1)
        while frame is not None:
            if frame in self.frames:
                found.add(frame)
            frame = frame.f_back  # type: ignore[assignment]
        return found


def held(method: Callable[..., Result]) -> Callable[..., Result]:
    """A method as a call that `NativeCalls.end` waits for, of an object that has them as `_calls`.

    As `NativeCalls.run`, in one call less: it is made for each piece of a text.
    """

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Result:
        calls = self._calls
        calls.frames.add(_getframe())
        try:
            if calls.closed:
                raise ModelClosed("the model is closed")
            return method(self, *args, **kwargs)
        finally:
            calls.frames.discard(_getframe())

    return call


class GuardedModel(LlamaModel):  # type: ignore[misc]
    """`llama_cpp._internals.LlamaModel` that is not freed while it is read, nor read when it was."""

    _calls: NativeCalls

    @classmethod
    def guard(cls, model: LlamaModel, calls: NativeCalls) -> None:
        """Turn a model that upstream opened into a guarded one, in place: tokenizers have it, too."""
        model._calls = calls
        model.__class__ = cls


for _name, _method in list(vars(LlamaModel).items()):
    if isfunction(_method) and not _name.startswith("_") and _name != "close":
        setattr(GuardedModel, _name, held(_method))


def executes(frame: FrameType) -> bool:
    """A function's call has not come to its end: only then its frame refuses to be cleared."""
    try:
        frame.clear()
    except RuntimeError:
        return True
    return False


def piece(model: LlamaModel, token: int) -> str:
    """The text of a token; its id where the model is closed."""
    try:
        text: bytes = model.detokenize([token], special=True)
    except ModelClosed:
        return str(token)
    return text.decode("utf-8", errors="replace")


_all: WeakSet[NativeCalls] = WeakSet()


def _forked() -> None:
    for calls in list(_all):
        calls.forget_others()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
