"""Request: what the decode loop knows of one request, from its first message to its end."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llamahybrid.core.batch import Wanted
from llamahybrid.core.view import View
from llamahybrid.prompt_cache.base import LiveState, Tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from llamahybrid.core.messages import Reply
    from llamahybrid.core.progress import Progress
    from llamahybrid.core.report import PromptProgress
    from llamahybrid.core.slots import Slot

NO_LIMIT = 1 << 60
"""Tokens of an answer that only its reader ends."""

_births = itertools.count()
_thread = threading.local()


def this_thread() -> object:
    """Stand for the calling thread, and never for another one: numbers of threads are given out again."""
    try:
        return _thread.mark
    except AttributeError:
        _thread.mark = object()
        return _thread.mark


class Request:
    """One request: its view of the sequence, its slot, and the task that it waits for."""

    __slots__ = (
        "__weakref__",
        "after",
        "asked_at",
        "away",
        "born",
        "cancelled",
        "completing",
        "deadline",
        "entered",
        "inline",
        "known",
        "leads",
        "limits",
        "most",
        "number",
        "on_progress",
        "over",
        "parked",
        "pauses",
        "progress",
        "prompt",
        "reply",
        "rests_on",
        "rows",
        "salt",
        "sent",
        "slot",
        "source",
        "task",
        "thread",
        "unwanted",
        "view",
        "whole",
    )

    def __init__(
        self, view: View, *, completing: bool = False, rows: bool = False, salt: bytes = b""
    ) -> None:
        self.born = next(_births)
        """Later requests have larger ones."""
        self.view = view
        """Upstream's attributes as this request has them."""
        self.completing = completing
        """Its tokens go to a completion, which a cancelled `generate` ends instead of raising."""
        self.rows = rows
        """The logits of every token are kept."""
        self.salt = salt
        """Digest of its salt: it shares nothing with requests of another one (see `salt.digest`)."""
        self.most = NO_LIMIT
        """Tokens after which its answer mostly ends."""
        self.pauses: Callable[[int], bool] | None = None
        """Tokens on which its answer may end."""
        self.limits: Any = None
        """What its sampler is limited by (`capi.sampling.Limits`)."""
        self.whole = False
        """It needs the whole context: no other request has a slot meanwhile."""
        self.prompt: Tokens | None = None
        """What it begins with, or goes on from; decides the slot."""
        self.progress: Progress | None = None
        """What `last_request` tells of it."""
        self.source: View | None = None
        """The view of what its caller did before, which may tell of content that was decoded natively."""
        self.rests_on: Tokens | None = None
        """Content that was decoded natively and has to be live when it begins."""
        self.on_progress: Callable[[PromptProgress], None] | None = None
        """Told where its prompt is."""
        self.leads = False
        """Others begin with the same prompt, and go on from what this one leaves behind."""
        self.after: Request | None = None
        """One whose prompt is to be decoded first."""
        self.slot: Slot | None = None
        self.task: Task | None = None
        """What it waits for; None between two messages."""
        self.reply: Reply | None = None
        """Where its caller waits, or did last."""
        self.known: LiveState | None = None
        """While it has no slot: what the cache follows of its tokens, and whether they are forgotten."""
        self.parked = False
        """It lost its slot to another request and goes on when it is asked for more."""
        self.number = 0
        """Its number at `Stop` while a batch of its own is decoded."""
        self.thread: object = None
        """The thread that asked last."""
        self.inline = False
        """It is made inside a task that has the whole context."""
        self.entered = False
        """That thread is inside its generator: the next message comes soon."""
        self.asked_at = 0.0
        """When it was asked for anything last, by `time.monotonic`."""
        self.away = float("inf")
        """Seconds that its caller took to ask for more the last time."""
        self.deadline: float | None = None
        """When it is refused if it has no slot by then, by `time.monotonic`."""
        self.sent = False
        """Its caller sent tokens of his own into the generator."""
        self.cancelled = False
        """It was asked to end; whether that came in time its progress says."""
        self.unwanted = False
        """Cancelled, and nobody waits for what comes of it."""
        self.over = False

    @property
    def ended_early(self) -> bool:
        """It was cancelled, in its answer or before its prompt was begun with."""
        return self.cancelled if self.progress is None else self.progress.cancelled

    @property
    def begun(self) -> bool:
        """Its prompt was begun with, or never will be."""
        return self.over or self.progress is not None

    def asks(self) -> None:
        """Its caller waits for something."""
        self.asked_at = time.monotonic()

    def comes(self) -> None:
        """Its caller asks for more, after some time."""
        now = time.monotonic()
        self.away, self.asked_at = now - self.asked_at, now

    def annotate(self, completion: Any) -> None:
        """Put the cached tokens, and that it was cancelled, into a completion or a chunk of one."""
        if completion.get("usage"):
            cached = 0 if self.progress is None else self.progress.plan.cached
            completion["usage"]["prompt_tokens_details"] = {"cached_tokens": cached}
            if self.progress is not None and self.progress.thinking is not None:
                thinking = {"reasoning_tokens": self.progress.thinking}
                completion["usage"]["completion_tokens_details"] = thinking
        if self.ended_early:
            for choice in completion["choices"]:
                choice["finish_reason"] = choice["finish_reason"] and "cancelled"


class Task:
    """Work of one request in the loop's thread."""

    __slots__ = ("alone", "begin", "reply", "request", "return_steps", "steps", "wanted")

    def __init__(self, request: Request, begin: Any, reply: Reply) -> None:
        self.request = request
        self.begin = begin
        """Called in the loop's thread with the slot's executor once the request has one; gives the steps."""
        self.reply = reply
        self.steps: Any = None
        self.return_steps: Any = None
        """Done first: they bring back what the request had when it lost its slot."""
        self.wanted: Wanted | None = None
        self.alone = False
        """A batch with others has failed: the next one is its own."""
