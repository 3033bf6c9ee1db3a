"""Admission: which request may use which model, in the order of arrival; the queue has a limit.

Everything here runs in the event loop. A request holds its place until its thread is done, which may be one
step later than its client.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from llamahybrid.errors import DeviceError, LlamaHybridError
from llamahybrid.llama import Llama
from llamahybrid.server.errors import Refusal, later, refusal
from llamahybrid.server.models import Models

logger = logging.getLogger("llamahybrid.server")

LONGEST_RETRY = 60
"""Seconds: the largest Retry-After."""

REMEMBERS = 0.9
"""Weight of earlier requests in the mean duration."""


@dataclass(eq=False)
class Place:
    """A request's share in an open model, from `Admission.enter` to `Admission.leave`."""

    alias: str
    weight: int
    """Number of slots; 0 for work that needs the model alone."""
    granted: asyncio.Future[Llama]
    since: float = field(default_factory=time.monotonic)
    looks: bool = False
    """A short look at the model, which does not count as use."""


@dataclass(eq=False)
class OpenedModel:
    """An open model and the requests that use it."""

    llm: Llama
    places: list[Place] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None
    expired: bool = False
    """The model was unused for `idle_seconds`."""

    @property
    def slots(self) -> int:
        """Requests that run at once."""
        return max(1, len(self.llm.slots))

    def has_room(self, weight: int) -> bool:
        """Return True if this number of slots is free; a larger number than there are counts as all."""
        used = sum(place.weight for place in self.places)
        return used + min(weight, self.slots) <= self.slots

    def use(self) -> None:
        """Note a use: the time until the model closes begins again."""
        self.expired = False
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Admission:
    """A queue before the models. Requests for one model run in the order of arrival.

    Models that leave no memory for a requested one are closed, the least recently used first, and models
    without requests before others. A model in use closes when its requests have ended; later requests wait.
    """

    def __init__(self, models: Models, max_queue: int, idle_seconds: float | None = None) -> None:
        """`idle_seconds`: time after which an unused model closes; None: never."""
        self._pool = models
        self._opener = ThreadPoolExecutor(1, "llamahybrid-model")
        self._idle_seconds = idle_seconds
        self.max_queue = max_queue
        self.draining = False
        """The server shuts down: every request is refused."""
        self._models: dict[str, OpenedModel] = {}
        """The open models by alias, the least recently used first."""
        self._queue: deque[Place] = deque()
        self._change: asyncio.Task[None] | None = None
        """Opens and closes models now."""
        self._mean_seconds = 1.0
        self.on_crowd: Callable[[str], None] | None = None
        """Called with the alias of the model if a request has to wait."""
        self.on_refused: Callable[[], None] | None = None
        """Called if `enter` refuses a request: the queue filled up while its body was received."""

    @property
    def current(self) -> str | None:
        """The alias of the open model that was used last."""
        return next(reversed(self._models), None)

    @property
    def slots(self) -> int:
        """The number of slots of all open models."""
        return sum(model.slots for model in self._models.values())

    @property
    def waiting(self) -> int:
        """The number of requests in the queue."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """The number of requests that use slots."""
        return sum(place.weight > 0 for model in self._models.values() for place in model.places)

    def is_full(self, alias: str | None = None) -> bool:
        """Return True if the next request would be refused.

        A free slot is no help to it if others wait already: they may need several slots, or another model.
        """
        if len(self._queue) < self.max_queue:
            return False
        models = [model for each, model in self._models.items() if alias in (None, each)]
        return bool(self._queue) or (bool(models) and not any(model.has_room(1) for model in models))

    def require_room(self, alias: str | None = None) -> None:
        """Raise Refusal if the next request would be refused."""
        if self.draining:
            raise later("the server is shutting down", 5)
        if self.is_full(alias):
            raise later(f"{self.waiting} requests wait already; ask again later", self.retry_after(), 429)

    def retry_after(self) -> int:
        """Return the seconds after which the queue should have moved, by the mean duration of requests."""
        rounds = (len(self._queue) + 1) / max(1, self.slots)
        return max(1, min(LONGEST_RETRY, math.ceil(rounds * self._mean_seconds)))

    async def enter(self, alias: str, weight: int = 1) -> tuple[Llama, Place]:
        """Wait for a place on a model. Raises Refusal if the queue is full, or the model cannot be opened.

        `weight`: number of slots; more than there are count as all.
        """
        place = Place(alias, weight, asyncio.get_running_loop().create_future())
        if not (weight or self.draining) and all(self._has(p.alias) for p in (*self._queue, place)):
            return self._let_in(place), place  # without a slot it delays no request in the queue
        try:
            self.require_room(alias)
        except Refusal as refused:
            logger.warning("refused (queue): %s", refused)
            if self.on_refused is not None:
                self.on_refused()
            raise
        self._queue.append(place)
        self._move()
        if not place.granted.done() and weight and self._change is None and self.on_crowd is not None:
            self.on_crowd(alias)
        try:
            return await place.granted, place
        except BaseException:
            if place in self._queue:
                self._queue.remove(place)
            if place.granted.done() and not place.granted.cancelled() and place.granted.exception() is None:
                self.leave(place)
            self._move()
            raise

    def visit(self, alias: str | None = None) -> tuple[Llama, Place] | None:
        """Return a place for a short look at an open model, without waiting; None if it is not open.

        `alias`: None for the model that was used last.
        """
        alias = self.current if alias is None else alias
        if self.draining or alias is None or not self._has(alias):
            return None
        if not all(self._has(place.alias) for place in self._queue):
            return None
        place = Place(alias, 0, asyncio.get_running_loop().create_future(), looks=True)
        model = self._models[alias]
        model.places.append(place)
        return model.llm, place

    def leave(self, place: Place) -> None:
        """Give up a place; without effect a second time."""
        model = self._models.get(place.alias)
        if model is None or place not in model.places:
            return
        model.places.remove(place)
        if place.weight:
            seconds = time.monotonic() - place.since
            self._mean_seconds = REMEMBERS * self._mean_seconds + (1 - REMEMBERS) * seconds
        if not place.looks:
            self._models[place.alias] = self._models.pop(place.alias)  # now the most recently used
            self._start_timer(model)
        self._move()

    def refuse_waiting(self) -> None:
        """Refuse the requests in the queue, and every later one."""
        self.draining = True
        for place in self._queue:
            if not place.granted.done():
                place.granted.set_exception(later("the server is shutting down", 5))
        self._queue.clear()

    async def close(self) -> None:
        """Close all models once they have no requests, with pending writes to disk."""
        while self._change is not None or any(model.places for model in self._models.values()):
            await asyncio.sleep(0.01)
        await asyncio.get_running_loop().run_in_executor(self._opener, self._pool.close)
        self._opener.shutdown(wait=False)

    def _has(self, alias: str) -> bool:
        """Return True for an open model that can be used: its RPC servers are there."""
        return alias in self._models and not self._models[alias].llm.offload.lost

    def _let_in(self, place: Place) -> Llama:
        model = self._models[place.alias]
        model.use()
        model.places.append(place)
        return model.llm

    def _move(self) -> None:
        """Let in the requests that can run; open requested models, and close expired ones."""
        held = set[str]()
        """Models that earlier requests wait for, or that close for them."""
        for place in list(self._queue):
            if place.granted.done():  # cancelled
                self._queue.remove(place)
            elif place.alias in held:
                continue
            elif not self._has(place.alias):
                held |= {place.alias, *self._make_way(place.alias, held)}
            elif (model := self._models[place.alias]).has_room(place.weight):
                self._queue.remove(place)
                place.weight, place.since = min(place.weight, model.slots), time.monotonic()
                place.granted.set_result(self._let_in(place))
            else:
                held.add(place.alias)
        expired = [alias for alias, model in self._models.items() if model.expired and not model.places]
        if expired and self._change is None and not self.draining:
            self._begin_change(None, expired)

    def _make_way(self, alias: str, held: set[str]) -> list[str]:
        """Open a model if the models in its way have no requests; return those models.

        `held`: models of earlier requests, which stay open.
        """
        if self._change is not None:
            return []
        others = [each for each in self._models if each not in held and each != alias]
        others.sort(key=lambda each: bool(self._models[each].places))
        closing = self._pool.in_the_way(alias, others)
        if closing is None:
            return []
        lost = [alias] if alias in self._models else []
        if not any(self._models[each].places for each in (*closing, *lost)):
            self._begin_change(alias, [*closing, *lost])
        return closing

    def _start_timer(self, model: OpenedModel) -> None:
        """Close the model after `idle_seconds` without a use."""
        if self._idle_seconds is not None and all(place.looks for place in model.places):
            model.use()
            model.timer = asyncio.get_running_loop().call_later(self._idle_seconds, self._expire, model)

    def _expire(self, model: OpenedModel) -> None:
        model.expired = True
        self._move()

    def _begin_change(self, alias: str | None, closing: Sequence[str]) -> None:
        """Close models without requests, and open one unless that is None."""
        for each in closing:
            self._models.pop(each).use()
        self._change = asyncio.get_running_loop().create_task(self._close_and_open(alias, closing))

    async def _close_and_open(self, alias: str | None, closing: Sequence[str]) -> None:
        """Close models and open one; refuse its requests if that fails."""
        run = asyncio.get_running_loop().run_in_executor
        try:
            if closing:
                await run(self._opener, self._pool.close, *closing)
            if alias is not None:
                self._models[alias] = OpenedModel(await run(self._opener, self._pool.open, alias))
                self._start_timer(self._models[alias])  # the request for it may be cancelled by now
        except Exception as error:
            known = isinstance(error, (LlamaHybridError, OSError, ValueError))  # no bug of this program
            failed = f"{alias} cannot be opened" if alias is not None else "a model was not closed in order"
            logger.error("%s: %s", failed, error, exc_info=None if known else error)
            refused = later("the model cannot be opened", LONGEST_RETRY)
            if isinstance(error, DeviceError):  # the device may be back any time
                refused = refusal(error)
            for place in [p for p in self._queue if p.alias == alias]:
                self._queue.remove(place)
                if not place.granted.done():
                    place.granted.set_exception(refused)
        finally:
            self._change = None
            self._move()
