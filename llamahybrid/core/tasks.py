"""Tasks: begin, continue and end the steps of requests that have a slot."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

from llamahybrid.core.admission import Admission
from llamahybrid.core.batch import Reader
from llamahybrid.core.leaving import come_back
from llamahybrid.core.nested import NestedRequests
from llamahybrid.core.request import Request, Task
from llamahybrid.core.slots import Slot
from llamahybrid.errors import ModelClosed, RequestCancelled


class Tasks:
    """Runs the tasks of one decode loop between its batches."""

    def __init__(
        self, admission: Admission, nested: NestedRequests, cancelled: Callable[[], BaseException]
    ) -> None:
        """`cancelled()`: the error of a cancelled request."""
        self._admission = admission
        self._nested = nested
        self._cancelled = cancelled

    def start(self, task: Task, slot: Slot) -> None:
        """Begin a task in the slot of its request, or restore the sequence of a preempted one first."""
        request = task.request
        if request.cancelled:
            self.fail(task, self._cancelled())
            return
        try:
            self._admission.running = request
            if request.parked:
                task.return_steps = come_back(slot.executor)
            elif task.steps is None:
                task.steps = task.begin(slot.executor)
        except BaseException as error:
            self.fail(task, error)
            return
        finally:
            self._admission.running = None
        if task.return_steps is not None or isinstance(task.steps, Generator):
            self.advance(task, None)
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
        self.start(task, slot) if task.steps is None else self.advance(task, None)

    def advance(self, task: Task, count: int | None, error: BaseException | None = None) -> None:
        """Continue a task with the number of tokens that were decoded, or with an error."""
        steps = task.steps if task.return_steps is None else task.return_steps
        back = result = None
        self._admission.running = task.request
        try:
            task.wanted = steps.send(count) if error is None else steps.throw(error)
            if isinstance(task.wanted, Reader):
                task.request.asks()  # the time of its reader begins
            return
        except StopIteration as stop:
            back, result = task.return_steps is not None, stop.value
        except BaseException as raised:
            self.fail(task, raised)
            return
        finally:
            self._admission.running = None
        if back:
            self._came_back(task)
        else:
            self._finish(task, result)

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
        for steps in () if task is None else (task.return_steps, task.steps):
            if isinstance(steps, Generator):
                with contextlib.suppress(Exception):
                    steps.close()
        self._admission.drop(request)

    def _finish(self, task: Task, result: Any) -> None:
        self._over(task.request)
        task.request.asks()
        task.reply.put(result)

    def _over(self, request: Request) -> None:
        request.task = None
        if request.whole:
            self._nested.leave()
        if request.progress is None:  # a single operation: the slot is not needed any more
            self._admission.leave(request)
