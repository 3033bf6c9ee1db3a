"""Replies of the decode loop to a caller's thread: one result, or the tokens of an answer."""

from __future__ import annotations

import os
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

SLICE = 0.1 if os.name == "nt" else None
"""Longest wait in seconds without looking for Ctrl-C: on Windows a wait for a lock cannot be interrupted."""


class Bell:
    """Wakes a thread that waits for any of several replies."""

    def __init__(self) -> None:
        self._rings: SimpleQueue[None] = SimpleQueue()

    def ring(self) -> None:
        """Wake the thread that waits, or that waits next."""
        self._rings.put(None)

    def wait(self) -> None:
        """Wait until it rang since the last call."""
        while True:
            try:
                self._rings.get(timeout=SLICE)
                while not self._rings.empty():
                    self._rings.get_nowait()
                return
            except Empty:
                continue


class Reply:
    """The answer to one message: one result for `get`, or tokens for `Feed`."""

    def __init__(self, bell: Bell | None = None) -> None:
        """`bell`: rings with each item."""
        self._items: SimpleQueue[tuple[bool, Any]] = SimpleQueue()
        self._bell = bell
        self.empty = self._items.empty
        """`empty()`: `get` would wait."""

    def put(self, result: Any) -> None:
        """Give the result."""
        self._items.put((True, result))
        if self._bell is not None:
            self._bell.ring()

    def fail(self, error: BaseException) -> None:
        """Give an error, which `get` raises."""
        self._items.put((False, error))
        if self._bell is not None:
            self._bell.ring()

    def get(self, interrupted: Callable[[], object] | None = None) -> Any:
        """Wait for the next result; raise the error that came in its place.

        `interrupted` is called where an exception ends the wait, by Ctrl-C say.
        """
        while True:
            try:
                good, item = self._items.get(timeout=SLICE)
                break
            except Empty:
                continue
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

    def __init__(self, bell: Bell | None = None) -> None:
        super().__init__(bell)
        self.asked = 0
        """Number of tokens that the reader has asked for."""
        self.needs = 0
        """Number of tokens that the reader must have asked for before the loop continues."""
        self.paused = False
        """The loop waits for the reader, which has to send `Resume`."""

    @property
    def due(self) -> bool:
        """The reader has asked for enough tokens for the loop to continue."""
        return self.asked >= self.needs

    def publish(self, token: int, needs: int) -> None:
        """Publish a token; called by the loop alone."""
        self.needs = needs
        self.put(token)
