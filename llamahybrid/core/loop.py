"""DecodeLoop: the one thread of a model that owns its context.

The loop takes messages, gives waiting requests their slots, chooses a batch, decodes it, and advances each
task with the result: verify, checkpoint, sample, publish. Callers only wait for replies. Signals are raised
in the main thread alone, so that no operation of the loop is interrupted.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from llamahybrid.core.admission import Admission
from llamahybrid.core.batch import Decode, Reader
from llamahybrid.core.executor import Executor, SequenceChanged
from llamahybrid.core.leaving import end
from llamahybrid.core.loop_thread import LoopThread
from llamahybrid.core.messages import Call, End, Look, Message, Resume, Run, Stop
from llamahybrid.core.nested import NestedRequests
from llamahybrid.core.reply import Reply
from llamahybrid.core.request import Request, Task, this_thread
from llamahybrid.core.scheduler import Part, Scheduler
from llamahybrid.core.slots import Slot, Slots
from llamahybrid.core.stoppable import StoppableBatches
from llamahybrid.core.tasks import Tasks
from llamahybrid.errors import DecodeError, ModelClosed, RequestCancelled
from llamahybrid.memory.shared import SharedContext

logger = logging.getLogger("llamahybrid")

ABORTED = 2
"""Result of llama_decode when its abort callback said so (include/llama.h)."""

GRACE_SHARE = 0.25
"""Longest delay of a batch for answers whose readers asked at once the last time: a share of a step,"""

GRACE_SECONDS = 2e-3
"""and at least this many seconds."""

EXIT_SECONDS = 10.0
"""Longest wait of the interpreter's exit for a running batch."""


class DecodeLoop:
    """Runs the requests of one model, one in each slot."""

    def __init__(
        self, slots: Slots, shared: SharedContext, scheduler: Scheduler, tell: Callable[[Request], None]
    ) -> None:
        """`tell` is called with each finished request."""
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
        self._tell = tell
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._thread = LoopThread()
        self._batches = StoppableBatches(slots)
        self._nested = NestedRequests(slots, self._batches, self._cancelled)
        self._tasks = Tasks(self.admission, self._nested, self._cancelled)
        self._idle = True
        """The thread waits for a message: no operation on memory is half done."""
        self._last_words: Callable[[], None] | None = None
        for slot in slots:
            slot.runner.others = self.admission
        _all.add(self)

    # -- from any thread ---------------------------------------------------------------------------

    @property
    def here(self) -> bool:
        """The calling thread is the loop's."""
        return self._thread.here

    def post(self, message: Message) -> None:
        """Send a message; after the end, it is refused in the calling thread."""
        if self._thread.forked:
            self._go_on_in_child()
        if not self._ended:
            self._thread.start(self._serve)
        self._inbox.put(message)
        if self._ended:  # the thread reads no more messages
            self._refuse_rest()

    def run(self, request: Request, begin: Callable[[Executor], Any]) -> Any:
        """Run a task of a request and wait for its result; `begin(executor)` gives its steps, or the result.

        However the wait ends, the request is cancelled if the task is not through.
        """
        if self.here:
            return self._nested.run(request, begin)
        reply = Reply()
        try:
            self.submit(request, begin, reply)
            return self.result(request, reply)
        finally:
            request.awaits = False

    def submit(self, request: Request, begin: Callable[[Executor], Any], reply: Reply) -> None:
        """Send a task; `reply` gets its result, or its tokens."""
        if self.closed:
            raise ModelClosed("the model is closed")
        request.thread, request.reply, request.aside = this_thread(), reply, None
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
            self._nested.cancel()
        self._batches.stop(request)
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
            self._end(request, reply)
            if wait:
                reply.get()
            return
        if not (self._thread.asked or self._thread.forked):
            request.over = True
            return
        answer = Reply() if wait else None
        self.post(End(request, answer))
        if answer is not None:
            answer.get()

    def close(self, last_words: Callable[[], None]) -> None:
        """End the loop: cancel all requests, call `last_words()` in the loop's thread, and wait for that."""
        if self._thread.forked:
            self._go_on_in_child()
        self.closed = True
        for request in self._known():
            self.cancel(request)
        if not self._thread.settled():
            last_words()
            return
        self._last_words = last_words
        reply = Reply()
        self._inbox.put(Stop(reply))
        if self._ended:
            self._refuse_rest()
        reply.get()

    def abandon(self, last_words: Callable[[], None]) -> bool:
        """As `close`, without waiting, for finalisers; False where there is no thread to do it."""
        self.closed = True
        if not self._thread.alive:
            return False
        self._last_words = last_words
        for request in self.slots.seated:
            self.cancel(request)
        self._inbox.put(Stop())
        return True

    def end_at_exit(self) -> None:
        """End the loop at exit of the interpreter, without last words; wait for that a while."""
        if not self._thread.alive or sys.is_finalizing():
            return
        self.closed = True
        for request in self.slots.seated:
            self.cancel(request)
        self._inbox.put(Stop())
        self._thread.join(EXIT_SECONDS)

    def _known(self) -> list[Request]:
        """Requests that run or wait."""
        return [*self.slots.seated, *self.admission.waiting]

    # -- the thread --------------------------------------------------------------------------------

    def _go_on_in_child(self) -> None:
        """Begin anew in a forked process, which has no such thread; an operation it was in is lost."""
        with _fork_lock:
            if not self._thread.forked:
                return
            self._inbox = SimpleQueue()
            for request in self._known():
                if request.slot is not None:
                    request.parked = request.progress is not None and not request.progress.over
                    request.prompt = request.view.ids()
                    self.slots.leave(request)
            self.admission.waiting = []
            self._calls.clear()
            if not self._idle:
                self._shared.lose_all()
            self._idle = True
            self._thread.renew()  # last: until then other threads of this process wait here, too

    def _serve(self) -> None:
        try:
            while self._take():
                self._admit()
                self._do_call()
                if self._grace_left() > 0:
                    continue  # more tokens for the batch are expected
                wanted = [
                    (request.task, request.task.wanted)
                    for request in self.slots.seated
                    if request.task is not None and isinstance(request.task.wanted, Decode)
                ]
                if wanted:
                    self._decode(self._scheduler.choose(wanted))
        except BaseException:
            logger.exception("the decode loop ended")
            self._finish_all(None)

    def _take(self) -> bool:
        """Take all messages, waiting for one where there is nothing to decode; False at the end."""
        wait = self._wait_seconds()
        while True:
            try:
                if wait is not None and wait <= 0:
                    message = self._inbox.get_nowait()
                else:
                    self._idle = True
                    message = self._inbox.get(timeout=wait)
            except Empty:
                return True
            finally:
                self._idle = False
            wait = 0
            if isinstance(message, Stop):
                self._finish_all(message.reply)
                return False
            self._do(message)

    def _wait_seconds(self) -> float | None:
        """Longest wait for the next message; None: without limit."""
        if self._calls:
            return 0
        if any(
            request.task is not None and isinstance(request.task.wanted, Decode)
            for request in self.slots.seated
        ):
            return self._grace_left()
        self.slots.store_owed(lambda: not self.admission.waiting)
        return self.admission.seconds()

    def _grace_left(self) -> float:
        """Seconds for which a batch still waits for the next tokens of answers with fast callers."""
        if len(self.slots) == 1:
            return 0.0
        now, grace = time.monotonic(), max(GRACE_SECONDS, GRACE_SHARE * self._scheduler.step_seconds)
        ready, left = False, 0.0
        for request in self.slots.seated:
            if request.task is not None and isinstance(request.task.wanted, Decode):
                ready = True
            elif request.away < grace and request.progress is not None and not request.progress.over:
                left = max(left, request.asked_at + grace - now)
        return left if ready else 0.0

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
                self._end(request, reply)
            case Look(cancel=True):
                for request in self._known():
                    self.cancel(request)
            case Call():
                self._calls.append(message)

    def _do_call(self) -> None:
        """Do the work that has waited longest, unless its request was cancelled."""
        if not self._calls:
            return
        call = self._calls.popleft()
        try:
            if call.request.cancelled:
                raise self._cancelled()
            call.reply.put(call.work())
        except BaseException as error:
            call.reply.fail(error)

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

    def _end(self, request: Request, reply: Reply | None) -> None:
        """End a request: keep its progress, release its slot, report it."""
        error: BaseException | None = None
        if not request.over:
            request.over = True
            self._tasks.drop(request)
            try:
                self.admission.running = request
                if request.slot is not None:
                    end(request.slot.executor, request)
                elif request.progress is not None:
                    request.progress.over = True
            except Exception as raised:
                error = raised
            finally:
                if request.slot is not None:
                    request.slot.executor.view.keep_rows(False)
                self.admission.leave(request)
                self.admission.running = None
            try:
                self._tell(request)
            except BaseException as raised:
                error = error or raised
        if reply is not None:
            reply.put(None) if error is None else reply.fail(error)
        elif error is not None:
            logger.error("the end of a request that was given up failed", exc_info=error)

    # -- decoding ----------------------------------------------------------------------------------

    def _decode(self, parts: list[Part]) -> None:
        """Decode one batch, and continue the tasks of its parts."""
        ready = []
        for part in parts:
            request, live = part.task.request, part.wanted.live
            if request.cancelled:
                self._tasks.advance(part.task, None, self._cancelled())
            elif live.n != part.wanted.position or live.state.is_invalid:
                self._tasks.advance(
                    part.task, None, SequenceChanged("memory was changed while tokens waited")
                )
            else:
                ready.append(part)
        if len(ready) < len(parts):
            return  # an advanced task may have had all buffers zeroed: choose again
        clock = time.perf_counter()
        if len(ready) == 1:
            self._decode_alone(ready[0], clock)
            return
        try:
            faults = self._shared.decode_parts(
                [(p.wanted.live, p.wanted.tokens[: p.count], p.wanted.rows_of(p.count)) for p in ready]
            )
        except BaseException as error:  # decoded alone, only the faulty one fails
            logger.info("a batch of several requests failed (%s): each goes on alone", error)
            for part in ready:
                part.task.alone = True
                self._tasks.advance(part.task, None, SequenceChanged("a batch of several requests failed"))
            return
        self._scheduler.took(ready, time.perf_counter() - clock)
        for part, fault in zip(ready, faults, strict=True):
            live, lost = part.wanted.live, None
            if fault is not None:
                lost = SequenceChanged(f"memory is not what it should be: {fault}")
            elif live.state.is_invalid or live.n != part.wanted.position + part.count:
                # A task before it had the buffers zeroed; its next batch would begin somewhere else.
                lost = SequenceChanged("another request had the memory zeroed")
            part.task.alone = fault is not None
            self._tasks.advance(part.task, part.count, lost)

    def _decode_alone(self, part: Part, clock: float) -> None:
        error: BaseException | None = None
        try:
            self._batches.decode(part.task.request, part.wanted, part.count)
        except BaseException as raised:
            error = raised
            if isinstance(raised, DecodeError) and raised.code == ABORTED and part.task.request.cancelled:
                error = self._cancelled()
        else:
            part.task.alone = False
            self._scheduler.took([part], time.perf_counter() - clock)
        self._tasks.advance(part.task, part.count, error)

    # -- the end -----------------------------------------------------------------------------------

    def _finish_all(self, reply: Reply | None) -> None:
        """End all requests and call the last words; later messages are refused."""
        self.closed = True
        for request in list(self.admission.waiting):
            self.admission.drop(request)
            if request.task is not None:
                self._tasks.fail(request.task, self._cancelled())
        while self._calls:
            self._calls.popleft().reply.fail(self._cancelled())
        for request in self.slots.seated:
            if request.task is not None:
                task = request.task
                self._tasks.drop(request)
                self._tasks.fail(task, self._cancelled())
            self._end(request, None)
        error: BaseException | None = None
        self._ended = True
        self._refuse_rest()  # the last words wait for calls whose threads may wait for a reply
        try:
            if self._last_words is not None:
                self._last_words()
        except BaseException as raised:
            error = raised
        self._last_words = None
        self._refuse_rest()
        if reply is not None:
            reply.put(None) if error is None else reply.fail(error)

    def _refuse_rest(self) -> None:
        """Refuse messages that came after the end."""
        while True:
            try:
                message = self._inbox.get_nowait()
            except Empty:
                return
            match message:
                case Run(task):
                    task.request.task = None
                    task.reply.fail(ModelClosed("the model is closed"))
                case Resume(request):
                    if request.task is not None:
                        request.task.reply.fail(ModelClosed("the model is closed"))
                case End(request, reply):
                    self._end(request, reply)
                case Call(reply=reply):
                    reply.fail(ModelClosed("the model is closed"))
                case Stop(reply):
                    if reply is not None:
                        reply.put(None)


_all: weakref.WeakSet[DecodeLoop] = weakref.WeakSet()
_fork_lock = threading.Lock()


@atexit.register
def _end_all() -> None:
    """End all loops at exit of the interpreter, before native code is unloaded."""
    for loop in list(_all):
        loop.end_at_exit()
