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
from collections.abc import Awaitable, Callable, Sequence

from llamahybrid.errors import DeviceError, LlamaHybridError
from llamahybrid.llama import Llama
from llamahybrid.server.errors import Refusal, later, refusal
from llamahybrid.server.rooms import Place, Room

logger = logging.getLogger("llamahybrid.server")

LONGEST_RETRY = 60
"""Seconds: nobody is told to stay away for longer."""

REMEMBERS = 0.9
"""How much of the mean duration is from before the last request."""

OpenModel = Callable[[str], Awaitable[tuple[Llama, int]]]
"""Opens the model of an alias: it, and how many requests run on it at once."""

CloseModels = Callable[[Sequence[str]], Awaitable[None]]
"""Closes the models of these aliases."""

InTheWay = Callable[[str, Sequence[str]], "list[str] | None"]
"""Which of these open models, the first ones first, have to be closed so that the model of that alias can be
opened; None where that takes others, too."""


def _all(_: str, others: Sequence[str]) -> list[str]:
    """One model is open at a time."""
    return list(others)


async def _nothing(_: Sequence[str]) -> None:
    """Opening a model closes the others."""


class Admission:
    """A queue before the models. Requests for one model are served in their order.

    A model that is to be opened has those closed that are in its way: unused ones first, each time the one
    whose last use is longest ago. One in use is closed once its users have left; requests that come later
    do not enter it before.
    """

    def __init__(
        self,
        open_model: OpenModel,
        max_queue: int,
        lost: Callable[[Llama], bool] = lambda _: False,
        close_models: CloseModels = _nothing,
        in_the_way: InTheWay = _all,
        idle_seconds: float | None = None,
    ) -> None:
        """`lost`: an open model is of no use any more; it is opened again once nobody is inside.

        `idle_seconds`: a model that nobody used for so long is closed; None: none is.
        """
        self._open = open_model
        self._close = close_models
        self._in_the_way = in_the_way
        self._lost = lost
        self._idle_seconds = idle_seconds
        self.max_queue = max_queue
        self.draining = False
        """Nobody is let in any more."""
        self._rooms: dict[str, Room] = {}
        """The open models by alias, the one whose last use is longest ago first."""
        self._queue: deque[Place] = deque()
        self._swap: asyncio.Task[None] | None = None
        self._mean_seconds = 1.0
        self.on_crowd: Callable[[str], None] | None = None
        """Called where somebody has to wait, with the alias of the model that is asked for."""
        self.on_refused: Callable[[], None] | None = None
        """Called where `enter` sends somebody away: the queue has filled while the body came in."""

    @property
    def current(self) -> str | None:
        """The open model that was used last."""
        return next(reversed(self._rooms), None)

    @property
    def slots(self) -> int:
        """Requests that the open models run at once."""
        return sum(room.slots for room in self._rooms.values())

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Requests that use slots."""
        return sum(place.weight > 0 for room in self._rooms.values() for place in room.inside)

    def is_full(self, alias: str | None = None) -> bool:
        """Nobody else may wait. A slot that is free is for whoever waits first, who may need more of them,
        or another model.

        `alias`: the model that is asked for; None: not known yet.
        """
        if len(self._queue) < self.max_queue:
            return False
        rooms = [room for each, room in self._rooms.items() if alias in (None, each)]
        return bool(self._queue) or (bool(rooms) and not any(room.free(1) for room in rooms))

    def require_room(self, alias: str | None = None) -> None:
        """Raise Refusal where the next request would be sent away."""
        if self.draining:
            raise later("the server is shutting down", 5)
        if self.is_full(alias):
            raise later(f"{self.waiting} requests wait already; ask again later", self.retry_after(), 429)

    def _require_room_still(self, alias: str) -> None:
        try:
            self.require_room(alias)
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
        if not (weight or self.draining) and all(self._has(p.alias) for p in (*self._queue, place)):
            return self._let_in(place), place  # it takes nothing from those who wait for slots
        self._require_room_still(alias)
        self._queue.append(place)
        self._move()
        if not place.granted.done() and weight and self._swap is None and self.on_crowd is not None:
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
        """A place on an open model for a short look, which nobody waits for; None where that cannot be.

        `alias`: None for the one that was used last.
        """
        alias = self.current if alias is None else alias
        if self.draining or alias is None or not self._has(alias):
            return None
        if not all(self._has(place.alias) for place in self._queue):
            return None
        place = Place(alias, 0, asyncio.get_running_loop().create_future(), looks=True)
        room = self._rooms[alias]
        room.inside.append(place)
        return room.llm, place

    def leave(self, place: Place) -> None:
        """It is not used any more; harmless a second time."""
        room = self._rooms.get(place.alias)
        if room is None or place not in room.inside:
            return
        room.inside.remove(place)
        if place.weight:
            seconds = time.monotonic() - place.since
            self._mean_seconds = REMEMBERS * self._mean_seconds + (1 - REMEMBERS) * seconds
        if not place.looks:
            self._rooms[place.alias] = self._rooms.pop(place.alias)  # its last use is the latest
            self._rest(room)
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
        while self._swap is not None or any(room.inside for room in self._rooms.values()):
            await asyncio.sleep(0.01)

    def _has(self, alias: str) -> bool:
        """That model is open, and of use."""
        return alias in self._rooms and not self._lost(self._rooms[alias].llm)

    def _let_in(self, place: Place) -> Llama:
        room = self._rooms[place.alias]
        room.used()
        room.inside.append(place)
        return room.llm

    def _move(self) -> None:
        """Let in whoever may enter; open a model that is waited for, and close those that nobody uses."""
        held = set[str]()
        for place in list(self._queue):
            if place.granted.done():  # given up
                self._queue.remove(place)
            elif place.alias in held:
                continue
            elif not self._has(place.alias):
                held |= {place.alias, *self._make_way(place.alias, held)}
            elif (room := self._rooms[place.alias]).free(place.weight):
                self._queue.remove(place)
                place.weight, place.since = min(place.weight, room.slots), time.monotonic()
                place.granted.set_result(self._let_in(place))
            else:
                held.add(place.alias)
        tired = [alias for alias, room in self._rooms.items() if room.tired and not room.inside]
        if tired and self._swap is None and not self.draining:
            self._begin_change(None, tired)

    def _make_way(self, alias: str, held: set[str]) -> list[str]:
        """Begin to open a model, if all that is in its way is unused; which others are in its way.

        `held`: those of requests that came before.
        """
        if self._swap is not None:
            return []
        others = [each for each in self._rooms if each not in held and each != alias]
        others.sort(key=lambda each: bool(self._rooms[each].inside))
        closing = self._in_the_way(alias, others)
        if closing is None:
            return []
        lost = [alias] if alias in self._rooms else []
        if not any(self._rooms[each].inside for each in (*closing, *lost)):
            self._begin_change(alias, [*closing, *lost])
        return closing

    def _rest(self, room: Room) -> None:
        """Have it closed after a time, if nobody uses it before."""
        if self._idle_seconds is not None and all(place.looks for place in room.inside):
            room.used()
            room.timer = asyncio.get_running_loop().call_later(self._idle_seconds, self._tire, room)

    def _tire(self, room: Room) -> None:
        room.tired = True
        self._move()

    def _begin_change(self, alias: str | None, closing: Sequence[str]) -> None:
        """Close models, and open one unless that is None; nobody is inside of those."""
        for each in closing:
            self._rooms.pop(each).used()
        self._swap = asyncio.get_running_loop().create_task(self._change(alias, closing))

    async def _change(self, alias: str | None, closing: Sequence[str]) -> None:
        """The same; who waits for the model is told where it cannot be opened."""
        try:
            if closing:
                await self._close(closing)
            if alias is not None:
                self._rooms[alias] = Room(*await self._open(alias))
                self._rest(self._rooms[alias])  # whoever asked for it may have gone
        except Exception as error:
            known = isinstance(error, (LlamaHybridError, OSError, ValueError))  # no fault of the program's
            doing = f"{alias} cannot be opened" if alias is not None else "a model was not closed in order"
            logger.error("%s: %s", doing, error, exc_info=None if known else error)
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
