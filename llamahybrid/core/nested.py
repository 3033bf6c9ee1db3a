"""Requests made inside another one that has the whole context: a chat handler's, say.

Their caller is the loop's thread itself, so that each batch is decoded right where it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from llamahybrid.core.batch import Decode
from llamahybrid.core.executor import Executor
from llamahybrid.core.request import Request
from llamahybrid.core.slots import Slots
from llamahybrid.core.stoppable import StoppableBatches


class NestedRequests:
    """Runs such requests on the first slot."""

    def __init__(
        self, slots: Slots, batches: StoppableBatches, cancelled: Callable[[], BaseException]
    ) -> None:
        """`cancelled()`: the error of a request that was cancelled."""
        self._slots = slots
        self._batches = batches
        self._cancelled = cancelled
        self._requests: list[Request] = []

    def cancel(self) -> None:
        """End all of them soon."""
        for request in list(self._requests):
            request.cancelled = True

    def run(self, request: Request, begin: Callable[[Executor], Any]) -> Any:
        """Do a task, and give its result."""
        slot = self._slots.all[0]
        before, view = slot.executor.request, slot.executor.view
        try:
            if before is not request:
                if request.slot is None:
                    request.slot, request.inline = slot, True
                    self._requests.append(request)
                slot.executor.take(request)
                if request.progress is not None:  # another one inside it has decoded meanwhile
                    self._decode(request, slot.executor.come_back(request))
            steps = begin(slot.executor)
            return self._decode(request, steps) if isinstance(steps, Generator) else steps
        finally:
            if request.inline and request.progress is None:
                request.slot = None
                slot.executor.request, slot.executor.view = before, view

    def _decode(self, request: Request, steps: Generator[Any, int, Any]) -> Any:
        """Do steps to their end; their result."""
        try:
            wanted = next(steps)
            while True:
                assert isinstance(wanted, Decode), "its reader is here"
                count = len(wanted.tokens)
                try:
                    if request.cancelled:
                        raise self._cancelled()
                    self._batches.decode(request, wanted, count)
                except Exception as error:
                    wanted = steps.throw(error)
                else:
                    wanted = steps.send(count)
        except StopIteration as stop:
            return stop.value

    def leave(self) -> None:
        """The request that had the whole context is through: streams that it began go on by themselves."""
        for request in self._requests:
            slot = request.slot
            if not request.over and slot is not None:
                slot.executor.request, slot.executor.view = request, request.view
                request.prompt = slot.executor.leave(request)
                request.parked = request.progress is not None and not request.progress.over
                request.inline = False
                slot.executor.request = request.slot = None
        self._requests = []
