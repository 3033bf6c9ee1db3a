"""ThreadState: the requests of one model that a thread is inside of, and its last one."""

from __future__ import annotations

import threading
from types import FrameType

from llamahybrid.client.native_calls import executes
from llamahybrid.core.request import Request
from llamahybrid.core.view import View


class ThreadState(threading.local):
    """The state of the calling thread."""

    def __init__(self) -> None:
        self.stack: list[tuple[Request, FrameType]] = []
        """The requests whose steps it is inside of, and the frames of these steps."""
        self.view: View | None = None
        """The view of its last request."""
        self.last: Request | None = None
        """For `last_request`."""
        self.mark = object()
        """Stands for the thread; unlike its number, it is never reused."""
        self.telling = False
        """It is inside `on_request` or `on_progress`."""

    def inside(self) -> Request | None:
        """Return the request whose step runs; steps that an interrupt ended are taken off the stack."""
        while self.stack:
            request, frame = self.stack[-1]
            if executes(frame):
                return request
            self.stack.pop()
        return None
