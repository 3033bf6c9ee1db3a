"""Job: one request in a thread of its own, whose items come out in the event loop.

Nothing waits for a client: a slot is free when its answer is made, however slowly that is read. What waits to
be sent is bounded by the longest answer the context has room for.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, suppress
from contextvars import copy_context
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from llamahybrid.client.handle import RequestHandle
from llamahybrid.core.report import PromptProgress, RequestReport
from llamahybrid.server.progress import Progress

LATER = 2e-3
"""Seconds that what a request makes waits for the event loop: less than a step takes, more than its end."""

Create = Callable[..., Any]
"""Makes a completion from keyword arguments; with `stream`, a generator of chunks."""


@dataclass(frozen=True)
class Failure:
    """The request raised this."""

    error: BaseException


@dataclass(frozen=True)
class Done:
    """The request is over."""

    reports: tuple[RequestReport, ...]
    """What each answer decoded and reused, the one that decoded the prompt first."""
    reasons: tuple[str, ...] = ()
    """How each of their prompts started, naming no token."""


class Notice(Enum):
    """What else may be said to who waits for items."""

    GONE = "the client hung up"
    SILENCE = "there was nothing to send for a while"


Item: TypeAlias = "dict[str, Any] | Failure | Done | Notice"
"""A completion or a chunk of one; at the end `Done` or `Failure`."""


class Outbox:
    """Hands what threads make over to the event loop, a little later and together.

    Right then the next step of all answers is about to begin, and would wait for what is sent of this one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[[Item], None], Item]] = deque()
        self._woken = False

    def call(self, what: Callable[[Item], None], item: Item) -> None:
        """`what(item)` in the loop, in the order of these calls; from any thread."""
        self._calls.append((what, item))
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # the loop was closed: the server is gone
                self._loop.call_soon_threadsafe(self._loop.call_later, LATER, self._flush)

    def _flush(self) -> None:
        self._woken = False  # first: what comes from here on wakes the loop again
        while self._calls:
            what, item = self._calls.popleft()
            self._loop.call_soon(what, item)


class Job:
    """One request. `start`, `item` and `over` belong to the event loop, `cancel` and `drop` to any thread."""

    def __init__(
        self,
        create: Create,
        options: dict[str, Any],
        handle: Callable[[], AbstractContextManager[RequestHandle]],
        over: Callable[[Item], None],
        outbox: Outbox | None = None,
        progress: Progress | None = None,
    ) -> None:
        """`handle` makes what its requests belong to; `over` is told, in the loop, how its thread ended.

        `outbox`: one that several jobs share. `progress`: puts how far the prompt is into the stream.
        """
        self.stream = bool(options.get("stream"))
        self.started = time.perf_counter()
        self._create = create
        self._options = options
        self._make_handle = handle
        self._progress = progress
        self.over = over
        self._items: asyncio.Queue[Item] = asyncio.Queue()
        self._outbox = outbox or Outbox(asyncio.get_running_loop())
        self._handle: RequestHandle | None = None
        self._lock = threading.Lock()
        self.cancelled = False
        """It was asked to end."""
        self._dropped = False

    def start(self, threads: ThreadPoolExecutor) -> None:
        """Begin."""
        self.started = time.perf_counter()
        threads.submit(copy_context().run, self._work)  # what it sets is gone with it, not left in the thread

    async def item(self) -> Item:
        """The next item."""
        return await self._items.get()

    def more(self) -> list[Item]:
        """Items that are there without waiting."""
        there = []
        while not self._items.empty():
            there.append(self._items.get_nowait())
        return there

    def notify(self, notice: Notice) -> None:
        """Say this to who waits for items, in the loop."""
        self._items.put_nowait(notice)

    def cancel(self) -> None:
        """End it; what was made so far still comes out."""
        with self._lock:
            self.cancelled = True
            handle = self._handle
        if handle is not None:
            handle.cancel()

    def drop(self) -> None:
        """End it: nobody waits for what comes out."""
        with self._lock:
            self._dropped = self.cancelled = True
            handle = self._handle
        if handle is not None:
            handle.drop()

    @property
    def reports(self) -> list[RequestReport]:
        """What its requests have done so far."""
        handle = self._handle
        return [] if handle is None else handle.reports

    def _work(self) -> None:
        """In its thread."""
        last: Item
        try:
            last = self._run()
        except BaseException as error:
            last = Failure(error)
        self._outbox.call(self._end, last)

    def _run(self) -> Item:
        with self._make_handle() as handle:
            with self._lock:
                self._handle = handle
            if self._dropped:  # before there was anything to end
                handle.drop()
            elif self.cancelled:
                handle.cancel()
            if self._progress is not None:
                handle.on_progress = self._tell
            made = self._create(**self._options)
            if self._progress is not None:
                made = self._progress.into(made)
            if not self.stream:
                self._put(made)
            else:
                with closing(made):
                    for chunk in made:
                        if self._dropped:
                            break
                        self._put(chunk)
        return Done(tuple(handle.reports), tuple(handle.reasons))

    def _tell(self, progress: PromptProgress) -> None:
        if self._progress is not None:
            self._put(self._progress.chunk(progress))

    def _put(self, item: Item) -> None:
        if not self._dropped:
            self._outbox.call(self._items.put_nowait, item)

    def _end(self, last: Item) -> None:
        self._items.put_nowait(last)
        self.over(last)
