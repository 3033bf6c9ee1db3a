"""DecodeLoop: the one thread of a model that owns its context.

It takes messages, gives waiting requests their slots, chooses a batch, decodes it, and has each task go on
with what came of it: verify, checkpoint, sample, publish. Callers only wait for replies. No signal is raised
in this thread, so nothing it does is left half done.
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
from collections.abc import Callable, Generator
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from llamahybrid.capi.shim import Stop as StopFlag
from llamahybrid.core.batch import Decode, Reader
from llamahybrid.core.executor import Executor, SequenceChanged
from llamahybrid.core.messages import End, Feed, Look, Message, Reply, Resume, Run, Stop
from llamahybrid.core.request import Request, Task, this_thread
from llamahybrid.core.scheduler import Part, Scheduler
from llamahybrid.core.slots import Slot, Slots
from llamahybrid.errors import Busy, DecodeError, ModelClosed, RequestCancelled
from llamahybrid.memory.restore import recover
from llamahybrid.memory.shared import SharedContext
from llamahybrid.prompt_cache.base import Bytes, Tokens
from llamahybrid.prompt_cache.ladder import MIN_SPACING
from llamahybrid.prompt_cache.nodes import common_prefix

logger = logging.getLogger("llamahybrid")

ABORTED = 2
"""Result of llama_decode when its abort callback said so (include/llama.h)."""

PATIENCE = 0.02
"""Seconds after which a request whose reader is away gives its slot to one that waits, at least;"""

PATIENT_SWITCHES = 3
"""and as long as so many switches of the slot take."""

LONG_PATIENCE = 1.0
"""The same for one whose caller is at work on a token: in a logits processor, say."""

GRACE_SHARE = 0.25
"""How long a batch waits for answers whose next token was asked for at once before: a share of a step,"""

GRACE_SECONDS = 2e-3
"""and at least so long."""

LATE_LOOK = 0.05
"""Seconds after its patience ended for which a request is looked at again, once a millisecond."""

EXIT_SECONDS = 10.0
"""How long the end of the interpreter waits for a batch that runs."""


class DecodeLoop:
    """Runs the requests of one model, as many at a time as it has slots."""

    def __init__(
        self, slots: Slots, shared: SharedContext, scheduler: Scheduler, tell: Callable[[Request], None]
    ) -> None:
        """`tell` is called with each request that is over."""
        self.slots = slots
        self.patience: float | None = None
        """Seconds instead of `PATIENCE`, measured switches left out."""
        self.closed = False
        """No task is taken any more."""
        self._ended = False
        """Nobody takes messages any more; all requests are over."""
        self.waiting: list[Request] = []
        """Requests that have a task and no slot."""
        self._shared = shared
        self._scheduler = scheduler
        self._tell = tell
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._start = threading.Lock()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._stop = StopFlag()
        self._running: Request | None = None
        """The request that a batch is decoded for alone, or whose task goes on."""
        self._idle = True
        """It waits for a message: memory is as it is said to be."""
        self._last_words: Callable[[], None] | None = None
        self._inlined: list[Request] = []
        """Requests made inside the one that has the whole context."""
        self._freed = False
        """A slot was given back since waiting requests were looked at."""
        for slot in slots:
            slot.runner.others = self
            slot.executor.live.native.set_stop(self._stop)
        _all.add(self)

    # -- from any thread ---------------------------------------------------------------------------

    @property
    def here(self) -> bool:
        """The calling thread is the loop's."""
        return self._thread is threading.current_thread()

    def post(self, message: Message) -> None:
        """Send a message; one that comes after the end is answered here."""
        if self._process != os.getpid():
            self._go_on_in_child()
        if self._thread is None or self._thread.ident is None:
            self._begin()
        self._inbox.put(message)
        if self._ended:  # nobody takes it any more
            self._refuse_rest()

    def run(self, request: Request, begin: Callable[[Executor], Any]) -> Any:
        """Do a task of a request: `begin(executor)` gives its steps, or its result; wait for that result.

        However the wait ends, the request is cancelled if the task is not through.
        """
        if self.here:
            return self._inline(request, begin)
        reply = Reply()
        self.submit(request, begin, reply)
        return self.result(request, reply)

    def submit(self, request: Request, begin: Callable[[Executor], Any], reply: Reply) -> None:
        """Send a task; its result, or tokens, come by `reply`."""
        if self.closed:
            raise ModelClosed("the model is closed")
        request.thread, request.reply = this_thread(), reply
        self.post(Run(Task(request, begin, reply)))

    def result(self, request: Request, reply: Reply) -> Any:
        """Wait for a reply. Whatever interrupts the wait cancels the request, and is raised at once."""
        return reply.get(partial(self.cancel, request))

    def cancel(self, request: Request) -> None:
        """End a request soon; takes no lock, so that a signal handler may call it."""
        if request.over:
            return
        request.cancelled = True
        for inner in list(self._inlined) if request.whole else ():
            inner.cancelled = True
        self._stop.request(request.number)  # does nothing where it is not this one that runs
        if (reply := request.reply) is not None and request.slot is None and not request.begun:
            reply.fail(self._cancelled())  # its caller need not wait for the batch that runs
        if self._thread is not None:
            self._inbox.put(Look())

    def end(self, request: Request, wait: bool = True) -> None:
        """A request is over: give its slot back and tell of it; wait until that is done."""
        if request.over:
            return
        if self.here:
            if request.inline:
                self._end(request, None)
            else:  # the collector came by
                self._inbox.put(End(request))
            return
        if self._thread is None and self._process == os.getpid():
            request.over = True
            return
        reply = Reply() if wait else None
        self.post(End(request, reply))
        if reply is not None:
            reply.get()

    def close(self, last_words: Callable[[], None]) -> None:
        """End the loop: what runs is cancelled, `last_words()` is called in its thread. Waits for that."""
        if self._process != os.getpid():
            self._go_on_in_child()
        self.closed = True
        for request in [*self.slots.seated, *self.waiting]:
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
        """The same without waiting, for finalisers; False where there is no thread to do it."""
        self.closed = True
        if self._thread is None or not self._thread.is_alive() or self._process != os.getpid():
            return False
        self._last_words = last_words
        for request in self.slots.seated:
            self.cancel(request)
        self._inbox.put(Stop())
        return True

    # -- what the running request knows of others ------------------------------------------------------

    def waiting_beside(self) -> int:
        """Requests that want to decode, or wait for a slot, beside the one that runs."""
        others = (request for request in (*self.slots.seated, *self.waiting) if request is not self._running)
        return sum(request.task is not None for request in others)

    def wait_for(self, prompt: Tokens) -> bool:
        """Others of its salt that begin alike wait for what the prompt that is decoded leaves, or will."""
        current = self._running
        if current is None:
            return False
        return current.leads or any(
            other.salt == current.salt
            and other.prompt is not None
            and common_prefix(prompt, other.prompt) >= MIN_SPACING
            for other in self.waiting
        )

    # -- the thread --------------------------------------------------------------------------------

    def _begin(self) -> None:
        with self._start:
            if self._thread is None and not self._ended:
                self._thread = threading.Thread(target=self._serve, name="llamahybrid-decode", daemon=True)
            if self._thread is not None and self._thread.ident is None:  # an interrupt may come between
                with contextlib.suppress(RuntimeError):
                    self._thread.start()

    def _go_on_in_child(self) -> None:
        """In a forked process: the thread is not there, and what it was in the middle of is lost."""
        with _fork_lock:
            if self._process == os.getpid():
                return
            self._process = os.getpid()
            self._start, self._thread = threading.Lock(), None
            self._inbox = SimpleQueue()
            lost = not self._idle
            self._idle = True
            for request in [*self.slots.seated, *self.waiting]:
                if request.slot is not None:
                    request.parked = request.progress is not None and not request.progress.over
                    request.prompt = request.view.ids()
                    self.slots.leave(request)
            self.waiting = []
            if lost:
                self._shared.lose_all()

    def _serve(self) -> None:
        try:
            while self._take():
                self._admit()
                if self._grace_left() > 0:
                    continue  # more tokens for the batch are on their way
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
        """Take all messages, waiting for one where nothing is to be done; False at the end."""
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
        """How long the next message may be waited for; None: as long as it takes."""
        if any(
            request.task is not None and isinstance(request.task.wanted, Decode)
            for request in self.slots.seated
        ):
            return self._grace_left()
        if self._freed and self.waiting:
            return 0
        self.slots.store_owed(lambda: not self.waiting)
        if not self.waiting:
            return None
        now = time.monotonic()
        times = [request.deadline - now for request in self.waiting if request.deadline is not None]
        idle = (request.asked_at + self._patience(request) - now for request in self.slots.seated)
        times += [seconds for seconds in idle if seconds > -LATE_LOOK]  # longer ago: looked at since, in vain
        return max(1e-3, min(times, default=LONG_PATIENCE))

    def _grace_left(self) -> float:
        """Seconds that a batch still waits for answers whose callers ask for each token, and come soon."""
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
                if paused is not None and isinstance(paused.wanted, Reader):  # else it was told before
                    request.comes()
                    if request.slot is not None:
                        self._advance(paused, 0)
                    elif request not in self.waiting:
                        self._queue(request)
            case End(request, reply):
                self._end(request, reply)

    def _receive(self, task: Task) -> None:
        request = task.request
        if request.over:
            task.reply.fail(RequestCancelled("the request is over"))
            return
        if request.task is not None:  # its caller was interrupted, and asks anew
            self._drop_task(request)
        request.task = task
        request.comes()
        if request.slot is not None:
            self._start_task(task, request.slot)
        else:
            self._queue(request)

    def _queue(self, request: Request) -> None:
        if request.begun:
            request.deadline = None  # it was let in before
        self.waiting.append(request)
        self.waiting.sort(key=lambda each: each.born)

    def _drop_task(self, request: Request) -> None:
        task, request.task = request.task, None
        for steps in () if task is None else (task.return_steps, task.steps):
            if isinstance(steps, Generator):
                with contextlib.suppress(Exception):
                    steps.close()
        if request in self.waiting:
            self.waiting.remove(request)

    # -- slots -------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give waiting requests their slots, oldest first."""
        self._freed = False
        for request in list(self.waiting):
            if request.cancelled:
                self._refuse(request, self._cancelled())
            elif self._may_begin(request) and not self._seat(request) and request.whole:
                self._refuse_late(request)
                return  # those behind it would come in for ever
            self._refuse_late(request)

    def _refuse_late(self, request: Request) -> None:
        late = request.deadline is not None and time.monotonic() >= request.deadline
        if late and request.slot is None and request.task is not None:
            self._refuse(request, Busy("another request runs; wait=True waits for it"))

    def _may_begin(self, request: Request) -> bool:
        """What it builds on is there: the prompt of another request that begins alike is decoded."""
        if request.after is not None and not request.after.begun:
            return False
        if any(other.whole for other in self.slots.seated):
            return False
        prompt = request.prompt
        if prompt is None or request.parked or request.whole or len(self.slots) == 1:
            return True
        return not any(self._decodes_beginning(other, request, prompt) for other in self.slots.seated)

    def _decodes_beginning(self, other: Request, request: Request, prompt: Tokens) -> bool:
        prefilling = other.task is not None and (other.progress is None or other.progress.prefilling)
        if (
            not prefilling
            or other.prompt is None
            or other.salt != request.salt
            or request.rests_on is not None
        ):
            return False
        runner = self.slots.all[0].runner
        if not runner.live.profile.keeps_chats:
            return False
        shared = common_prefix(prompt, other.prompt)
        if shared < MIN_SPACING:
            return False
        free = self.slots.free()
        return shared >= MIN_SPACING + max(
            (slot.runner.checkpoints.depth(prompt, request.salt) for slot in free), default=0
        )

    def _seat(self, request: Request) -> bool:
        """Give a request a slot, if there is one, or another request makes room."""
        if request.whole:
            while (victim := self._victim(request)) is not None:
                self._park(victim)
            if self.slots.seated:
                return False
        elif not self.slots.free():
            if (victim := self._victim(request)) is None:
                return False
            self._park(victim)
        self.waiting.remove(request)
        slot = self.slots.best(request)
        task = request.task
        assert task is not None, "it waits with one"
        try:
            self._running = request
            self.slots.give(slot, request)
        except BaseException as error:
            self._fail(task, error)
            return True
        finally:
            self._running = None
        self._start_task(task, slot)
        return True

    def _victim(self, request: Request) -> Request | None:
        """Who gives its slot up for this one: away for longest, or asked for by the same thread."""
        now = time.monotonic()
        idle = [
            other
            for other in self.slots.seated
            if _away(other)
            and (other.thread == request.thread or now - other.asked_at >= self._patience(other))
        ]
        return min(idle, key=lambda other: other.asked_at, default=None)

    def _patience(self, request: Request) -> float:
        """How long the reader of a request may be away before another one may have its slot."""
        if self.patience is not None:
            return self.patience
        if request.entered:
            return LONG_PATIENCE
        costs = self.slots.all[0].runner.meter.costs()
        tokens = 0 if request.slot is None else request.slot.executor.live.n
        switch = costs.snapshot_seconds + costs.restore_seconds + tokens * costs.segment_seconds
        return max(PATIENCE, PATIENT_SWITCHES * switch)

    def _park(self, request: Request) -> None:
        self._running = request
        try:
            self.slots.park(request)
        finally:
            self._running = None

    # -- tasks -------------------------------------------------------------------------------------

    def _start_task(self, task: Task, slot: Slot) -> None:
        request = task.request
        if request.cancelled:
            self._fail(task, self._cancelled())
            return
        try:
            self._running = request
            if request.parked:
                task.return_steps = slot.executor.come_back(request)
            elif task.steps is None:
                task.steps = task.begin(slot.executor)
        except BaseException as error:
            self._fail(task, error)
            return
        finally:
            self._running = None
        if task.return_steps is not None or isinstance(task.steps, Generator):
            self._advance(task, None)
        else:
            self._finish(task, task.steps)

    def _came_back(self, task: Task) -> None:
        """A request that had lost its slot has what it had: its task goes on, or begins."""
        request, slot = task.request, task.request.slot
        assert slot is not None, "it has just come back to it"
        task.return_steps, request.parked = None, False
        if request.known is not None and request.known.forgotten:
            slot.runner.stop_storing()
        request.known = None
        self._start_task(task, slot) if task.steps is None else self._advance(task, None)

    def _advance(self, task: Task, count: int | None, error: BaseException | None = None) -> None:
        """Have a task go on, `count` tokens of what it wanted decoded, or with an error."""
        steps = task.steps if task.return_steps is None else task.return_steps
        back = result = None
        self._running = task.request
        try:
            task.wanted = steps.send(count) if error is None else steps.throw(error)
            if isinstance(task.wanted, Reader):
                task.request.asks()  # from here on its reader is away
            return
        except StopIteration as stop:
            back, result = task.return_steps is not None, stop.value
        except BaseException as raised:
            self._fail(task, raised)
            return
        finally:
            self._running = None
        if back:
            self._came_back(task)
        else:
            self._finish(task, result)

    def _finish(self, task: Task, result: Any) -> None:
        request = task.request
        request.task = None
        request.asks()
        if request.whole:
            self._leave_inlined()
        if request.progress is None:  # no prompt was begun: what it needed the slot for is done
            self._leave(request)
        task.reply.put(result)

    def _fail(self, task: Task, error: BaseException) -> None:
        request = task.request
        request.task = None
        if request.whole:
            self._leave_inlined()
        if isinstance(error, (RequestCancelled, ModelClosed)) and request.progress is not None:
            request.progress.cancelled = True
        if request.progress is None:
            self._leave(request)
        task.reply.fail(error)

    def _leave(self, request: Request) -> None:
        self.slots.leave(request)
        self._freed = True

    def _refuse(self, request: Request, error: Exception) -> None:
        """A request gets no slot."""
        self.waiting.remove(request)
        if request.task is not None:
            self._fail(request.task, error)

    def _cancelled(self) -> RequestCancelled | ModelClosed:
        """The error of a request that was ended, by `cancel` or by `close`."""
        if self.closed:
            return ModelClosed("the model is closed")
        return RequestCancelled("the request was cancelled; ask again to go on from where it stopped")

    def _end(self, request: Request, reply: Reply | None) -> None:
        """A request is over: keep its progress, give its slot back, tell of it."""
        error: BaseException | None = None
        if not request.over:
            request.over = True
            self._drop_task(request)
            try:
                self._running = request
                if request.slot is not None:
                    request.slot.executor.end(request)
                elif request.progress is not None:
                    request.progress.over = True
            except Exception as raised:
                error = raised
            finally:
                if request.slot is not None:
                    request.slot.executor.view.keep_rows(False)
                self._leave(request)
                self._running = None
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
        """Decode one batch, and have the tasks of its parts go on."""
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
            return  # one of the others may have had the buffers zeroed: all are looked at again
        clock = time.perf_counter()
        if len(ready) == 1:
            self._decode_alone(ready[0], clock)
            return
        try:
            faults = self._shared.decode_parts(
                [(p.wanted.live, p.wanted.tokens[: p.count], p.wanted.rows_of(p.count)) for p in ready]
            )
        except BaseException as error:  # alone, each fails or not for what it is itself
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
            elif live.n != part.wanted.position + part.count or live.state.is_invalid:
                lost = SequenceChanged("the task of another part had the buffers zeroed")
            part.task.alone = fault is not None
            self._advance(part.task, part.count, lost)

    def _decode_alone(self, part: Part, clock: float) -> None:
        error: BaseException | None = None
        try:
            self._decode_stoppable(part)
        except BaseException as raised:
            error = raised
            if isinstance(raised, DecodeError) and raised.code == ABORTED and part.task.request.cancelled:
                error = self._cancelled()
        else:
            part.task.alone = False
            self._scheduler.took([part], time.perf_counter() - clock)
        self._advance(part.task, part.count, error)

    def _decode_stoppable(self, part: Part) -> None:
        """Decode a batch of one sequence. One that was stopped inside is undone.

        A single token, or a draft, is never stopped inside: it takes little time, and its undo would have to
        be taken for every one.
        """
        live, wanted = part.wanted.live, part.wanted
        tokens, outputs = wanted.tokens[: part.count], wanted.rows_of(part.count)
        if len(tokens) == 1 or not wanted.prompt:
            live.decode(tokens, outputs)
            live.settle()
            return
        request = part.task.request
        undo = live.n, self._state(part)
        request.number = self._stop.begin()
        self._stop.arm(True)
        if request.cancelled:
            self._stop.request(request.number)
        try:
            live.decode(tokens, outputs)
        except BaseException:
            if live.state.is_invalid:
                recover(live, undo)
            raise
        finally:
            self._stop.arm(False)
            self._stop.end()
            live.settle()

    def _state(self, part: Part) -> Bytes | None:
        """The state before a batch, where memory cannot be cut back to it."""
        live, progress = part.wanted.live, part.task.request.progress
        if not live.profile.needs_checkpoints:
            return None
        if progress is not None and progress.staged and progress.staged[-1][0] == live.n:
            return progress.staged[-1][1]
        return live.snapshot(live.shared.undo_buffer, deep=False)

    def _inline(self, request: Request, begin: Callable[[Executor], Any]) -> Any:
        """Do a task inside another one that has the whole context: its batches are decoded right here."""
        slot = self.slots.all[0]
        before, view = slot.executor.request, slot.executor.view
        try:
            if before is not request:
                if request.slot is None:
                    request.slot, request.inline = slot, True
                    self._inlined.append(request)
                slot.executor.take(request)
                if request.progress is not None:  # another one inside it has decoded meanwhile
                    self._decode_inline(request, slot.executor.come_back(request))
            steps = begin(slot.executor)
            return self._decode_inline(request, steps) if isinstance(steps, Generator) else steps
        finally:
            if request.inline and request.progress is None:
                request.slot = None
                slot.executor.request, slot.executor.view = before, view

    def _decode_inline(self, request: Request, steps: Generator[Any, int, Any]) -> Any:
        """Do steps to their end, each batch right here; their result."""
        task = Task(request, None, Reply())
        try:
            wanted = next(steps)
            while True:
                assert isinstance(wanted, Decode), "its reader is here"
                part = Part(task, wanted, len(wanted.tokens))
                try:
                    if request.cancelled:
                        raise self._cancelled()
                    self._decode_stoppable(part)
                except Exception as error:
                    wanted = steps.throw(error)
                else:
                    wanted = steps.send(part.count)
        except StopIteration as stop:
            return stop.value

    def _leave_inlined(self) -> None:
        """The request that had the whole context is through: streams that it began go on by themselves."""
        for request in self._inlined:
            slot = request.slot
            if not request.over and slot is not None:
                slot.executor.request, slot.executor.view = request, request.view
                request.prompt = slot.executor.leave(request)
                request.parked = request.progress is not None and not request.progress.over
                request.inline = False
                slot.executor.request = request.slot = None
        self._inlined = []

    # -- the end -----------------------------------------------------------------------------------

    def _finish_all(self, reply: Reply | None) -> None:
        """End all requests and call the last words; no message is taken any more."""
        self.closed = True
        for request in list(self.waiting):
            self._refuse(request, ModelClosed("the model is closed"))
        for request in self.slots.seated:
            if request.task is not None:
                task = request.task
                self._drop_task(request)
                self._fail(task, self._cancelled())
            self._end(request, None)
        error: BaseException | None = None
        self._ended = True
        self._refuse_rest()  # the last words wait for calls that may wait for one of these
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
        """Answer messages that came after the end."""
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
                case Stop(reply):
                    if reply is not None:
                        reply.put(None)


def _away(request: Request) -> bool:
    """Nobody waits for what the request does next."""
    task = request.task
    if task is None:
        return True
    return isinstance(task.wanted, Reader) and isinstance(task.reply, Feed) and not task.reply.due


_all: weakref.WeakSet[DecodeLoop] = weakref.WeakSet()
_fork_lock = threading.Lock()


@atexit.register
def _end_all() -> None:
    """The interpreter ends: no batch may run when native code is torn down."""
    for loop in list(_all):
        thread = loop._thread
        if thread is None or loop._process != os.getpid() or not thread.is_alive() or sys.is_finalizing():
            continue
        loop.closed = True
        for request in loop.slots.seated:
            loop.cancel(request)
        loop._inbox.put(Stop())
        thread.join(EXIT_SECONDS)
