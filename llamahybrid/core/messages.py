"""What callers' threads say to the decode loop, and how it answers."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from llamahybrid.core.request import Request, Task

SLICE = 0.1 if os.name == "nt" else None
"""Seconds that a wait may be deaf to Ctrl-C: on Windows waiting for a lock is."""


class Reply:
    """The answer to one message: one result for `get`, or tokens for `Feed`."""

    def __init__(self) -> None:
        self._items: SimpleQueue[tuple[bool, Any]] = SimpleQueue()

    def put(self, result: Any) -> None:
        """Give the result."""
        self._items.put((True, result))

    def fail(self, error: BaseException) -> None:
        """Give an error, which is raised where the result is waited for."""
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
    """The tokens of one answer, from the loop, which samples them, to their reader.

    The loop decodes a token when its reader has it: at most one token is decoded that the reader may not
    want, and a reader that is quick never waits for a hand-over.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        """Tokens that the reader has asked for."""
        self.given = 0
        """Tokens that were published."""
        self.needs = 0
        """The loop goes on once so many were asked for."""
        self.paused = False
        """It waits for that, and wants to be told."""

    @property
    def due(self) -> bool:
        """The reader has asked for enough that the loop goes on."""
        return self.asked >= self.needs

    def publish(self, token: int) -> None:
        """One more token; the loop alone calls this."""
        self.given += 1
        self.put(token)


@dataclass(frozen=True)
class Run:
    """Do a task, once its request has a slot."""

    task: Task


@dataclass(frozen=True)
class Resume:
    """The reader of a request's tokens asks for more than were published."""

    request: Request


@dataclass(frozen=True)
class End:
    """The request is over: keep its progress, give its slot back, tell of it."""

    request: Request
    reply: Reply | None = None


@dataclass(frozen=True)
class Call:
    """Do work that needs no slot, between two batches."""

    request: Request
    work: Callable[[], Any]
    reply: Reply


@dataclass(frozen=True)
class Look:
    """Something has changed that the loop reads elsewhere: a request was cancelled."""


@dataclass(frozen=True)
class Stop:
    """End the loop."""

    reply: Reply | None = None


Message: TypeAlias = Run | Resume | End | Call | Look | Stop
