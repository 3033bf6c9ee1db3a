"""One request at a time: epochs, waiting, requests that a newer one has replaced, and cancelling.

A request belongs to the thread that last advanced it. While it is open, another thread's request waits
(or gets `Busy`); a new request by the same thread replaces it, because the old generator was evidently
given up: advancing that one again raises `RequestSuperseded` and touches nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import Busy, RequestCancelled, RequestSuperseded
from ..native import Stop


class Request:
    """One request's place at the gate."""

    def __init__(self, owner: int, number: int, completing: bool) -> None:
        self.owner = owner
        self.completing = completing
        self.number = number
        """What `RequestGate.stop` knows it by."""
        self.running = 0
        """Depth of native work being done for it now."""
        self.superseded = False


class Step:
    """`with gate.step(request):` around native work; made for every token, so it is a class, no generator."""

    __slots__ = ("_gate", "_request")

    def __init__(self, gate: RequestGate, request: Request) -> None:
        self._gate = gate
        self._request = request

    def __enter__(self) -> None:
        self._gate.enter(self._request)

    def __exit__(self, *_: object) -> None:
        self._gate.leave(self._request)


class RequestGate:
    """Lets one request in at a time."""

    def __init__(self, wait: bool | float = True) -> None:
        """`wait`: True waits for the running request, False raises `Busy` at once, seconds do both."""
        self.wait = wait
        self.stop = Stop()
        """Polled by native code while it works for the open request."""
        self._changed = threading.Condition()
        self._current: Request | None = None

    @property
    def running_here(self) -> bool:
        """The calling thread is inside a step of the open request."""
        current = self._current
        return current is not None and current.running > 0 and current.owner == threading.get_ident()

    @property
    def completing(self) -> bool:
        """The open request is a completion."""
        return self._current is not None and self._current.completing

    def open(self, completing: bool = False) -> Request:
        """Begin a request, replacing one that this thread gave up.

        Raises Busy when another thread's request is open and `wait` does not allow for it.
        """
        me = threading.get_ident()
        with self._changed:
            if not self._changed.wait_for(lambda: self._may_enter(me), self._timeout()):
                raise Busy("another request is running on this Llama; wait for it, or pass wait=True")
            if self._current is not None:
                self._current.superseded = True
            self._current = Request(me, self.stop.begin(), completing)
            return self._current

    def cancel(self) -> None:
        """End the open request, and no other; takes no lock, so that a signal handler may call it."""
        request = self._current
        if request is not None:
            self.stop.request(request.number)

    def check(self) -> None:
        """Raise RequestCancelled if the open request is to end."""
        if self.stop.requested:
            raise RequestCancelled("the request was cancelled; ask again to go on from where it stopped")

    def close(self, request: Request) -> None:
        """End a request; harmless for one that was replaced."""
        with self._changed:
            if self._current is request:
                self._current = None
                self.stop.end()
                self._changed.notify_all()

    def step(self, request: Request) -> Step:
        """A stretch of work for an open request, as a context manager.

        Entering raises RequestSuperseded when a newer request has replaced it.
        """
        return Step(self, request)

    def enter(self, request: Request) -> None:
        """Begin a step; see `step`."""
        with self._changed:
            if self._current is not request:
                raise RequestSuperseded("a newer request has replaced this one; start a new request")
            request.owner = threading.get_ident()
            request.running += 1

    def leave(self, request: Request) -> None:
        """End a step."""
        with self._changed:
            request.running -= 1

    @contextmanager
    def hold(self, *, keep_suspended: bool = False) -> Iterator[None]:
        """A single operation (eval, reset, load_state): part of the running request, or one of its own.

        `keep_suspended`: the operation changes nothing, so a request of this thread that waits to be
        advanced goes on afterwards.
        """
        current = self._current
        mine = current is not None and current.owner == threading.get_ident()
        if self.running_here or (keep_suspended and mine):
            yield
            return
        request = self.open()
        try:
            with self.step(request):
                yield
        finally:
            self.close(request)

    def _may_enter(self, me: int) -> bool:
        current = self._current
        return current is None or (current.owner == me and current.running == 0)

    def _timeout(self) -> float | None:
        if isinstance(self.wait, bool):
            return None if self.wait else 0.0
        return float(self.wait)
