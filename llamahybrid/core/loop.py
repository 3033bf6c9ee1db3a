"""DecodeLoop: the one thread of a model that owns its context.

The loop takes messages, gives waiting requests their slots, chooses a batch, decodes it, and advances each
task with the result: verify, checkpoint, sample, publish. Callers only wait for replies. Signals are raised
in the main thread alone, so that no operation of the loop is interrupted.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from llamahybrid.core.admission import Admission
from llamahybrid.core.batch import Reader
from llamahybrid.core.executor import Executor
from llamahybrid.core.loop_thread import LoopThread
from llamahybrid.core.messages import Call, End, Look, Message, Resume, Run, Stop
from llamahybrid.core.process_hooks import register
from llamahybrid.core.reply import Reply
from llamahybrid.core.request import Request, Task
from llamahybrid.core.scheduler import Scheduler
from llamahybrid.core.slots import Slot, Slots
from llamahybrid.core.tasks import Tasks
from llamahybrid.errors import ModelClosed, RequestCancelled, RequestSuperseded
from llamahybrid.memory.shared import SharedContext

logger = logging.getLogger("llamahybrid")

EXIT_SECONDS = 10.0
"""Longest wait of the interpreter's exit for a running batch."""


class DecodeLoop:
    """Runs the requests of one model, one in each slot."""

    def __init__(
        self, slots: Slots, shared: SharedContext, scheduler: Scheduler, report: Callable[[Request], None]
    ) -> None:
        """`report` is called with each finished request."""
        self.slots = slots
        self.admission = Admission(slots)
        self.closed = False
        """New tasks are refused."""
        self._ended = False
        """All requests are over, and messages are refused."""
        self._calls: deque[Call] = deque()
        """Work without a slot, oldest first; one is done between two batches."""
        self._shared = shared
        self._scheduler = scheduler
        self._tasks = Tasks(slots, self.admission, shared, scheduler, self._cancelled, report)
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._doing: Message | None = None
        """The message that is processed."""
        self._thread = LoopThread()
        self._idle = True
        """The thread waits for a message: no operation on memory is half done."""
        self._on_end: Callable[[], None] | None = None
        """Called in the loop's thread after the last request."""
        for slot in slots:
            slot.runner.others_waiting = self.admission.others_waiting
            slot.runner.is_awaited = self.admission.is_awaited
        register(self)

    # -- from any thread ---------------------------------------------------------------------------

    @property
    def here(self) -> bool:
        """The calling thread is the loop's."""
        return self._thread.here

    def post(self, message: Message) -> None:
        """Send a message; after the end, it is refused in the calling thread."""
        if not (self._ended or self._thread.serves):
            self._thread.start(self._serve)
        self._inbox.put(message)
        if self._ended:  # the thread reads no more messages
            self._refuse_rest()

    def run(self, request: Request, begin: Callable[[Executor], Any]) -> Any:
        """Run a task of a request and wait for its result; `begin(executor)` gives its steps, or the result.

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

    def submit(self, request: Request, begin: Callable[[Executor], Any], reply: Reply) -> None:
        """Send a task; `reply` gets its result, or its tokens."""
        if self.closed:
            raise self._cancelled()
        request.reply, request.aside = reply, None
        request.awaits = True
        self.post(Run(Task(request, begin, reply)))
        if request.cancelled:  # before `cancel` could see the reply
            self._refuse_waiting(request)

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
        self.post(Call(request, work, reply))
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
            self._inbox.put(Look())

    def _refuse_waiting(self, request: Request) -> None:
        """Answer a cancelled request that has not begun, without waiting for the running batch."""
        if (reply := request.reply) is not None and request.slot is None and not request.begun:
            reply.fail(self._cancelled())

    def cancel_all(self) -> None:
        """Cancel all requests that run or wait; takes no lock."""
        for request in self._known():
            self.cancel(request)
        if self._thread.asked:
            self._inbox.put(Look(cancel=True))  # those whose messages are not read yet

    def end(self, request: Request, wait: bool = True) -> None:
        """End a request: release its slot and report it; wait until that is done."""
        if request.over:
            return
        if self.here:
            if not request.inline:  # called by the garbage collector, in the loop's thread
                self._inbox.put(End(request))
                return
            reply = Reply()
            self._tasks.end(request, reply)
            if wait:
                reply.get()
            return
        if not self._thread.asked and request.progress is None:
            request.over = True
            return
        answer = Reply() if wait else None
        self.post(End(request, answer))
        if answer is not None:
            answer.get()

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
        self._inbox.put(Stop(reply))
        if self._ended:
            self._refuse_rest()
        reply.get()

    def abandon(self, on_end: Callable[[], None]) -> bool:
        """As `close`, without waiting, for finalizers; False without a thread."""
        self.closed = True
        if not self._thread.alive:
            return False
        self._on_end = on_end
        self._refuse()
        self._inbox.put(Stop())
        return True

    def end_at_exit(self) -> None:
        """End the loop at exit of the interpreter, without `on_end`, and wait a limited time."""
        if self._thread.alive and not sys.is_finalizing():
            self._refuse()
            self._inbox.put(Stop())
            self._thread.join(EXIT_SECONDS)

    def _refuse(self) -> None:
        """Refuse new tasks, and cancel all requests."""
        self.closed = True
        for request in self._known():
            self.cancel(request)

    def _known(self) -> list[Request]:
        """Requests that run or wait."""
        return [*self.slots.seated, *self.admission.waiting]

    # -- the thread --------------------------------------------------------------------------------

    def renew_in_child(self) -> None:
        """Start anew in a forked process, which has the forking thread alone.

        Requests leave their slots, an operation that ran is lost, and a wait raises RequestSuperseded.
        """
        if self.here or not self._thread.asked:
            return
        messages: list[Any] = [self._doing, *self._calls, *self._unread(), *self._known()]
        self.admission.clear()
        self._inbox = SimpleQueue()
        self._calls.clear()
        if not self._idle:
            self._shared.lose_all()
        self._idle = True
        self._thread.renew()
        for message in messages:
            reply = getattr(message.task if isinstance(message, Run) else message, "reply", None)
            if reply is not None:
                reply.fail(RequestSuperseded("the process was forked while this request ran: ask again"))

    def _serve(self) -> None:
        try:
            while self._take():
                if self.admission.waiting:
                    self._admit()
                if self._calls:
                    self._do_call()
                if (wanted := self.slots.wanted()) and not self._expects(wanted):
                    self._tasks.decode(self._scheduler.choose(wanted))
        except BaseException:
            logger.exception("the decode loop ended")
            self._finish_all(None)

    def _take(self) -> bool:
        """Take all messages, waiting for one where there is nothing to decode; False at the end."""
        wait = self._wait_seconds()
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
            if isinstance(message, Stop):
                self._finish_all(message.reply)
                return False
            self._do(message)
            self._doing = None

    def _wait_seconds(self) -> float | None:
        """Longest wait for the next message; None: without limit."""
        if self._calls:
            return 0
        if wanted := self.slots.wanted():
            return self._expects(wanted)
        self.slots.store_owed(lambda: not self.admission.waiting)
        return self.admission.seconds()

    def _expects(self, wanted: Sequence[Any]) -> float:
        """Seconds for which a batch waits for more tokens than those that are `wanted` now."""
        return 0 if len(wanted) == len(self.slots.all) else self._scheduler.grace_seconds(self.slots)

    def _do(self, message: Message) -> None:
        match message:
            case Run(task):
                self._receive(task)
            case Resume(request):
                paused = request.task
                if paused is not None and isinstance(paused.wanted, Reader):  # else it runs already
                    request.comes()
                    if request.slot is not None:
                        self._tasks.advance(paused, 0)
                    elif request not in self.admission.waiting:
                        self.admission.queue(request)
            case End(request, reply):
                self._tasks.end(request, reply)
            case Look(cancel=True):
                for request in self._known():
                    self.cancel(request)
            case Call():
                self._calls.append(message)

    def _do_call(self) -> None:
        """Do the work that has waited longest, unless its request was cancelled."""
        call = self._calls[0]
        try:
            if call.request.cancelled:
                raise self._cancelled()
            call.reply.put(call.work())
        except BaseException as error:
            call.reply.fail(error)
        finally:
            self._calls.popleft()

    def _receive(self, task: Task) -> None:
        request = task.request
        if request.over:
            task.reply.fail(RequestCancelled("the request is over"))
            return
        if request.task is not None:  # its caller was interrupted, and sends a new one
            self._tasks.drop(request)
        request.task = task
        request.comes()
        if request.slot is not None:
            self._tasks.start(task, request.slot)
        else:
            self.admission.queue(request)

    def _admit(self) -> None:
        for request, found in self.admission.admitted():
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

    def _finish_all(self, reply: Reply | None) -> None:
        """End all requests and call `_on_end`; later messages are refused."""
        self.closed = True
        while self._calls:
            self._calls.popleft().reply.fail(self._cancelled())
        for request in self._known():
            task, seated = request.task, request.slot is not None
            self._tasks.drop(request)
            if task is not None:
                self._tasks.fail(task, self._cancelled())
            if seated:
                self._tasks.end(request, None)
        error: BaseException | None = None
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
        """Refuse messages that came after the end."""
        for message in self._unread():
            match message:
                case Run(task):
                    task.request.task = None
                    task.reply.fail(self._cancelled())
                case Resume(request) if request.task is not None:
                    request.task.reply.fail(self._cancelled())
                case End(request, reply):
                    self._tasks.end(request, reply)
                case Call(reply=reply):
                    reply.fail(self._cancelled())
                case Stop(reply) if reply is not None:
                    reply.put(None)

    def _unread(self) -> Iterator[Message]:
        """Take the messages that are in the inbox, without waiting."""
        while True:
            try:
                yield self._inbox.get_nowait()
            except Empty:
                return
