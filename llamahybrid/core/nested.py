"""Requests made inside a request that has the whole context: those of a chat handler, say.

The calling thread is the loop's own, so that each batch is decoded within the call.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from llamahybrid.core.batch import Decode
from llamahybrid.core.leaving import come_back, preempt
from llamahybrid.core.request import Request
from llamahybrid.core.slot import Slot
from llamahybrid.core.slots import Slots
from llamahybrid.core.stoppable import StoppableBatches
from llamahybrid.errors import ModelClosed, RequestCancelled


class NestedRequests:
    """Runs nested requests on the first slot."""

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
        before, view = slot.current, slot.view
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
                slot.current, slot.view = before, view

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
                slot.current, slot.view = request, request.view
                request.park(preempt(slot, request))
                request.inline = False
                slot.current = request.slot = None
        self._requests = []
