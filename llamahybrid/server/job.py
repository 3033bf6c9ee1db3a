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
from llamahybrid.server.errors import refusal

LATER = 2e-3
"""Seconds between an item and its delivery: less than a decode step, more than the end of one."""

FOREVER = 1e9
"""Seconds, for timers that need a number."""

Chunk: TypeAlias = dict[str, Any]

Create = Callable[..., Any]
"""`create(stream=...)` returns a completion, or a generator of its chunks."""


@dataclass(frozen=True)
class End:
    """The last item of a request."""

    reports: tuple[RequestReport, ...]
    """Decoded and reused tokens of each answer. The first report is of the answer that decoded the prompt."""
    reasons: tuple[str, ...] = ()
    """Why each prompt started where it did; names no token."""
    error: BaseException | None = None
    """Why the request failed; None: it succeeded, or was cancelled."""


Item: TypeAlias = "Chunk | End"
"""A completion or a chunk of one; at the end `End`."""


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
        last = isinstance(item, End)  # its request decodes no more: nothing is held up
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
        over: Callable[[Job, End], None],
        outbox: Outbox,
        progress: Callable[[PromptProgress], Chunk] | None = None,
    ) -> None:
        """`over` is called in the loop when the thread has ended.

        `progress`: makes the chunks with the progress of the prompt; None: the stream has none.
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
        self._outbox = outbox
        self._handle: RequestHandle | None = None
        self._lock = threading.Lock()
        self._dropped = False

    def start(self, threads: ThreadPoolExecutor) -> None:
        """Begin, in a context of its own: the thread serves other requests later."""
        self.started = time.perf_counter()
        threads.submit(copy_context().run, self._work)

    async def items(self, seconds: float = FOREVER) -> list[Item]:
        """Return the next items; none if there is none within these seconds."""
        if not self._items:
            self._arrived.clear()
            timer = asyncio.get_running_loop().call_later(seconds, self._arrived.set)  # wait_for makes a task
            try:
                await self._arrived.wait()
            finally:
                timer.cancel()
        found, self._items = self._items, []
        return found

    async def whole(self) -> Chunk:
        """Return the only item of a request without a stream. Raises Refusal if it failed."""
        items = await self.items()
        while not isinstance(items[-1], End):
            items += await self.items()
        first = items[0]
        if isinstance(first, End):
            raise refusal(first.error or RequestCancelled("the request was cancelled"))
        return first

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
        try:
            last = self._run()
        except BaseException as error:
            last = End(tuple(self.reports), error=error)
        self._outbox.call(self._end, last)

    def _run(self) -> End:
        with self._open_handle() as handle:
            with self._lock:
                self._handle = handle
            if self.cancelled:  # before there was a handle
                handle.cancel()
            if self._progress is not None:
                handle.on_progress = self._put_progress
            made = self._create(stream=self.stream)
            if not self.stream:
                self._put(made)
            else:
                with closing(made):
                    for chunk in made:
                        if self._dropped:
                            break
                        self._put(chunk)
        return End(tuple(handle.reports), tuple(handle.reasons))

    def _put_progress(self, progress: PromptProgress) -> None:
        assert self._progress is not None
        self._put(self._progress(progress))

    def _put(self, item: Item) -> None:
        if not self._dropped:
            self._outbox.call(self._take, item)

    def _take(self, item: Item) -> None:
        self._items.append(item)
        self._arrived.set()

    def _end(self, last: Item) -> None:
        assert isinstance(last, End)
        asyncio.get_running_loop().call_soon(self._over, self, last)  # its errors stop no other job
        self._take(last)
