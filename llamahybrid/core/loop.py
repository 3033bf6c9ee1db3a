"""DecodeLoop: the one thread of a model that owns its context.

The loop takes messages, gives waiting requests their slots, chooses a batch, decodes it, and advances each
task with the result: verify, checkpoint, sample, publish. Callers only wait for replies. Signals are raised
in the main thread alone, so that no operation of the loop is interrupted.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from llamahybrid.core.admission import Admission
from llamahybrid.core.batch import Decode, Reader
from llamahybrid.core.executor import Executor, SequenceChanged
from llamahybrid.core.messages import Call, End, Look, Message, Resume, Run, Stop
from llamahybrid.core.nested import NestedRequests
from llamahybrid.core.reply import Reply
from llamahybrid.core.request import Request, Task, this_thread
from llamahybrid.core.scheduler import Part, Scheduler
from llamahybrid.core.slots import Slot, Slots
from llamahybrid.core.stoppable import StoppableBatches
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
        self._start = threading.Lock()
        self._thread: threading.Thread | None = None
        self._serving = False
        """The thread reads messages, or did until the end."""
        self._process = os.getpid()
        self._batches = StoppableBatches(slots)
        self._nested = NestedRequests(slots, self._batches, self._cancelled)
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
        return self._thread is threading.current_thread()

    def post(self, message: Message) -> None:
        """Send a message; after the end, it is refused in the calling thread."""
        if self._process != os.getpid():
            self._go_on_in_child()
        if self._thread is None or self._thread.ident is None:
            self._begin()
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
        self.submit(request, begin, reply)
        return self.result(request, reply)

    def submit(self, request: Request, begin: Callable[[Executor], Any], reply: Reply) -> None:
        """Send a task; `reply` gets its result, or its tokens."""
        if self.closed:
            raise ModelClosed("the model is closed")
        request.thread, request.reply = this_thread(), reply
        self.post(Run(Task(request, begin, reply)))

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
        if (reply := request.reply) is not None and request.slot is None and not request.begun:
            reply.fail(self._cancelled())  # without waiting for the running batch
        if self._thread is not None:
            self._inbox.put(Look())

    def cancel_all(self) -> None:
        """Cancel all requests that run or wait; takes no lock."""
        for request in [*self.slots.seated, *self.admission.waiting]:
            self.cancel(request)
        if self._thread is not None:
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
        if self._thread is None and self._process == os.getpid():
            request.over = True
            return
        answer = Reply() if wait else None
        self.post(End(request, answer))
        if answer is not None:
            answer.get()

    def close(self, last_words: Callable[[], None]) -> None:
        """End the loop: cancel all requests, call `last_words()` in the loop's thread, and wait for that."""
        if self._process != os.getpid():
            self._go_on_in_child()
        self.closed = True
        for request in [*self.slots.seated, *self.admission.waiting]:
            self.cancel(request)
        with self._start:
            thread = self._thread
        if thread is None or not thread.is_alive() or self._process != os.getpid():
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
        if self._thread is None or not self._thread.is_alive() or self._process != os.getpid():
            return False
        self._last_words = last_words
        for request in self.slots.seated:
            self.cancel(request)
        self._inbox.put(Stop())
        return True

    # -- the thread --------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Start the thread. Raises RuntimeError where the system has none to give."""
        with self._start:
            if not self._serving and not self._ended:  # one that an interrupt left half started gives way
                self._thread = threading.Thread(target=self._serve, name="llamahybrid-decode", daemon=True)
                self._thread.start()

    def _go_on_in_child(self) -> None:
        """Begin anew in a forked process, which has no such thread; an operation it was in is lost."""
        with _fork_lock:
            if self._process == os.getpid():
                return
            self._process = os.getpid()
            self._start, self._thread, self._serving = threading.Lock(), None, False
            self._inbox = SimpleQueue()
            lost = not self._idle
            self._idle = True
            for request in [*self.slots.seated, *self.admission.waiting]:
                if request.slot is not None:
                    request.parked = request.progress is not None and not request.progress.over
                    request.prompt = request.view.ids()
                    self.slots.leave(request)
            self.admission.waiting = []
            self._calls.clear()
            if lost:
                self._shared.lose_all()

    def _serve(self) -> None:
        with self._start:
            if self._serving or not self.here:
                return  # interrupted while it started, and replaced
            self._serving = True
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
                        self._advance(paused, 0)
                    elif request not in self.admission.waiting:
                        self.admission.queue(request)
            case End(request, reply):
                self._end(request, reply)
            case Look(cancel=True):
                for request in [*self.slots.seated, *self.admission.waiting]:
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
            self._drop_task(request)
        request.task = task
        request.comes()
        if request.slot is not None:
            self._start_task(task, request.slot)
        else:
            self.admission.queue(request)

    def _drop_task(self, request: Request) -> None:
        task, request.task = request.task, None
        for steps in () if task is None else (task.return_steps, task.steps):
            if isinstance(steps, Generator):
                with contextlib.suppress(Exception):
                    steps.close()
        self.admission.drop(request)

    def _admit(self) -> None:
        for request, found in self.admission.admitted():
            task = request.task
            assert task is not None, "it waited with one"
            if isinstance(found, Slot):
                self._start_task(task, found)
            else:
                self._fail(task, found or self._cancelled())

    # -- tasks -------------------------------------------------------------------------------------

    def _start_task(self, task: Task, slot: Slot) -> None:
        request = task.request
        if request.cancelled:
            self._fail(task, self._cancelled())
            return
        try:
            self.admission.running = request
            if request.parked:
                task.return_steps = slot.executor.come_back(request)
            elif task.steps is None:
                task.steps = task.begin(slot.executor)
        except BaseException as error:
            self._fail(task, error)
            return
        finally:
            self.admission.running = None
        if task.return_steps is not None or isinstance(task.steps, Generator):
            self._advance(task, None)
        else:
            self._finish(task, task.steps)

    def _came_back(self, task: Task) -> None:
        """Continue, or begin, the task of a preempted request whose sequence is restored."""
        request, slot = task.request, task.request.slot
        assert slot is not None, "it has just come back to it"
        task.return_steps, request.parked = None, False
        if request.known is not None and request.known.forgotten:
            slot.runner.stop_storing()
        request.known = None
        self._start_task(task, slot) if task.steps is None else self._advance(task, None)

    def _advance(self, task: Task, count: int | None, error: BaseException | None = None) -> None:
        """Continue a task with the number of tokens that were decoded, or with an error."""
        steps = task.steps if task.return_steps is None else task.return_steps
        back = result = None
        self.admission.running = task.request
        try:
            task.wanted = steps.send(count) if error is None else steps.throw(error)
            if isinstance(task.wanted, Reader):
                task.request.asks()  # the time of its reader begins
            return
        except StopIteration as stop:
            back, result = task.return_steps is not None, stop.value
        except BaseException as raised:
            self._fail(task, raised)
            return
        finally:
            self.admission.running = None
        if back:
            self._came_back(task)
        else:
            self._finish(task, result)

    def _finish(self, task: Task, result: Any) -> None:
        request = task.request
        request.task = None
        request.asks()
        if request.whole:
            self._nested.leave()
        if request.progress is None:  # a single operation: the slot is not needed any more
            self.admission.leave(request)
        task.reply.put(result)

    def _fail(self, task: Task, error: BaseException) -> None:
        request = task.request
        request.task = None
        if request.whole:
            self._nested.leave()
        if isinstance(error, (RequestCancelled, ModelClosed)) and request.progress is not None:
            request.progress.cancelled = True
        if request.progress is None:
            self.admission.leave(request)
        task.reply.fail(error)

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
            self._drop_task(request)
            try:
                self.admission.running = request
                if request.slot is not None:
                    request.slot.executor.end(request)
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
                self._advance(part.task, None, self._cancelled())
            elif live.n != part.wanted.position or live.state.is_invalid:
                self._advance(part.task, None, SequenceChanged("memory was changed while tokens waited"))
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
                self._advance(part.task, None, SequenceChanged("a batch of several requests failed"))
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
            self._advance(part.task, part.count, lost)

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
        self._advance(part.task, part.count, error)

    # -- the end -----------------------------------------------------------------------------------

    def _finish_all(self, reply: Reply | None) -> None:
        """End all requests and call the last words; later messages are refused."""
        self.closed = True
        for request in list(self.admission.waiting):
            self.admission.drop(request)
            if request.task is not None:
                self._fail(request.task, self._cancelled())
        while self._calls:
            self._calls.popleft().reply.fail(self._cancelled())
        for request in self.slots.seated:
            if request.task is not None:
                task = request.task
                self._drop_task(request)
                self._fail(task, self._cancelled())
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
        thread = loop._thread
        if thread is None or loop._process != os.getpid() or not thread.is_alive() or sys.is_finalizing():
            continue
        loop.closed = True
        for request in loop.slots.seated:
            loop.cancel(request)
        loop._inbox.put(Stop())
        thread.join(EXIT_SECONDS)
