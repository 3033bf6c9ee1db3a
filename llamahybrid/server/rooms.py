"""Rooms: the open models of a server, and the places that requests have on them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from llamahybrid.llama import Llama


@dataclass(eq=False)
class Place:
    """A share in an open model, until `Admission.leave`."""

    alias: str
    weight: int
    """Slots that are used; 0: none, the model alone."""
    granted: asyncio.Future[Llama]
    since: float = field(default_factory=time.monotonic)
    looks: bool = False
    """It only looks: the model counts as unused meanwhile."""


@dataclass(eq=False)
class Room:
    """An open model, and its users."""

    llm: Llama
    slots: int
    """Requests that it runs at once."""
    inside: list[Place] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None
    tired: bool = False
    """It was unused for as long as the operator allows."""

    def free(self, weight: int) -> bool:
        """There are so many free slots; all of them, where it has fewer."""
        used = sum(place.weight for place in self.inside)
        return used + min(weight, self.slots) <= self.slots

    def used(self) -> None:
        """Somebody uses it from now on."""
        self.tired = False
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
