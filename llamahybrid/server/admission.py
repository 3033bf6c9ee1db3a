"""Admission: who may use which model, first come, first served; more than may wait are sent away.

All of it happens in the event loop. A place is held until the thread that used it is done, which may be a
step longer than its client.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from llamahybrid.errors import DeviceError, LlamaHybridError
from llamahybrid.llama import Llama
from llamahybrid.server.errors import Refusal, later, refusal

logger = logging.getLogger("llamahybrid.server")

LONGEST_RETRY = 60
"""Seconds: nobody is told to stay away for longer."""

REMEMBERS = 0.9
"""How much of the mean duration is from before the last request."""

OpenModel = Callable[[str], Awaitable[tuple[Llama, int]]]
"""Opens the model of an alias: it, and how many requests run on it at once."""


@dataclass(eq=False)
class Place:
    """A share in the open model, until `Admission.leave`."""

    alias: str
    weight: int
    """Slots that are used; 0: none, the model alone."""
    granted: asyncio.Future[Llama]
    since: float = field(default_factory=time.monotonic)


class Admission:
    """A queue before the models."""

    def __init__(
        self, open_model: OpenModel, max_queue: int, lost: Callable[[Llama], bool] = lambda _: False
    ) -> None:
        """`lost`: an open model is of no use any more; it is opened again once nobody is inside."""
        self._open = open_model
        self._lost = lost
        self.max_queue = max_queue
        self.slots = 0
        """Requests that the open model runs at once."""
        self.draining = False
        """Nobody is let in any more."""
        self._llm: Llama | None = None
        self._alias: str | None = None
        self._queue: deque[Place] = deque()
        self._inside: list[Place] = []
        self._swap: asyncio.Task[None] | None = None
        self._mean_seconds = 1.0
        self.on_crowd: Callable[[], None] | None = None
        """Called where somebody has to wait."""
        self.on_refused: Callable[[], None] | None = None
        """Called where `enter` sends somebody away: the queue has filled while the body came in."""

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Requests that use slots."""
        return sum(1 for place in self._inside if place.weight)

    @property
    def is_full(self) -> bool:
        """Nobody else may wait. A slot that is free is for whoever waits first, who may need more of them,
        or another model."""
        return len(self._queue) >= self.max_queue and (bool(self._queue) or not self._free(1))

    def require_room(self) -> None:
        """Raise Refusal where the next request would be sent away."""
        if self.draining:
            raise later("the server is shutting down", 5)
        if self.is_full:
            raise later(f"{self.waiting} requests wait already; ask again later", self.retry_after(), 429)

    def _require_room_still(self) -> None:
        try:
            self.require_room()
        except Refusal as refused:
            logger.warning("refused (queue): %s", refused)
            if self.on_refused is not None:
                self.on_refused()
            raise

    def retry_after(self) -> int:
        """Seconds after which the queue will have moved, by how long requests took."""
        rounds = (len(self._queue) + 1) / max(1, self.slots)
        return max(1, min(LONGEST_RETRY, math.ceil(rounds * self._mean_seconds)))

    async def enter(self, alias: str, weight: int = 1) -> tuple[Llama, Place]:
        """Wait for a place on a model. Raises Refusal where too many wait, or that model cannot be opened.

        `weight`: slots it will use; more than there are count as all.
        """
        place = Place(alias, weight, asyncio.get_running_loop().create_future())
        if (
            not (weight or self.draining)
            and self._llm is not None
            and all(self._has(p.alias) for p in (*self._queue, place))
        ):
            self._inside.append(place)  # it takes nothing from those who wait for slots
            return self._llm, place
        self._require_room_still()
        self._queue.append(place)
        self._move()
        if not place.granted.done() and weight and self._swap is None and self.on_crowd is not None:
            self.on_crowd()
        try:
            return await place.granted, place
        except BaseException:
            if place in self._queue:
                self._queue.remove(place)
            if place.granted.done() and not place.granted.cancelled() and place.granted.exception() is None:
                self.leave(place)
            self._move()
            raise

    def visit(self) -> tuple[Llama, Place] | None:
        """A place on the open model for a short look, which nobody waits for; None where that cannot be."""
        if self.draining or self._llm is None or self._alias is None or self._swap is not None:
            return None
        if not all(self._has(place.alias) for place in self._queue):
            return None
        place = Place(self._alias, 0, asyncio.get_running_loop().create_future())
        self._inside.append(place)
        return self._llm, place

    def leave(self, place: Place) -> None:
        """It is not used any more; harmless a second time."""
        if place not in self._inside:
            return
        self._inside.remove(place)
        if place.weight:
            seconds = time.monotonic() - place.since
            self._mean_seconds = REMEMBERS * self._mean_seconds + (1 - REMEMBERS) * seconds
        self._move()

    def refuse_waiting(self) -> None:
        """Send away all who wait, and whoever comes."""
        self.draining = True
        for place in self._queue:
            if not place.granted.done():
                place.granted.set_exception(later("the server is shutting down", 5))
        self._queue.clear()

    async def settled(self) -> None:
        """Return when nobody is inside."""
        while self._inside or self._swap is not None:
            await asyncio.sleep(0.01)

    def _has(self, alias: str) -> bool:
        """That model is open, and of use."""
        return self._llm is not None and alias == self._alias and not self._lost(self._llm)

    def _free(self, weight: int) -> bool:
        used = sum(place.weight for place in self._inside)
        return used + min(weight, self.slots) <= self.slots

    def _move(self) -> None:
        """Let in whoever is first, while there is room; swap the model when all who used it have left."""
        while self._queue and self._swap is None:
            place = self._queue[0]
            if place.granted.done():  # given up
                self._queue.popleft()
            elif not self._has(place.alias):
                if self._inside:
                    return
                self._swap = asyncio.get_running_loop().create_task(self._change(place.alias))
            elif self._free(place.weight) and self._llm is not None:
                self._queue.popleft()
                place.weight, place.since = min(place.weight, self.slots), time.monotonic()
                self._inside.append(place)
                place.granted.set_result(self._llm)
            else:
                return

    async def _change(self, alias: str) -> None:
        """Open another model, and tell those who wait for it where that fails."""
        self._llm = self._alias = None
        try:
            self._llm, self.slots = await self._open(alias)
            self._alias = alias
        except Exception as error:
            known = isinstance(error, (LlamaHybridError, OSError, ValueError))  # no fault of the program's
            logger.error("%s cannot be opened: %s", alias, error, exc_info=None if known else error)
            told = later("the model cannot be opened", LONGEST_RETRY)
            if isinstance(error, DeviceError):  # it may be back any time
                told = refusal(error)
            for place in [p for p in self._queue if p.alias == alias]:
                self._queue.remove(place)
                if not place.granted.done():
                    place.granted.set_exception(told)
        finally:
            self._swap = None
            self._move()
