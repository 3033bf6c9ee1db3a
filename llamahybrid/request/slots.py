"""Slots: live sequences of one context, and which request has which.

A request gets the slot from which most of its prompt can be resumed. What a thread did last stays its own:
it finds `n_tokens` and the rest as it left them, also where another's request has had the slot since.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakSet

from llamahybrid.prompt_cache.base import Tokens
from llamahybrid.request.arrays import UpstreamArrays
from llamahybrid.request.evaluation import Evaluation
from llamahybrid.request.gate import RequestGate
from llamahybrid.request.ticket import Ticket

if TYPE_CHECKING:
    from llamahybrid.memory.sequence import LiveSequence
    from llamahybrid.request.batcher import Batcher
    from llamahybrid.request.runner import RequestRunner


class Desk:
    """Where what a thread did last is."""

    def __init__(self) -> None:
        self.slot: Slot | None = None
        self.left: UpstreamArrays | None = None
        """What it found there, once the slot is given to a request of another thread."""


@dataclass(eq=False)
class Slot:
    """One live sequence with all that upstream and we keep beside it."""

    arrays: UpstreamArrays = field(default_factory=UpstreamArrays)
    evaluation: Evaluation | None = None
    """None while the model is opened, and where upstream's behaviour was asked for."""
    used: int = 0
    """When it was last given to one; larger is later."""
    desks: WeakSet[Desk] = field(default_factory=WeakSet)
    """Of the threads that advanced what was last here."""

    def resumable(self, prompt: Tokens) -> int:
        """Tokens of a prompt that would not have to be decoded here."""
        return 0 if self.evaluation is None else self.evaluation.runner.depth(prompt)

    def live_prefix(self, prompt: Tokens) -> int:
        """Tokens of a prompt that are live here."""
        return 0 if self.evaluation is None else self.evaluation.live_prefix(prompt)


class Slots:
    """The slots of one `Llama`: one, until `add` is called."""

    def __init__(self, gate: RequestGate) -> None:
        self.all = [Slot()]
        self.current = self.all[0]
        """That of the request whose step it is."""
        self.batcher: Batcher | None = None
        """What decodes for several; None with one slot."""
        self._came_from: Slot | UpstreamArrays = self.all[0]
        self._gate = gate
        self._uses = itertools.count(1)
        self._thread = threading.local()

    def here(self) -> Slot:
        """The slot that is meant: in a step its own, elsewhere what the calling thread used last."""
        if len(self.all) == 1 or self._gate.inside:
            return self.current
        desk = self._desk
        return desk.slot or (self.all[0] if desk.left is None else Slot(desk.left, self.all[0].evaluation))

    def add(self, slot: Slot) -> None:
        """One more."""
        self.all.append(slot)
        self._gate.slots = len(self.all)

    def seat(self, ticket: Ticket, prompt: Tokens | None = None, *, own: bool = True) -> Slot:
        """Give a ticket a slot, if it has none: that in which most of `prompt` is live, or its thread's last.

        One that needs the whole context gets the first, which is sequence 0 (see `gather`). `own`: the
        calling thread's; another's is here to be parked or ended.

        Inside a step, when the gate has let it in: there is a free one.
        """
        if ticket.slot is None:
            free, desk = self._free(), self._desk
            if ticket.whole:
                self._came_from = desk.slot or desk.left or self.all[0]
                self._give(self.all[0], ticket)
            elif prompt is not None:
                self._give(self._nearest(free, prompt), ticket)
            elif desk.slot in free:
                self._give(desk.slot, ticket)
            else:
                self._give_new(free, desk.left, ticket)
        return self._enter(ticket, own=own)

    def user(self, slot: Slot) -> Ticket | None:
        """The request that has a slot: one that is seated, whatever was interrupted on the way there."""
        return next((ticket for ticket in self._gate.seated if ticket.slot is slot), None)

    def _free(self) -> list[Slot]:
        taken = [ticket.slot for ticket in self._gate.seated]
        return [slot for slot in self.all if slot not in taken]

    def gather(self) -> Evaluation:
        """For a request that has the whole context: its thread's tokens as sequence 0, and no others."""
        first, last = self.all[0], self._came_from
        assert first.evaluation is not None, "without one nobody gets a ticket"
        for slot in self.all[1:]:
            if slot.evaluation is not None and slot is not last:
                slot.evaluation.runner.save_tip()
                slot.evaluation.runner.live.empty()
        if isinstance(last, UpstreamArrays):
            first.arrays.copy_from(last)
        elif last is not first and last.evaluation is not None:
            first.evaluation.runner.save_tip()
            first.evaluation.take_over(last.evaluation)
        self._came_from = first
        return first.evaluation

    def move(self, ticket: Ticket, prompt: Tokens) -> Slot:
        """A ticket is about to begin with a prompt: give it the free slot from which most can be resumed."""
        old = ticket.slot
        assert old is not None, "it is seated"
        mine = [old, *self._free()]
        best = max(mine, key=lambda slot: (slot.resumable(prompt), slot.live_prefix(prompt), -slot.used))
        if best is not old:
            self._give(best, ticket)
            best.arrays.take_settings(old.arrays)
        return self._enter(ticket)

    def share(self, ticket: Ticket, prompt: Tokens) -> None:
        """Have stored what another request holds of a prompt's attention, if it holds more than is known."""
        taken = [slot for other in self._gate.seated if other is not ticket and (slot := other.slot)]
        if not taken:
            return
        known = max(slot.resumable(prompt) for slot in self.all if slot not in taken)
        nearest = max(taken, key=lambda slot: slot.live_prefix(prompt))
        if nearest.evaluation is not None and nearest.live_prefix(prompt) > known:
            nearest.evaluation.runner.share()

    def idle(self, live: LiveSequence, waiting: Collection[Ticket]) -> RequestRunner | None:
        """What runs the slot that no request has used for longest and that holds anything, not this one.

        `waiting`: requests that have not begun to use theirs.
        """
        users = {slot: self.user(slot) for slot in self.all}
        unused = (slot for slot, user in users.items() if user is None or user in waiting)
        free = sorted(unused, key=lambda slot: slot.used)
        runners = (slot.evaluation.runner for slot in free if slot.evaluation is not None)
        return next((runner for runner in runners if runner.live.n and runner.live is not live), None)

    def runner_of(self, live: LiveSequence) -> RequestRunner:
        """What runs requests on a live sequence."""
        runners = (slot.evaluation.runner for slot in self.all if slot.evaluation is not None)
        return next(runner for runner in runners if runner.live is live)

    def leave(self, ticket: Ticket) -> None:
        """A ticket gives its slot back."""
        ticket.slot = None
        if self.batcher is not None:
            self.batcher.leave(ticket)

    def close(self) -> None:
        """Nothing more is decoded."""
        if self.batcher is not None:
            self.batcher.close()

    @property
    def _desk(self) -> Desk:
        """The calling thread's."""
        try:
            desk: Desk = self._thread.desk
        except AttributeError:
            desk = self._thread.desk = Desk()
        return desk

    def _give(self, slot: Slot, ticket: Ticket) -> None:
        mine, left = self._desk, None
        for desk in list(slot.desks):
            if desk is not mine and desk.slot is slot:
                desk.left = left = left or slot.arrays.copy()
                desk.slot = None
        slot.desks.clear()
        slot.arrays.sampler = None  # upstream's `sample` would go on with it, whatever it is told
        slot.used = next(self._uses)
        ticket.slot = slot

    def _nearest(self, free: list[Slot], tokens: Tokens) -> Slot:
        return max(free, key=lambda slot: (slot.live_prefix(tokens), -slot.used))

    def _give_new(self, free: list[Slot], left: UpstreamArrays | None, ticket: Ticket) -> None:
        """Not the slot its thread had last: what was left there comes along, and nothing of another's."""
        if left is None:
            slot = min(free, key=lambda slot: (bool(slot.desks), slot.used))
            self._give(slot, ticket)
            slot.arrays.reset()
        else:
            slot = self._nearest(free, left.ids())
            self._give(slot, ticket)
            slot.arrays.copy_from(left)

    def _enter(self, ticket: Ticket, *, own: bool = True) -> Slot:
        assert ticket.slot is not None, "it is seated"
        self.current = slot = ticket.slot
        if own:
            desk = self._desk
            desk.slot, desk.left = slot, None
            slot.desks.add(desk)
        return slot
