"""Slots: live sequences of one context, and which request has which.

A request gets the slot from which most of its prompt can be resumed. What a thread did last stays its own:
it finds `n_tokens` and the rest as it left them, in the slot that it used or, where that was given to another
one meanwhile, in the next that it gets (memory is brought to what upstream believes in when it decodes).
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from llamahybrid.prompt_cache.base import Tokens
from llamahybrid.prompt_cache.ladder import MIN_SPACING
from llamahybrid.request.arrays import UpstreamArrays
from llamahybrid.request.evaluation import Evaluation
from llamahybrid.request.gate import RequestGate
from llamahybrid.request.ticket import ThreadMark, Ticket, this_thread

if TYPE_CHECKING:
    from llamahybrid.request.batcher import Batcher
    from llamahybrid.request.runner import RequestRunner

logger = logging.getLogger("llamahybrid")

PAYING_STEPS = 16
"""Steps of an answer that pay for moving a chat beside those that run; else each takes half as long again."""


@dataclass(eq=False)
class Slot:
    """One live sequence with all that upstream and we keep beside it."""

    arrays: UpstreamArrays = field(default_factory=UpstreamArrays)
    evaluation: Evaluation | None = None
    """None while the model is opened, and where upstream's behaviour was asked for."""
    used: int = 0
    """When a request last began here, or left; larger is later."""
    owner: ThreadMark | None = None
    """The thread that used it last."""
    rests_on: Tokens | None = None
    """What a chat handler has decoded natively for what it asks next, where it lies in no slot any more."""

    def lend(self, arrays: UpstreamArrays) -> None:
        """Upstream believes something else here now."""
        self.arrays = arrays
        if self.evaluation is not None:
            self.evaluation.arrays = arrays
            self.evaluation.handoff = False

    def put_down(self) -> Slot:
        """What upstream believes here, to lie in no slot."""
        evaluation = self.evaluation
        assert evaluation is not None, "else there is one slot, and nobody else to take it"
        self.arrays.true_rows = 0  # they are those of what is live no more
        return Slot(self.arrays, rests_on=self.arrays.native if evaluation.handoff else None)

    def glimpse(self) -> tuple[str, Tokens]:
        """Namespace and ids of what is live here, copied, for any thread: no step is waited for.

        Nothing while it is given to requests of another salt.
        """
        if self.evaluation is None:
            return "", np.empty(0, np.int32)
        live = self.evaluation.runner.live
        before, name = live.identity.fingerprint, live.identity.namespace
        tokens = live.tokens.copy()
        return (name, tokens) if live.identity.fingerprint is before else ("", tokens[:0])

    def resumable(self, prompt: Tokens, salt: bytes = b"") -> int:
        """Tokens of a prompt of a request of this salt that would not have to be decoded here."""
        return 0 if self.evaluation is None else self.evaluation.runner.checkpoints.depth(prompt, salt)

    def live_prefix(self, prompt: Tokens, salt: bytes = b"") -> int:
        """Tokens of a prompt of a request of this salt that are live here."""
        return 0 if self.evaluation is None else self.evaluation.live_prefix(prompt, salt)


class Slots:
    """The slots of one `Llama`: one, until `add` is called."""

    def __init__(self, gate: RequestGate) -> None:
        self.all = [Slot()]
        self.current = self.all[0]
        """That of the request whose step it is."""
        self.batcher: Batcher | None = None
        """What decodes for several; None with one slot."""
        self.outlived = False
        """The prompt cache was given to the model, and stays when that is closed."""
        self._came_from = self.all[0]
        self.one = True
        """There is one slot: asked seven times a token, so it is no comparison of lengths."""
        self.in_step = gate.held
        """The calling thread is in a step: likewise, so it is no call of a call."""
        self._gate = gate
        self._uses = itertools.count(1)
        self._homes: weakref.WeakKeyDictionary[ThreadMark, Slot] = weakref.WeakKeyDictionary()
        """Where lies what each thread left: in a slot, or in none while others have it."""

    def here(self) -> Slot:
        """The slot that is meant: in a step its own, elsewhere what the calling thread used last."""
        if self.one or self.in_step():
            return self.current
        home = self._home(this_thread())
        return self.all[0] if home is None else home

    @property
    def seen(self) -> UpstreamArrays:
        """What upstream believes, to the calling thread; to one that has made no request, the last of all."""
        if self.one or self.in_step():
            return self.current.arrays
        home = self._homes.get(this_thread()) or max(self.all, key=lambda slot: slot.used)
        return home.arrays

    @property
    def own(self) -> UpstreamArrays:
        """The same for who changes it: nobody else's."""
        if self._certain:
            return self.current.arrays
        mark = this_thread()
        if mark not in self._homes:
            self._homes[mark] = Slot(self.all[0].arrays.blank())
        return self._homes[mark].arrays

    def rests_on(self, salt: bytes = b"") -> Tokens | None:
        """What a chat handler of the calling thread has decoded natively, for what is asked next.

        `salt`: of who asks; what was decoded for another one is not for it.
        """
        home = self.current if self._certain else self._homes.get(this_thread())
        if home is not None and home.arrays.salt != salt:
            return None
        if home is None or home.evaluation is None:
            return None if home is None else home.rests_on
        return home.arrays.native if home.evaluation.handoff else None

    @property
    def _certain(self) -> bool:
        """There is one, or the caller is in a step."""
        return self.one or self.in_step()

    def _home(self, mark: ThreadMark | None) -> Slot | None:
        """The slot in which lies what a thread left, if it still does."""
        home = None if mark is None else self._homes.get(mark)
        return home if home in self.all else None

    def add(self, slot: Slot) -> None:
        """One more."""
        self.all.append(slot)
        self.one = False
        self._gate.seats.slots = len(self.all)

    def seat(self, ticket: Ticket, prompt: Tokens | None = None) -> Slot:
        """Give a ticket a slot, if it has none: that in which most of `prompt` is live, or its thread's last.

        One that needs the whole context gets the first, which is sequence 0 (see `gather`).

        Inside a step, when the gate has let it in: there is a free one.
        """
        if ticket.slot is None:
            free, home = self.free(), self._home(self._mark(ticket))
            if ticket.whole:
                self._came_from = home or self.all[0]
                best = self.all[0]
            elif prompt is not None:
                best = max(free, key=lambda slot: (slot.live_prefix(prompt, ticket.salt), -slot.used))
            else:
                best = home if home in free else min(free, key=lambda slot: slot.used)
            self._give(best, ticket)
        return self._enter(ticket)

    def user(self, slot: Slot) -> Ticket | None:
        """The request that has a slot: one that is seated, whatever was interrupted on the way there."""
        return next((ticket for ticket in self._gate.seated if ticket.slot is slot), None)

    def free(self) -> list[Slot]:
        """Slots that no request has."""
        taken = [ticket.slot for ticket in self._gate.seated]
        return [slot for slot in self.all if slot not in taken]

    def gather(self) -> Evaluation:
        """For a request that has the whole context: its thread's tokens as sequence 0, and no others."""
        first, last = self.all[0], self._came_from
        assert first.evaluation is not None, "without one nobody gets a ticket"
        if last.arrays.salt != first.arrays.salt:
            last = first  # its thread's tokens are of another salt
        for slot in self.all[1:]:
            if slot.evaluation is not None and slot is not last:
                slot.evaluation.runner.save_tip()
                slot.evaluation.runner.live.empty()
        if last is not first and last.evaluation is not None:
            first.evaluation.runner.save_tip()
            first.evaluation.take_over(last.evaluation)
        self._came_from = first
        return first.evaluation

    def move(self, ticket: Ticket, prompt: Tokens) -> Slot:
        """A ticket is about to begin with a prompt: give it the free slot from which most can be resumed."""
        old = ticket.slot
        assert old is not None, "it is seated"
        mine, salt = [old, *self.free()], ticket.salt
        busy = {self.all.index(slot) for slot in self.all if slot not in mine}
        rows = {slot: _rows({*busy, self.all.index(slot)}) for slot in mine}

        def merit(slot: Slot) -> tuple[int, ...]:
            return slot.resumable(prompt, salt), slot.live_prefix(prompt, salt), -rows[slot], -slot.used

        best = max(mine, key=merit)
        nearer = [slot for slot in mine if rows[slot] < rows[best]]
        if nearer and best.live_prefix(prompt, salt) and (runner := _moved(best)) is not None:
            runner.share()
            other = max(nearer, key=merit)
            best = other if other.resumable(prompt, salt) >= best.resumable(prompt, salt) else best
        if best is not old:
            self._give(best, ticket, anew=True)
            best.arrays.take_settings(old.arrays)
        best.used = next(self._uses)
        there = max(self.all, key=lambda slot: slot.live_prefix(prompt, salt))
        holds = 0 if there is best else there.live_prefix(prompt, salt)
        if holds and there.evaluation is not None and holds >= best.resumable(prompt, salt) + MIN_SPACING:
            there.evaluation.runner.share()
        return self._enter(ticket)

    @property
    def runners(self) -> list[RequestRunner]:
        """What runs requests, of each slot; none where upstream's behaviour was asked for."""
        return [slot.evaluation.runner for slot in self.all if slot.evaluation is not None]

    def leave(self, ticket: Ticket) -> None:
        """A ticket gives its slot back."""
        if self.batcher is not None and ticket.slot is not None:
            ticket.slot.used = next(self._uses)
        ticket.slot = None
        if self.batcher is not None:
            self.batcher.leave(ticket)
            if self.in_step():  # not in a call that ends what is left of a model that is closed
                self._store_owed(self.batcher)

    def end(self, free: Callable[[], None]) -> None:
        """`free()` ends the context; the cache may be another model's, too, and has what it needs first."""
        try:
            for runner in self.runners if self.outlived else ():
                runner.store_live()
            self.store_attention()
        finally:
            free()

    def store_attention(self) -> None:
        """What all slots hold is about to go (see `RequestRunner.store_attention`)."""
        for runner in self.runners:
            runner.store_attention()

    def _store_owed(self, batcher: Batcher) -> None:
        """Where nobody waits, what ended while somebody did has its attention stored now."""
        for runner in self.runners:
            pager = runner.live.profile.pager
            late = pager is not None and pager.reads_whole  # once it goes
            if runner.checkpoints.owes_attention and batcher.quiet and not late:
                runner.checkpoints.owes_attention = False
                try:
                    runner.store_attention()
                except Exception:  # it is another request that ends here
                    logger.exception("attention was not stored")

    def close(self) -> None:
        """Nothing more is decoded."""
        if self.batcher is not None:
            self.batcher.close()

    def _give(self, slot: Slot, ticket: Ticket, anew: bool = False) -> None:
        """A ticket gets a slot, and what its thread left comes with it, unless it begins `anew`."""
        ticket.slot = slot
        mark = self._mark(ticket)
        home = None if mark is None else self._homes.get(mark)
        if home is slot:
            slot.arrays.sampler = None  # upstream's `sample` would go on with it, whatever it is told
            return
        if slot.owner is not None and self._homes.get(slot.owner) is slot:
            self._homes[slot.owner] = slot.put_down()
        arrays = slot.arrays.blank()
        if home is not None and not anew and ticket.parked is None:
            if home not in self.all:
                arrays = home.arrays
            elif not ticket.whole:  # in use by another request of this thread
                arrays.bring_back(home.arrays.set_aside())
        arrays.sampler = None
        slot.lend(arrays)

    def _enter(self, ticket: Ticket) -> Slot:
        assert ticket.slot is not None, "it is seated"
        self.current = ticket.slot
        if (mark := self._mark(ticket)) is not None:
            ticket.slot.owner = mark
            if self._homes.get(mark) is not ticket.slot:
                self._homes[mark] = ticket.slot
        return ticket.slot

    def _mark(self, ticket: Ticket) -> ThreadMark | None:
        """The calling thread, if this is a step of its own; None where it parks or ends another's request."""
        return this_thread() if ticket.inside == threading.get_ident() else None


def _moved(slot: Slot) -> RequestRunner | None:
    """What runs a slot, where its chat is loaded into another one in less time than an answer there saves."""
    if slot.evaluation is None or not slot.evaluation.runner.live.profile.keeps_chats:
        return None
    runner = slot.evaluation.runner
    costs = runner.meter.costs()
    seconds = costs.restore_seconds + 2 * runner.live.n * costs.segment_seconds  # it is read first
    return runner if seconds < PAYING_STEPS * costs.token_seconds else None


def _rows(numbers: set[int]) -> int:
    """Rows of consecutive numbers: a step of answers takes a native batch for each (src/llama-batch.cpp,
    split_equal)."""
    return sum(number - 1 not in numbers for number in numbers)
