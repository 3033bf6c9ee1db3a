"""DecodeLoop: the one thread of a model that owns its context.

The loop takes messages, gives waiting requests their slots, chooses a batch, decodes it, and advances each
task with the result: verify, checkpoint, sample, publish. Callers only wait for replies. Signals are raised
in the main thread alone, so that no operation of the loop is interrupted.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event
from typing import Any, NamedTuple

from llamahybrid.core import process
from llamahybrid.core.loop_thread import LoopThread
from llamahybrid.core.request import Reader, Reply, Request, Task
from llamahybrid.core.scheduler import Scheduler
from llamahybrid.core.slot import Slot
from llamahybrid.core.slots import Slots
from llamahybrid.core.tasks import Tasks
from llamahybrid.errors import ModelClosed, RequestCancelled, RequestSuperseded
from llamahybrid.memory.shared import SharedContext

logger = logging.getLogger("llamahybrid")

EXIT_SECONDS = 10.0
"""Longest wait of the interpreter's exit for a running batch."""

REST_SECONDS = 0.5
"""Time behind an answer before its attention is stored, where it did not wait for that. An agent's next turn,
which comes at once, does not wait for it either."""


class Message(NamedTuple):
    """A message to the loop: an action for its thread, and the reply that the sender waits for."""

    act: Callable[[], bool | None]
    """True: a batch is decoded before the next message."""
    reply: Reply | None = None


class DecodeLoop:
    """Runs the requests of one model, one in each slot."""

    def __init__(
        self, slots: Slots, shared: SharedContext, scheduler: Scheduler, report: Callable[[Request], None]
    ) -> None:
        """`report` is called with each finished request."""
        self.slots = slots
        self.closed = False
        """New tasks are refused."""
        self._ended = False
        """All requests are over, and messages are refused."""
        self._shared = shared
        self._scheduler = scheduler
        self._tasks = Tasks(slots, shared, scheduler, self._cancelled, report)
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._doing: Message | None = None
        """The message that is processed."""
        self._thread = LoopThread()
        self._idle = True
        """The thread waits for a message: no operation on memory is half done."""
        self._on_end: Callable[[], None] | None = None
        """Called in the loop's thread after the last request."""
        process.add(self)

    # -- from any thread ---------------------------------------------------------------------------

    @property
    def here(self) -> bool:
        """The calling thread is the loop's."""
        return self._thread.here

    def _post(self, act: Callable[[], bool | None], reply: Reply | None = None) -> None:
        """Send a message; after the end, it is refused in the calling thread."""
        if not (self._ended or self._thread.serves):
            self._thread.start(self._serve)
        self._inbox.put(Message(act, reply))
        if self._ended:  # the thread reads no more messages
            self._refuse_rest()

    def run(self, request: Request, begin: Callable[[Slot], Any]) -> Any:
        """Run a task of a request and wait for its result; `begin(slot)` gives its steps, or the result.

        However the wait ends, the request is cancelled if the task is not through.
        """
        if self.here:
            return self._tasks.nested.run(request, begin)
        reply = Reply()
        try:
            self.submit(request, begin, reply)
            return self.result(request, reply)
        finally:
            request.awaits = False

    def submit(self, request: Request, begin: Callable[[Slot], Any], reply: Reply) -> None:
        """Send a task; `reply` gets its result, or its tokens."""
        if self.closed:
            raise self._cancelled()
        request.reply, request.aside = reply, None
        request.awaits = True
        self._post(partial(self._receive, Task(request, begin, reply)), reply)
        if request.cancelled:  # before `cancel` could see the reply
            self._refuse_waiting(request)

    def resume(self, request: Request) -> None:
        """Continue an answer whose reader asks for more tokens than were published."""
        self._post(partial(self._resume, request), request.reply)

    def result(self, request: Request, reply: Reply) -> Any:
        """Wait for a reply. An exception that interrupts the wait (Ctrl-C) cancels the request."""
        return reply.get(partial(self.cancel, request))

    def call(self, request: Request, work: Callable[[], Any]) -> Any:
        """Do work that needs no slot in the loop's thread, between two batches; wait for its result.

        Calls that wait take turns with batches. An interrupted wait cancels the request.
        """
        if self.closed or request.cancelled:
            raise self._cancelled()
        request.reply = reply = Reply()
        self._post(partial(self._call, request, work, reply), reply)
        return self.result(request, reply)

    def cancel(self, request: Request) -> None:
        """Cancel a request; takes no lock, so that a signal handler may call it."""
        if request.over:
            return
        request.cancelled = True
        if request.whole and request.slot is not None:  # one that waits has begun no others
            self._tasks.nested.cancel()
        self._tasks.batches.stop(request)
        self._refuse_waiting(request)
        if self._thread.asked:
            self._inbox.put(Message(_look))

    def _refuse_waiting(self, request: Request) -> None:
        """Answer a cancelled request that has not begun, without waiting for the running batch."""
        if (reply := request.reply) is not None and request.slot is None and not request.begun:
            reply.fail(self._cancelled())

    def cancel_all(self) -> None:
        """Cancel all requests that run or wait; takes no lock."""
        self._cancel_known()
        if self._thread.asked:
            self._inbox.put(Message(self._cancel_known))  # those whose messages are not read yet

    def _cancel_known(self) -> None:
        for request in self._known():
            self.cancel(request)

    def end(self, request: Request, wait: bool = True) -> None:
        """End a request: release its slot and report it; wait until that is done."""
        if request.over:
            return
        if self.here and not request.inline:  # called by the garbage collector, in the loop's thread
            self._inbox.put(Message(partial(self._tasks.end, request, None)))
            return
        if not self._thread.asked and request.progress is None:
            request.over = True
            return
        reply = Reply() if wait else None
        if self.here:
            self._tasks.end(request, reply)
        else:
            self._post(partial(self._tasks.end, request, reply), reply)
        if reply is not None:
            reply.get()

    def close(self, on_end: Callable[[], None]) -> None:
        """End the loop: cancel all requests, call `on_end()` in the loop's thread, and wait for that."""
        self._refuse()
        if not self._thread.settled():
            self._ended = True
            on_end()
            self._refuse_rest()
            return
        self._on_end = on_end
        reply = Reply()
        self._inbox.put(Message(partial(self._finish_all, reply), reply))
        if self._ended:
            self._refuse_rest()
        reply.get()

    def abandon(self, on_end: Callable[[], None] | None = None) -> bool:
        """As `close`, without waiting, for finalizers; False without a thread."""
        self._refuse()
        if not self._thread.alive:
            return False
        self._on_end = on_end or self._on_end
        self._inbox.put(Message(self._finish_all))
        return True

    def end_at_exit(self) -> None:
        """End the loop at exit of the interpreter, without `on_end`, and wait a limited time."""
        if self._thread.alive and not sys.is_finalizing():
            self.abandon()
            self._thread.join(EXIT_SECONDS)

    def _refuse(self) -> None:
        """Refuse new tasks, and cancel all requests."""
        self.closed = True
        self._cancel_known()

    def _known(self) -> list[Request]:
        """Requests that run or wait."""
        return [*self.slots.seated, *self.slots.waiting]

    # -- the thread --------------------------------------------------------------------------------

    def hold(self, over: Event) -> Event:
        """Hold the thread between two operations until `over`; return an event: it is there."""
        held = Event()
        if self._thread.alive and not self.here:
            self._inbox.put(Message(partial(self._held, held, over)))
        else:
            held.set()
        return held

    @property
    def awaits_another(self) -> bool:
        """The thread waits for the reply of another loop, in code of the caller: no operation runs."""
        frame = self._thread.frame
        return frame is not None and frame.f_code is Reply.get.__code__ and frame.f_locals["self"].empty()

    def _held(self, held: Event, over: Event) -> None:
        self._idle = True
        held.set()
        over.wait()
        self._idle = False

    def renew_in_child(self) -> None:
        """Start anew in a forked process, which has the forking thread alone.

        Requests leave their slots, an operation that ran is lost, and a wait raises RequestSuperseded.
        """
        if self.here or not self._thread.asked:
            return
        waits: list[Any] = [self._doing, *self._unread(), *self._known()]
        self.slots.clear()
        self._inbox = SimpleQueue()
        if not self._idle:
            self._shared.lose_all()
        self._idle = True
        self._thread.renew()
        for each in waits:
            if each is not None and each.reply is not None:
                each.reply.fail(RequestSuperseded("the process was forked while this request ran: ask again"))

    def _serve(self) -> None:
        wait: float | None = 0
        try:
            while self._take(wait):
                if self.slots.waiting:
                    self._admit()
                soon = self.slots.settle()
                if not (wanted := self.slots.wanted()):
                    wait = self._idle_seconds() if soon is None else soon
                    continue
                wait = self._scheduler.grace(self.slots) if len(wanted) < len(self.slots.all) else 0
                if not wait:
                    self._tasks.decode(self._scheduler.choose(wanted))
        except BaseException:
            logger.exception("the decode loop ended")
            self._finish_all()

    def _take(self, wait: float | None) -> bool:
        """Take all messages; False at the end. `wait`: longest wait for the first; None: without limit."""
        while True:
            try:
                if wait is not None and wait <= 0:
                    if self._inbox.empty():
                        return True
                    message = self._inbox.get_nowait()
                else:
                    self._idle = True
                    message = self._inbox.get(timeout=wait)
            except Empty:
                return True
            finally:
                self._idle = False
            wait, self._doing = 0, message
            decode = message.act()
            self._doing = None
            if decode or self._ended:
                return not self._ended

    def _idle_seconds(self) -> float | None:
        """Longest wait for a message while there is nothing to decode; None: without limit."""
        if ended := [slot.runner.checkpoints.owes_since or 0.0 for slot in self.slots.owing()]:
            rest, waits = max(ended) + REST_SECONDS - time.monotonic(), self.slots.seconds()
            if rest > 0:
                return rest if waits is None else min(rest, waits)
            self.slots.store_owed()
        return self.slots.seconds()

    # -- messages ----------------------------------------------------------------------------------

    def _receive(self, task: Task) -> None:
        request = task.request
        if self._ended or request.over:
            over = RequestCancelled("the request is over")
            task.reply.fail(self._cancelled() if self._ended else over)
            return
        if request.task is not None:  # its caller was interrupted, and sends a new one
            self._tasks.drop(request)
        request.task = task
        request.comes()
        if request.slot is not None:
            self._tasks.start(task, request.slot)
        else:
            self.slots.queue(request)

    def _resume(self, request: Request) -> None:
        paused = request.task
        if paused is not None and self._ended:
            paused.reply.fail(self._cancelled())
            return
        if paused is None or not isinstance(paused.wanted, Reader):
            return  # it runs already
        request.comes()
        if request.slot is not None:
            self._tasks.advance(paused, 0)
        elif request not in self.slots.waiting:
            self.slots.queue(request)

    def _call(self, request: Request, work: Callable[[], Any], reply: Reply) -> bool:
        """Do work of a request; True, since a batch is next."""
        try:
            if self._ended or request.cancelled:
                raise self._cancelled()
            reply.put(work())
        except BaseException as error:
            reply.fail(error)
        return True

    def _admit(self) -> None:
        for request, found in self.slots.admitted():
            task = request.task
            assert task is not None, "it waited with one"
            if isinstance(found, Slot):
                self._tasks.start(task, found)
            else:
                self._tasks.fail(task, found or self._cancelled())

    def _cancelled(self) -> RequestCancelled | ModelClosed:
        """The error of a request that was ended by `cancel` or by `close`."""
        if self.closed:
            return ModelClosed("the model is closed")
        return RequestCancelled("the request was cancelled; ask again to go on from where it stopped")

    # -- the end -----------------------------------------------------------------------------------

    def _finish_all(self, reply: Reply | None = None) -> None:
        """End all requests and call `_on_end`; later messages are refused."""
        error: BaseException | None = None
        if not self._ended:
            self.closed = True
            for request in self._known():
                task, seated = request.task, request.slot is not None
                self._tasks.drop(request)
                if task is not None:
                    self._tasks.fail(task, self._cancelled())
                if seated:
                    self._tasks.end(request, None)
            self._ended = True
            self._refuse_rest()  # `_on_end` waits for native calls whose threads may wait for a reply
            try:
                if self._on_end is not None:
                    self._on_end()
            except BaseException as raised:
                error = raised
            self._on_end = None
            self._refuse_rest()
        if reply is not None:
            reply.put(None) if error is None else reply.fail(error)

    def _refuse_rest(self) -> None:
        """Refuse messages that came after the end, which their actions notice."""
        for message in self._unread():
            message.act()

    def _unread(self) -> Iterator[Message]:
        """Take the messages that are in the inbox, without waiting."""
        while True:
            try:
                yield self._inbox.get_nowait()
            except Empty:
                return


def _look() -> None:
    """Wake the loop: a request was cancelled."""
