"""Requests as the decode loop knows them, what their tasks wait for, and replies to their callers."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Generator, Mapping
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, TypeVar

from llamahybrid.capi.calls import Outputs
from llamahybrid.core.report import Progress, PromptProgress
from llamahybrid.core.view import View
from llamahybrid.memory.sequence import LiveSequence
from llamahybrid.prompt_cache.base import LiveState, Tokens

SLICE = 0.1 if os.name == "nt" else None
"""Longest wait in seconds without looking for Ctrl-C: on Windows a wait for a lock cannot be interrupted."""


class Bell:
    """Wakes a thread that waits for any of several replies."""

    def __init__(self) -> None:
        self._rings: SimpleQueue[None] = SimpleQueue()

    def ring(self) -> None:
        """Wake the thread that waits, or that waits next."""
        self._rings.put(None)

    def wait(self) -> None:
        """Wait until it rang since the last call."""
        while True:
            try:
                self._rings.get(timeout=SLICE)
                while not self._rings.empty():
                    self._rings.get_nowait()
                return
            except Empty:
                continue


class Reply:
    """The answer to one message: one result for `get`, or tokens for `Feed`."""

    def __init__(self, bell: Bell | None = None) -> None:
        """`bell`: rings with each item."""
        self._items: SimpleQueue[tuple[bool, Any]] = SimpleQueue()
        self._bell = bell
        self.empty = self._items.empty
        """`empty()`: `get` would wait."""

    def put(self, result: Any) -> None:
        """Give the result."""
        self._items.put((True, result))
        if self._bell is not None:
            self._bell.ring()

    def fail(self, error: BaseException) -> None:
        """Give an error, which `get` raises."""
        self._items.put((False, error))
        if self._bell is not None:
            self._bell.ring()

    def get(self, interrupted: Callable[[], object] | None = None) -> Any:
        """Wait for the next result; raise the error that came in its place.

        `interrupted` is called where an exception ends the wait, by Ctrl-C say.
        """
        while True:
            try:
                good, item = self._items.get(timeout=SLICE)
                break
            except Empty:
                continue
            except BaseException:
                if interrupted is not None:
                    interrupted()
                raise
        if good:
            return item
        try:
            raise item
        finally:
            del item  # no cycle of the error, its traceback and this frame


class Feed(Reply):
    """The tokens of one answer, from the decode loop, which samples them, to their reader.

    The loop decodes a token while the reader processes it: at most one decoded token is not used, and a fast
    reader does not wait for a switch of threads.
    """

    def __init__(self, bell: Bell | None = None) -> None:
        super().__init__(bell)
        self.asked = 0
        """Number of tokens that the reader has asked for."""
        self.needs = 0
        """Number of tokens that the reader must have asked for before the loop continues."""
        self.paused = False
        """The loop waits for the reader, which has to send `Resume`."""

    @property
    def due(self) -> bool:
        """The reader has asked for enough tokens for the loop to continue."""
        return self.asked >= self.needs

    def publish(self, token: int, needs: int) -> None:
        """Publish a token; called by the loop alone."""
        self.needs = needs
        self._items.put((True, token))
        if self._bell is not None:
            self._bell.ring()


T = TypeVar("T")


class Decode:
    """Tokens to be appended to one live sequence; the loop answers with how many of them it decoded."""

    __slots__ = ("alone", "count", "live", "outputs", "position", "prompt", "step", "tokens")

    def __init__(
        self,
        live: LiveSequence,
        tokens: Tokens | tuple[int, ...],
        outputs: Outputs,
        *,
        prompt: bool = False,
        alone: bool = False,
    ) -> None:
        """`tokens`: shape (k,), k >= 1; `outputs`: rows of logits wanted once all of them are decoded.

        `prompt`: part of a prompt: may be decoded in several batches, and stopped inside one. `alone`: not in
        a batch with tokens of other sequences.
        """
        self.live = live
        self.tokens = tokens
        self.outputs = outputs
        self.prompt = prompt
        self.alone = alone
        self.position = live.state.n
        """Tokens there were when it was asked for."""
        self.count = len(tokens)
        """Number of its first tokens that the next batch holds."""
        self.step = not prompt and self.count == 1
        """A step of an answer: a single token of it."""

    @property
    def part(self) -> tuple[LiveSequence, Tokens | tuple[int, ...], Outputs]:
        """The sequence, the first `count` tokens, and the rows that a batch with them has to have."""
        whole = self.count == len(self.tokens)
        tokens = self.tokens if whole else self.tokens[: self.count]
        return self.live, tokens, self.outputs if whole or self.outputs == "all" else "none"


class Reader:
    """The task waits until its reader asks for more."""


READER = Reader()

Wanted: TypeAlias = Decode | Reader

Steps: TypeAlias = Generator[Wanted, int, T]
"""A task as a generator: yields what it waits for, returns its result."""


NO_LIMIT = 1 << 60
"""Length of an answer without `max_tokens`."""

_births = itertools.count()


class Request:
    """A request: its view of the sequence, its slot, and its pending task."""

    def __init__(
        self, view: View, *, completing: bool = False, rows: bool = False, salt: bytes = b""
    ) -> None:
        self.born = next(_births)
        """Later requests have larger ones."""
        self.view = view
        """Upstream's attributes as this request has them."""
        self.completing = completing
        """Part of a completion, where a cancelled `generate` ends instead of raising."""
        self.rows = rows
        """The logits of every token are kept."""
        self.salt = salt
        """Digest of its salt: it shares nothing with requests of another one (see `salt.digest`)."""
        self.most = NO_LIMIT
        """Tokens after which its answer is expected to end: `max_tokens`."""
        self.pauses: Mapping[int, bool] | None = None
        """Tells of a token whether the answer may end on it; None: it may end on any."""
        self.limits: Any = None
        """The limit of its thought, a `client.thought.ThoughtLimit`; None: none."""
        self.whole = False
        """Needs the whole context: no other request may have a slot at the same time."""
        self.prompt: Tokens | None = None
        """The tokens it begins with or continues from; the slot is chosen by them."""
        self.progress: Progress | None = None
        """The state of its prompt and answer; `last_request` reports it."""
        self.source: View | None = None
        """The view of its caller's previous request, which may hold natively decoded content (images)."""
        self.rests_on: Tokens | None = None
        """Natively decoded content that must be live when the request begins."""
        self.on_progress: Callable[[PromptProgress], None] | None = None
        """Called with the progress of its prompt."""
        self.leads = False
        """The first of several answers to one prompt: the others resume from its checkpoints."""
        self.after: Request | None = None
        """The request whose prompt must be decoded before this one begins."""
        self.slot: Any = None
        """The `Slot` that it has; None: none."""
        self.task: Task | None = None
        """The pending task; None between two messages of the caller."""
        self.reply: Reply | None = None
        """The reply on which its caller waits, or waited last."""
        self.awaits = False
        """A task was sent and its caller has not left it: signal handlers and finalizers in the calling
        thread then make requests of their own,"""
        self.aside: View | None = None
        """with this view; None: none has asked for one."""
        self.known: LiveState | None = None
        """While preempted: the tokens that the cache tracks, and whether they were forgotten."""
        self.parked = False
        """Preempted: resumes in a new slot when its reader asks for more."""
        self.number = 0
        """Its number for the stop flag while a batch of its own is decoded."""
        self.reader: object = None
        """Stands for the thread that reads it."""
        self.inline = False
        """Made inside a task that has the whole context (see `nested`)."""
        self.bell: Bell | None = None
        """Rung at each reply, if one thread reads several answers by turns; else None."""
        self.entered = False
        """The calling thread is inside its generator, so that its next message comes soon."""
        self.asked_at = 0.0
        """Time of the last message or reply, by `time.monotonic`."""
        self.away = float("inf")
        """Seconds between the last reply and the next message of its caller."""
        self.deadline: float | None = None
        """Time after which a request without a slot is refused, by `time.monotonic`; None: never."""
        self.sent = False
        """The caller sent tokens into the generator (`generate().send`)."""
        self.cancelled = False
        """Asked to end; `progress.cancelled` says whether that came before its end."""
        self.over = False
        """Ended: it cannot continue."""

    @property
    def ended_early(self) -> bool:
        """Cancelled before its prompt was begun, or before its answer was complete."""
        return self.cancelled if self.progress is None else self.progress.cancelled

    @property
    def begun(self) -> bool:
        """Its prompt was planned and restored, or the request is over."""
        return self.over or self.progress is not None

    def asks(self) -> None:
        """Note the time of a reply."""
        self.asked_at = time.monotonic()

    def comes(self) -> None:
        """Note the time of a message."""
        now = time.monotonic()
        self.away, self.asked_at = now - self.asked_at, now

    def park(self, ids: Tokens) -> None:
        """Note that the request lost its slot and continues later from these tokens."""
        self.prompt = ids
        self.parked = self.progress is not None and not self.over

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

    __slots__ = ("alone", "begin", "reply", "request", "steps", "wanted")

    def __init__(self, request: Request, begin: Any, reply: Reply) -> None:
        self.request = request
        self.begin = begin
        """Called in the loop's thread with its slot; gives the steps, or the result."""
        self.reply = reply
        self.steps: Any = None
        self.wanted: Wanted | None = None
        self.alone = False
        """The next batch holds no tokens of other requests, since a common one failed."""
