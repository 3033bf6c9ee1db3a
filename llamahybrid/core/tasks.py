"""Tasks: begin, decode, continue and end the steps of requests that have a slot."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from llamahybrid.capi.shim import Stop
from llamahybrid.core.answering import come_back, end, preempt
from llamahybrid.core.request import Decode, Reader, Reply, Request, Steps, Task
from llamahybrid.core.scheduler import Scheduler, Waiting
from llamahybrid.core.slot import SequenceChanged, Slot
from llamahybrid.core.slots import Slots
from llamahybrid.errors import DecodeError, ModelClosed, RequestCancelled
from llamahybrid.memory.restore import recover
from llamahybrid.memory.shared import SharedContext
from llamahybrid.prompt_cache.base import Bytes

logger = logging.getLogger("llamahybrid")

ABORTED = 2
"""Result of llama_decode when its abort callback said so (include/llama.h)."""


class StoppableBatches:
    """Decodes batches of one sequence each; `stop` ends the running one, which is then undone."""

    def __init__(self, slots: Slots, is_short: Callable[[int], bool]) -> None:
        """`is_short(tokens)`: a batch of a prompt takes so little time that nobody notices it."""
        self._is_short = is_short
        self._flag = Stop()
        for slot in slots:
            slot.live.native.set_stop(self._flag)

    def stop(self, request: Request) -> None:
        """Stop the batch that is decoded for a request, if any; from any thread, or a signal handler."""
        self._flag.request(request.number)

    def decode(self, request: Request, wanted: Decode) -> None:
        """Decode the next batch of one sequence.

        A single token, a draft, or a short batch is never stopped, and the state before it is not copied: on
        a GPU that takes as long. Raises DecodeError; the sequence is then as before, or as it was at the last
        cut of the prompt where the state was not copied and memory cannot be cut.
        """
        live, tokens, outputs = wanted.part
        if wanted.count == 1 or not wanted.prompt:
            live.decode(tokens, outputs)
            return
        short = self._is_short(wanted.count)
        undo = _before(request, wanted, copies=not short)
        if not short:
            request.number = self._flag.begin()
            if request.cancelled:
                self._flag.request(request.number)
        try:
            live.decode(tokens, outputs)
        except BaseException:
            if live.state.is_invalid and undo is not None:
                recover(live, undo)
            raise
        finally:
            if not short:
                self._flag.end()


def _before(request: Request, wanted: Decode, copies: bool) -> tuple[int, Bytes | None] | None:
    """The state to which a batch can be undone, see `recover`; None: there is none.

    `copies`: where memory cannot be cut, that before the batch is copied if it is not staged.
    """
    live, progress = wanted.live, request.progress
    if not live.profile.needs_checkpoints:
        return live.n, None
    staged = progress.staged[-1] if progress is not None and progress.staged else None
    if staged is None or (copies and staged[0] != live.n):
        return (live.n, live.snapshot(live.shared.undo_buffer, deep=False)) if copies else None
    return staged


class NestedRequests:
    """Requests made inside a request that has the whole context: those of a chat handler, say.

    The calling thread is the loop's own, so that each batch is decoded within the call, in the first slot.
    """

    def __init__(
        self, slots: Slots, batches: StoppableBatches, cancelled: Callable[[], BaseException]
    ) -> None:
        """`cancelled()`: the error of a cancelled request."""
        self._slots = slots
        self._batches = batches
        self._cancelled = cancelled
        self._requests: list[Request] = []

    def cancel(self) -> None:
        """Cancel all of them, in the middle of a batch too."""
        for request in list(self._requests):
            request.cancelled = True
            self._batches.stop(request)

    def run(self, request: Request, begin: Callable[[Slot], Any]) -> Any:
        """Run a task and return its result."""
        slot = self._slots.all[0]
        before = slot.current
        try:
            if before is not request:
                if request.slot is None:
                    request.slot, request.inline = slot, True
                    self._requests.append(request)
                    request.cancelled |= slot.request is not None and slot.request.cancelled
                slot.take(request)
                if request.progress is not None:  # another nested request was decoded since
                    self._decode(request, come_back(slot))
            steps = begin(slot)
            return self._decode(request, steps) if isinstance(steps, Generator) else steps
        except (RequestCancelled, ModelClosed):
            if request.progress is not None:
                request.progress.cancelled = True
            raise
        finally:
            if request.inline and request.progress is None:
                request.slot = None
                slot.current = before

    def _decode(self, request: Request, steps: Generator[Any, int, Any]) -> Any:
        """Run steps to their end and return their result."""
        try:
            wanted = next(steps)
            while True:
                assert isinstance(wanted, Decode), "its reader is here"
                try:
                    if request.cancelled:
                        raise self._cancelled()
                    self._batches.decode(request, wanted)
                except Exception as error:
                    wanted = steps.throw(error)
                else:
                    wanted = steps.send(wanted.count)
        except StopIteration as stop:
            return stop.value

    def leave(self) -> None:
        """The outer request is over: streams that it began continue as ordinary requests."""
        for request in self._requests:
            slot = request.slot
            if not request.over and slot is not None:
                slot.current = request
                request.park(preempt(slot, request))
                request.inline = False
                slot.current = request.slot = None
        self._requests = []


class Tasks:
    """Runs the tasks of one decode loop, in its thread."""

    def __init__(
        self,
        slots: Slots,
        shared: SharedContext,
        scheduler: Scheduler,
        cancelled: Callable[[], BaseException],
        report: Callable[[Request], None],
    ) -> None:
        """`cancelled()`: the error of a cancelled request; `report` is called with each finished request."""
        self.batches = StoppableBatches(slots, scheduler.is_short)
        self.nested = NestedRequests(slots, self.batches, cancelled)
        self._slots = slots
        self._shared = shared
        self._scheduler = scheduler
        self._cancelled = cancelled
        self._report = report

    def start(self, task: Task, slot: Slot) -> None:
        """Begin a task in the slot of its request, or restore the sequence of a preempted one first."""
        request = task.request
        if request.cancelled:
            self.fail(task, self._cancelled())
            return
        self._slots.running = request
        try:
            if task.steps is None:
                task.steps = self._return(task, slot) if request.parked else task.begin(slot)
        except BaseException as error:
            self.fail(task, error)
            return
        if isinstance(task.steps, Generator):
            self.advance(task, None)
        else:
            self._finish(task, task.steps)

    def _return(self, task: Task, slot: Slot) -> Steps[Any]:
        """Restore the sequence of a preempted request, and begin a task of it."""
        yield from come_back(slot)
        steps = task.begin(slot)
        return (yield from steps) if isinstance(steps, Generator) else steps

    def advance(self, task: Task, count: int | None, error: BaseException | None = None) -> None:
        """Continue a task with the number of tokens that were decoded, or with an error."""
        self._slots.running = task.request
        try:
            task.wanted = task.steps.send(count) if error is None else task.steps.throw(error)
        except StopIteration as stop:
            self._finish(task, stop.value)
        except BaseException as raised:
            self.fail(task, raised)
        else:
            if isinstance(task.wanted, Reader):
                task.request.asks()  # the time of its reader begins

    # -- decoding ----------------------------------------------------------------------------------

    def decode(self, batch: Sequence[Waiting]) -> None:
        """Decode one batch, and continue the tasks that wait for it."""
        ready = True
        for task, wanted in batch:
            state = wanted.live.state
            if task.request.cancelled:
                self.advance(task, None, self._cancelled())
            elif state.n != wanted.position or state.is_invalid:
                self.advance(task, None, SequenceChanged("memory was changed while tokens waited"))
            else:
                continue
            ready = False  # an advanced task may have had all buffers zeroed: choose again
        if not ready:
            return
        clock, several = time.perf_counter(), len(batch) > 1
        faults: list[str | None] = [None]
        try:
            if not several and wanted.prompt:
                self.batches.decode(task.request, wanted)
            else:
                faults = self._shared.decode_parts([each.part for _, each in batch])
        except BaseException as error:
            self._failed(batch, error)
            return
        self._scheduler.took(batch, time.perf_counter() - clock)
        for (task, wanted), fault in zip(batch, faults, strict=True):
            state, lost = wanted.live.state, None
            if fault is not None:
                why = f"context memory is wrong after a decode: {fault}"
                lost = SequenceChanged(why) if several else DecodeError(0, why)
            elif several and (state.is_invalid or state.n != wanted.position + wanted.count):
                # A task before it had the buffers zeroed; its next batch would begin somewhere else.
                lost = SequenceChanged("another request had the memory zeroed")
            task.alone = fault is not None
            self.advance(task, wanted.count, lost)

    def _failed(self, batch: Sequence[Waiting], error: BaseException) -> None:
        """Continue the tasks of a failed batch; several go on alone, so that one fails at most."""
        if len(batch) > 1:
            logger.info("a batch of several requests failed (%s): each goes on alone", error)
        for task, _ in batch:
            if len(batch) > 1:
                task.alone = True
                self.advance(task, None, SequenceChanged("a batch of several requests failed"))
            elif isinstance(error, DecodeError) and error.code == ABORTED and task.request.cancelled:
                self.advance(task, None, self._cancelled())
            else:
                self.advance(task, None, error)

    # -- the end -----------------------------------------------------------------------------------

    def fail(self, task: Task, error: BaseException) -> None:
        """End a task with an error."""
        request = task.request
        self._over(request)
        if isinstance(error, (RequestCancelled, ModelClosed)) and request.progress is not None:
            request.progress.cancelled = True
        task.reply.fail(error)

    def drop(self, request: Request) -> None:
        """Give up the task of a request, without a reply."""
        task, request.task = request.task, None
        if task is not None and isinstance(task.steps, Generator):
            with contextlib.suppress(Exception):
                task.steps.close()
        self._slots.drop(request)

    def _finish(self, task: Task, result: Any) -> None:
        if task.request.cancelled and isinstance(task.wanted, Decode) and task.wanted.prompt:
            self.fail(task, self._cancelled())  # during its last batch
            return
        self._over(task.request)
        task.request.asks()
        task.reply.put(result)

    def _over(self, request: Request) -> None:
        request.task = None
        if request.whole:
            self.nested.leave()
        if request.progress is None:  # a single operation: the slot is not needed any more
            self._slots.leave(request)

    def end(self, request: Request, reply: Reply | None) -> None:
        """End a request: keep its progress, release its slot, report it."""
        error: BaseException | None = None
        if not request.over:
            request.over = True
            self.drop(request)
            try:
                self._slots.running = request
                if request.slot is not None:
                    end(request.slot, request)
            except Exception as raised:
                error = raised
            finally:
                if request.slot is not None:
                    request.view.keep_rows(False)
                self._slots.leave(request)
                self._slots.running = None
            try:
                self._report(request)
            except BaseException as raised:
                error = error or raised
        if reply is not None:
            reply.put(None) if error is None else reply.fail(error)
        elif error is not None:
            logger.error("the end of a request that was given up failed", exc_info=error)
