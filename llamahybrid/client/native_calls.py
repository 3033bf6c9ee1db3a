"""NativeCalls: calls into a model outside of its requests, which `close` waits for and then refuses.

Any thread may tokenize at any time, as upstream's chat handlers do before they make a request. The library
would read freed memory if the model were closed during a call.

Each call registers its frame while it runs, and `ThreadState` those of requests' steps. An interrupt may
leave a frame registered, but then it no longer executes (see `executes`). There are no locks, so that
finalizers may use everything here.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import isfunction
from sys import _getframe
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakSet

from llama_cpp._internals import LlamaModel

from llamahybrid.core.request import Request
from llamahybrid.core.view import View
from llamahybrid.errors import ModelClosed

POLL = 0.01
"""Seconds between two looks whether calls still run."""

Result = TypeVar("Result")
_thread = threading.local()


class NativeCalls:
    """The calls that run on a model outside of its requests."""

    def __init__(self) -> None:
        self.frames: set[FrameType] = set()
        """Frames of running calls, and of some that an interrupt ended."""
        self.closed = False
        """Calls are refused."""
        _all.add(self)

    def run(self, work: Callable[..., Result], *args: Any) -> Result:
        """Run `work(*args)`, which `end` waits for. Raises ModelClosed afterwards."""
        self.frames.add(_getframe())
        try:
            self.require_open()  # `end` sets `closed` before it looks at the frames
            return work(*args)
        finally:
            self.frames.discard(_getframe())

    def require_open(self) -> None:
        """Raise ModelClosed where calls are refused."""
        if self.closed:
            raise ModelClosed("the model is closed")

    def require_outside(self) -> None:
        """Raise RuntimeError inside a call of this thread, where finalizers may run."""
        if self._below():
            raise RuntimeError("a model cannot be closed from inside one of its own calls")

    def end(self) -> None:
        """Refuse calls from now on, and wait for running ones. Raises RuntimeError inside of one."""
        self.require_outside()
        self.closed = True
        while self._running():
            time.sleep(POLL)

    def end_unless_running(self) -> bool:
        """Refuse calls from now on; False, with nothing changed, where one runs. For finalizers."""
        if not self.closed:
            self.closed = True
            self.closed = not self._running()
        return self.closed

    def forget_others(self) -> None:
        """Forget the calls of threads that a forked process does not have."""
        self.frames = self._below()

    def _running(self) -> bool:
        over = [frame for frame in list(self.frames) if not executes(frame)]
        self.frames.difference_update(over)
        return bool(self.frames)

    def _below(self) -> set[FrameType]:
        """Frames of calls that this thread is inside of."""
        found, frame = set(), sys._getframe(1)
        while frame is not None:
            if frame in self.frames:
                found.add(frame)
            frame = frame.f_back  # type: ignore[assignment]
        return found


def held(method: Callable[..., Result]) -> Callable[..., Result]:
    """Make a method a call that `NativeCalls.end` waits for; its object has `_calls`.

    As `NativeCalls.run`, with one call less, since it runs for each piece of a text.
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
    """`llama_cpp._internals.LlamaModel` that is not freed during calls, nor called afterwards."""

    _calls: NativeCalls
    _n_vocab: int

    @classmethod
    def guard(cls, model: LlamaModel, calls: NativeCalls) -> None:
        """Turn a model that upstream opened into a guarded one, in place, since tokenizers hold it, too."""
        model._calls = calls
        model._n_vocab = model.n_vocab()
        model.__class__ = cls


def spells(method: Callable[..., bytes]) -> Callable[..., bytes]:
    """Make `detokenize` refuse ids for which the library ends the process (llama_vocab, token_to_piece)."""

    @wraps(method)
    def call(self: Any, tokens: Sequence[int], special: bool = False) -> bytes:
        if len(tokens) and not 0 <= min(tokens) <= max(tokens) < self._n_vocab:
            raise ValueError(f"token ids are from 0 to {self._n_vocab - 1}")
        return method(self, tokens, special)

    return call


for _name, _method in list(vars(LlamaModel).items()):
    if isfunction(_method) and not _name.startswith("_") and _name != "close":
        setattr(GuardedModel, _name, held(spells(_method) if _name == "detokenize" else _method))


def executes(frame: FrameType) -> bool:
    """The call of a frame still runs: only then the frame refuses to be cleared."""
    try:
        frame.clear()
    except RuntimeError:
        return True
    return False


def collecting() -> bool:
    """The calling thread is inside the garbage collector, or the interpreter ends: it must not wait.

    The `finally` blocks of a collected generator run in any thread in which the collector starts, under any
    lock of that thread.
    """
    return sys.is_finalizing() or getattr(_thread, "collects", False)


def _note(phase: str, info: dict[str, Any]) -> None:
    _thread.collects = phase == "start"


gc.callbacks.append(_note)


def piece(model: LlamaModel, token: int) -> str:
    """Return the text of a token; its id where the model is closed."""
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


class ThreadState(threading.local):
    """The state of the calling thread."""

    def __init__(self) -> None:
        self.stack: list[tuple[Request, FrameType]] = []
        """The requests whose steps it is inside of, and the frames of these steps."""
        self.view: View | None = None
        """The view of its last request."""
        self.last: Request | None = None
        """For `last_request`."""
        self.mark = object()
        """Stands for the thread; unlike its number, it is never reused."""
        self.telling = False
        """The thread is inside `on_request` or `on_progress`."""

    def inside(self) -> Request | None:
        """Return the request whose step runs; steps that an interrupt ended are taken off the stack."""
        while self.stack:
            request, frame = self.stack[-1]
            if executes(frame):
                return request
            self.stack.pop()
        return None
