"""Jobs: requests that run in threads, and whose items come out in the event loop.

A slot is free as soon as its answer is made, however slowly the client reads. The longest answer that fits
into the context bounds the memory for items that are not sent yet.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, TypeAlias

from llamahybrid.client.handle import RequestHandle
from llamahybrid.core.report import PromptProgress, RequestReport
from llamahybrid.errors import RequestCancelled
from llamahybrid.server.progress import Progress

LATER = 2e-3
"""Seconds between an item and its delivery: less than a decode step, more than the end of one."""

Chunk: TypeAlias = dict[str, Any]

Create = Callable[..., Any]
"""`create(stream=...)` returns a completion, or a generator of its chunks."""


@dataclass(frozen=True)
class Failure:
    """The last item of a request that failed."""

    error: BaseException
    reports: tuple[RequestReport, ...] = ()
    """See `Done.reports`: what was decoded before."""


@dataclass(frozen=True)
class Done:
    """The last item of a request that succeeded or was cancelled."""

    reports: tuple[RequestReport, ...]
    """Decoded and reused tokens of each answer. The first report is of the answer that decoded the prompt."""
    reasons: tuple[str, ...]
    """Why each prompt started where it did; names no token."""


Item: TypeAlias = "Chunk | Failure | Done"
"""A completion or a chunk of one; at the end `Done` or `Failure`."""


class Outbox:
    """Delivers items from threads to the event loop, together and a little later, the last one at once.

    At the moment of delivery the next decode step of all answers begins, and would wait for the loop's work.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[[Item], None], Item]] = deque()
        self._woken = False

    def call(self, receive: Callable[[Item], None], item: Item) -> None:
        """Have `receive(item)` called in the loop, in the order of these calls; from any thread."""
        self._calls.append((receive, item))
        last = isinstance(item, (Done, Failure))  # its request decodes no more: nothing is held up
        if last or not self._woken:
            self._woken = True
            how = (self._flush,) if last else (self._loop.call_later, LATER, self._flush)
            try:
                self._loop.call_soon_threadsafe(*how)
            except RuntimeError:  # the loop is closed: the server has stopped
                return

    def _flush(self) -> None:
        self._woken = False  # before the queue is emptied: a later item wakes the loop again
        while self._calls:
            receive, item = self._calls.popleft()
            receive(item)


class Job:
    """A request. `start` and `items` belong to the event loop; `cancel` and `drop` to any thread."""

    def __init__(
        self,
        create: Create,
        stream: bool,
        open_handle: Callable[[], AbstractContextManager[RequestHandle]],
        over: Callable[[Job, Done | Failure], None],
        outbox: Outbox,
        progress: Progress | None = None,
    ) -> None:
        """`over` is called in the loop when the thread has ended.

        `progress`: adds the progress of the prompt to the stream.
        """
        self.stream = stream
        self.started = time.perf_counter()
        self.cancelled = False
        """The request was told to end."""
        self._create = create
        self._open_handle = open_handle
        self._over = over
        self._progress = progress
        self._items: list[Item] = []
        self._arrived = asyncio.Event()
        self.wake = self._arrived.set
        """`wake()` ends the wait in `items`."""
        self._outbox = outbox
        self._handle: RequestHandle | None = None
        self._lock = threading.Lock()
        self._dropped = False

    def start(self, threads: ThreadPoolExecutor) -> None:
        """Begin, in a context of its own: the thread serves other requests later."""
        self.started = time.perf_counter()
        threads.submit(copy_context().run, self._work)

    async def items(self) -> list[Item]:
        """Return the next items, at least one; none after `wake`."""
        await self._arrived.wait()
        self._arrived.clear()
        found, self._items = self._items, []
        return found

    async def whole(self) -> Chunk | Failure:
        """Return the only item of a request without a stream, or its failure."""
        items = await self.items()
        while not isinstance(items[-1], (Done, Failure)):
            items += await self.items()
        first = items[0]
        return Failure(RequestCancelled("the request was cancelled")) if isinstance(first, Done) else first

    def cancel(self) -> None:
        """End the request; the answer so far still comes out."""
        with self._lock:
            self.cancelled = True
            handle = self._handle
        if handle is not None:
            handle.cancel()

    def drop(self) -> None:
        """End the request, whose client has left."""
        self._dropped = True
        self.cancel()

    @property
    def reports(self) -> list[RequestReport]:
        """The reports of the answers so far."""
        handle = self._handle
        return [] if handle is None else handle.reports

    def _work(self) -> None:
        """Run in a thread of its own."""
        last: Done | Failure
        try:
            last = self._run()
        except BaseException as error:
            last = Failure(error, tuple(self.reports))
        self._outbox.call(self._end, last)

    def _run(self) -> Done:
        with self._open_handle() as handle:
            with self._lock:
                self._handle = handle
            if self.cancelled:  # before there was a handle
                handle.cancel()
            if self._progress is not None:
                handle.on_progress = self._put_progress
            made = self._create(stream=self.stream)
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

    def _put_progress(self, progress: PromptProgress) -> None:
        assert self._progress is not None
        self._put(self._progress.chunk(progress))

    def _put(self, item: Item) -> None:
        if not self._dropped:
            self._outbox.call(self._take, item)

    def _take(self, item: Item) -> None:
        self._items.append(item)
        self.wake()

    def _end(self, last: Item) -> None:
        assert isinstance(last, (Done, Failure))
        asyncio.get_running_loop().call_soon(self._over, self, last)  # its errors stop no other job
        self._take(last)
