"""A request's claim to the context, and what is done for those who hold one."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from llamahybrid.prompt_cache.base import Tokens

if TYPE_CHECKING:
    from llamahybrid.request.report import PromptProgress
    from llamahybrid.request.request import Request
    from llamahybrid.request.requests import Parked
    from llamahybrid.request.slots import Slot
    from llamahybrid.request.step_frames import Step


_births = itertools.count()


class Ticket:
    """One request's claim to the context."""

    __slots__ = (
        "after",
        "alone_at",
        "asked",
        "began",
        "born",
        "cancelled",
        "completing",
        "ended",
        "idle_since",
        "leads",
        "number",
        "on_progress",
        "over",
        "parked",
        "request",
        "rests_on",
        "rows",
        "salt",
        "slot",
        "step",
        "thread",
        "unwanted",
        "whole",
    )

    def __init__(self, completing: bool = False, rows: bool = False) -> None:
        self.born = next(_births)
        """Later requests have larger ones."""
        self.asked = 0
        """When its prompt came and there was a place for it, counted as `born`; 0: no such time counts."""
        self.began = 0
        """When that was done and its answer began, counted likewise; 0: it was not."""
        self.number = 0
        """What `RequestGate.stop` knows it by, since it became the current one."""
        self.completing = completing
        """Its tokens go to a completion, which a cancelled `generate` ends instead of raising."""
        self.rows = rows
        """It needs the logits of every token."""
        self.salt = b""
        """Digest of its salt: it shares nothing with requests of another one (see `salt.digest`)."""
        self.thread: ThreadMark | None = None
        """The thread that made its last step (see `this_thread`); None: it has made none."""
        self.step: Step | None = None
        """The one that a thread is in the middle of for it, if it was not left by an interrupt."""
        self.slot: Slot | None = None
        """Where it is seated."""
        self.whole = False
        """It needs the whole context: nobody else may be in."""
        self.idle_since = 0.0
        """When its last step ended, by `time.monotonic`."""
        self.alone_at: int | None = None
        """How many steps there had been when its answer's last token was decoded alone; None: it was not."""
        self.parked: Parked | None = None
        """What it needs to go on, while another request has its place."""
        self.request: Request | None = None
        """What `last_request` tells of it."""
        self.rests_on: Tokens | None = None
        """What has to be live still when it begins: content that was decoded natively."""
        self.leads = False
        """Others begin with the same prompt, and go on from what this one leaves behind."""
        self.on_progress: Callable[[PromptProgress], None] | None = None
        """See `RequestHandle.on_progress`."""
        self.after: Ticket | None = None
        """One that must be in before this one may be, which then waits as long as it takes."""
        self.cancelled = False
        """It was asked to end; whether that came in time its request says."""
        self.unwanted = False
        """Cancelled, and nobody waits for what comes of it."""
        self.over = False
        self.ended = False

    @property
    def inside(self) -> int:
        """The number of the thread that is in the middle of a step for it; 0: none is."""
        step = self.step
        return 0 if step is None or step.left else step.thread

    @property
    def acts(self) -> bool:
        """A thread is in the middle of a step for it, that no interrupt left; and it is not over."""
        return not self.over and bool(self.inside)

    @property
    def too_early(self) -> bool:
        """The one that it comes after is not in yet."""
        first = self.after
        return first is not None and first.thread is None and not first.over

    @property
    def ended_early(self) -> bool:
        """It was cancelled, in its answer or before its prompt was begun with."""
        return self.cancelled if self.request is None else self.request.cancelled

    def asks(self) -> None:
        """There is a place for it: it waits for others, and no more for one of them to go."""
        self.asked = self.asked or next(_births)

    def answers(self) -> None:
        """Its prompt is decoded; another one of it, if one comes, came with nobody."""
        self.began, self.asked = next(_births), 0

    def tell(self, completion: Any) -> None:
        """Put what was cached, and that it was cancelled, into a completion or a chunk of one."""
        if completion.get("usage"):
            cached = 0 if self.request is None else self.request.plan.cached
            completion["usage"]["prompt_tokens_details"] = {"cached_tokens": cached}
        if self.ended_early:
            for choice in completion["choices"]:
                choice["finish_reason"] = choice["finish_reason"] and "cancelled"


class Tenant(Protocol):
    """Whose requests wait at a gate. All but `joined` is called inside a step."""

    def park(self, ticket: Ticket) -> None:
        """Another request takes the place of this one: set `ticket.parked` to what it needs to go on."""

    def resume(self, ticket: Ticket) -> None:
        """Bring back what `ticket.parked` says, so that the request can go on."""

    def begin(self, ticket: Ticket) -> None:
        """A ticket makes its first step."""

    def switch(self, ticket: Ticket) -> None:
        """This one makes a step next, or goes on with one; only with more than one slot."""

    def joined(self, ticket: Ticket) -> None:
        """This one is about to make a step, and is not alone; the only call without the lock in hand, and
        only with more than one slot."""

    def stepped(self, ticket: Ticket) -> None:
        """It has made a step; only with more than one slot."""

    def end(self, ticket: Ticket) -> None:
        """A request is over, parked or not: keep its progress, tell of it. Called once for each."""


class ThreadMark:
    """Stands for a thread."""


_thread = threading.local()


def this_thread() -> ThreadMark:
    """What stands for the calling thread, and never for another one."""
    try:
        mark: ThreadMark = _thread.mark
    except AttributeError:
        mark = _thread.mark = ThreadMark()
    return mark
