"""NativeCalls: calls into a model outside of its requests, which `close` waits for and then refuses.

Any thread may tokenize at any time, as upstream's chat handlers do before they make a request. The library
would read freed memory if the model were closed during a call.

Running calls are found in the stacks of all threads, so that neither an interrupt nor a fork can leave one
counted. There are no locks, so that finalizers may use everything here.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import isfunction
from types import FrameType
from typing import Any, TypeVar

from llama_cpp._internals import LlamaModel

from llamahybrid.core.request import Request
from llamahybrid.core.view import View
from llamahybrid.errors import ModelClosed

POLL = 0.01
"""Seconds between two looks whether calls still run."""

Result = TypeVar("Result")
_thread = threading.local()


def held(method: Callable[..., Result]) -> Callable[..., Result]:
    """Make a method a call that `NativeCalls.end` waits for; its object has `_calls`."""

    @wraps(method)
    def held_call(self: Any, *args: Any, **kwargs: Any) -> Result:
        calls = self._calls
        if calls.closed:  # `end` sets it before it looks at the frames
            raise ModelClosed("the model is closed")
        return method(self, *args, **kwargs)

    return held_call


class NativeCalls:
    """The calls that run on a model outside of its requests."""

    def __init__(self) -> None:
        self.closed = False
        """Calls are refused."""

    @property
    def _calls(self) -> NativeCalls:
        return self

    @held
    def run(self, work: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Run `work(*args, **kwargs)`, which `end` waits for. Raises ModelClosed afterwards."""
        return work(*args, **kwargs)

    def require_outside(self) -> None:
        """Raise RuntimeError inside a call of this thread, where finalizers may run."""
        if self._holds(sys._getframe()):
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

    def _running(self) -> bool:
        return any(self._holds(frame) for frame in sys._current_frames().values())

    def _holds(self, frame: FrameType | None) -> bool:
        """A frame is inside one of these calls."""
        while frame is not None:
            if frame.f_code.co_name == "held_call" and frame.f_locals.get("calls") is self:
                return True
            frame = frame.f_back
        return False


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

    @held
    def detokenize(self, tokens: Sequence[int], special: bool = False) -> bytes:
        """Refuse ids for which the library ends the process (llama_vocab, token_to_piece)."""
        if len(tokens) and not 0 <= min(tokens) <= max(tokens) < self._n_vocab:
            raise ValueError(f"token ids are from 0 to {self._n_vocab - 1}")
        return super().detokenize(tokens, special)  # type: ignore[no-any-return]


for _name, _method in list(vars(LlamaModel).items()):
    if isfunction(_method) and not _name.startswith("_") and _name not in ("close", *vars(GuardedModel)):
        setattr(GuardedModel, _name, held(_method))


def collecting() -> bool:
    """The calling thread is inside the garbage collector, or the interpreter ends: it must not wait.

    The `finally` blocks of a collected generator run in any thread in which the collector starts, under any
    lock of that thread.
    """
    return sys.is_finalizing() or getattr(_thread, "collects", False)


def _note(phase: str, info: dict[str, Any]) -> None:
    _thread.collects = phase == "start"


gc.callbacks.append(_note)


class ThreadState(threading.local):
    """The state of the calling thread."""

    def __init__(self) -> None:
        self.running: Request | None = None
        """None: it is inside of no step; else it may be (see `Requests.inside`)."""
        self.view: View | None = None
        """The view of its last request."""
        self.last: Request | None = None
        """For `last_request`."""
        self.mark = object()
        """Stands for the thread; unlike its number, it is never reused."""
        self.telling = False
        """The thread is inside `on_request` or `on_progress`."""
