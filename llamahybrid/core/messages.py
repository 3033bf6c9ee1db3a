"""Messages of callers' threads to the decode loop, and its replies."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from llamahybrid.core.request import Request, Task

SLICE = 0.1 if os.name == "nt" else None
"""Longest wait in seconds without looking for Ctrl-C: on Windows a wait for a lock cannot be interrupted."""


class Reply:
    """The answer to one message: one result for `get`, or tokens for `Feed`."""

    def __init__(self) -> None:
        self._items: SimpleQueue[tuple[bool, Any]] = SimpleQueue()

    def put(self, result: Any) -> None:
        """Give the result."""
        self._items.put((True, result))

    def fail(self, error: BaseException) -> None:
        """Give an error, which `get` raises."""
        self._items.put((False, error))

    def _wait(self) -> tuple[bool, Any]:
        while True:
            try:
                return self._items.get(timeout=SLICE)
            except Empty:
                continue

    def get(self, interrupted: Callable[[], object] | None = None) -> Any:
        """Wait for the next result; raise the error that came in its place.

        `interrupted` is called where the wait itself is ended, by Ctrl-C say.
        """
        try:
            good, item = self._wait()
        except BaseException:
            if interrupted is not None:
                interrupted()
            raise
        if good:
            return item
        try:
            raise item
        finally:
            del item  # no cycle of the error, its traceback and this frame


class Feed(Reply):
    """The tokens of one answer, from the decode loop, which samples them, to their reader.

    The loop decodes a token while the reader processes it: at most one decoded token is not used, and a fast
    reader does not wait for a switch of threads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        """Number of tokens that the reader has asked for."""
        self.given = 0
        """Number of tokens that were published."""
        self.needs = 0
        """Number of tokens that the reader must have asked for before the loop continues."""
        self.paused = False
        """The loop waits for the reader, which has to send `Resume`."""

    @property
    def due(self) -> bool:
        """The reader has asked for enough tokens for the loop to continue."""
        return self.asked >= self.needs

    def publish(self, token: int) -> None:
        """Publish a token; called by the loop alone."""
        self.given += 1
        self.put(token)


@dataclass(frozen=True)
class Run:
    """Run a task once its request has a slot."""

    task: Task


@dataclass(frozen=True)
class Resume:
    """Continue an answer whose reader asks for more tokens than were published."""

    request: Request


@dataclass(frozen=True)
class End:
    """End a request: keep its progress, release its slot, report it."""

    request: Request
    reply: Reply | None = None


@dataclass(frozen=True)
class Look:
    """Wake the loop: a request was cancelled."""


@dataclass(frozen=True)
class Stop:
    """End the loop."""

    reply: Reply | None = None


Message: TypeAlias = Run | Resume | End | Look | Stop
