"""Cells: room in a cache that several live sequences share, and who gives way when it is full.

Idle slots lose theirs first, then the youngest request, which comes back when there is room again. Of those
that wait for room the oldest has it first.

Without flash attention, and without patch 0032, each token is computed with every cell up to the last that is
taken, those of others masked (src/llama-kv-cache.cpp, get_n_kv). So idle slots lose theirs, too, where that
costs more than loading them again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from llamahybrid.memory.restore import lendable
from llamahybrid.memory.sequence import LiveSequence
from llamahybrid.memory.shared import SharedContext
from llamahybrid.prompt_cache.base import Costs, Tokens
from llamahybrid.request.gate import RequestGate
from llamahybrid.request.job import Job, NoRoom
from llamahybrid.request.line import POLL
from llamahybrid.request.ticket import Ticket

if TYPE_CHECKING:
    from llamahybrid.request.runner import RequestRunner
    from llamahybrid.request.slots import Slots


MASKED_SHARE = 5e-5
"""What one masked cell adds to whatever is computed beside it: 4 x n_embd x attention layers flops of 2 x
parameters, at half their speed, are 3e-5 to 1e-4 for models of 0.1 to 8 billion parameters. Timed by hand on
2 cores, 0.1 billion in f16: 6e-5 for a token alone, 9e-5 for a prompt's."""

LEAST_LOADING = 1e-3
"""Seconds that loading a slot's state is taken for at least, and while it was not measured."""

LOOK_STEPS = 64
"""Steps of answers between two looks at idle slots."""


class Cells:
    """The cells of one context."""

    def __init__(
        self,
        shared: SharedContext,
        gate: RequestGate,
        slots: Slots,
        cells: int | None,
        masked: bool,
        answering: Collection[Ticket],
        prompts: Collection[Ticket],
    ) -> None:
        """`cells`: tokens that all sequences may hold together, None where no cells are kept for them.

        `masked`: tokens are computed with the cells of others, too.
        `answering`, `prompts`: requests in their answer, and those that decode a prompt or wait to.
        """
        self.cells = cells
        self.prompt_tokens = self.steps = 0
        """What the context has computed for all: tokens of prompts, and steps of answers."""
        self.look_at = LOOK_STEPS
        """At so many steps idle slots are to be looked at again."""
        self._masked = masked and cells is not None
        self._shared = shared
        self._gate = gate
        self._slots = slots
        self._answering = answering
        self._prompts = prompts
        self._short: dict[Ticket, LiveSequence] = {}
        """Requests that wait for cells, and where theirs are."""
        self.pausing: dict[Ticket, LiveSequence] = {}
        """Those whose next piece of a prompt waits for a step of the answers."""

    def free(self, without: LiveSequence | None = None) -> int:
        """Cells that are free, or would be `without` one of the sequences."""
        return 1 << 30 if self.cells is None else self.cells - self._shared.cells_held(without)

    def make_room(self, runner: RequestRunner, prompt: Tokens) -> None:
        """Wait until there are cells for a prompt and a token; idle ones that it need not meet go."""
        if self.any_idle:
            self.release_idle(runner.meter.costs(), len(prompt) - runner.checkpoints.depth(prompt))
        self.wait(runner.live, partial(self._needed, runner, prompt))

    def _needed(self, runner: RequestRunner, prompt: Tokens) -> int:
        """How many a prompt and a token need of their own, by who could lend them some just now."""
        live, tokens = runner.live, len(prompt) + 1
        if self.free(without=live) >= tokens:
            return tokens
        return tokens - lendable(live, prompt, runner.checkpoints.depth(prompt))

    def wait(self, live: LiveSequence, needed: Callable[[], int]) -> None:
        """Wait until a sequence may hold `needed()` tokens: idle slots are emptied, the others waited for.

        Older requests that wait come first, however few cells this one needs.
        That is asked on every look: who could have lent it some may be gone by then.
        """
        ticket = self._gate.running
        with self._waiting(ticket, live):
            while True:
                if not self._older_waits(ticket):
                    if self.free(without=live) >= needed() or not self._others_hold(live):
                        return
                    if self._empty_idle(live) or self._gate.make_way(ticket) or self._give_way():
                        continue
                self._gate.check()
                self._gate.step_aside(ticket, partial(time.sleep, POLL / 10))

    def _older_waits(self, ticket: Ticket) -> bool:
        """An older request waits for cells, and has them first: others might come for ever.

        What was decoded natively cannot be decoded again: its owner waits for nobody.
        """
        return ticket.rests_on is None and any(other.born < ticket.born for other in _inside(self._short))

    def wait_for_batch(
        self, live: LiveSequence, position: int, tokens: int, jobs: Callable[[], list[Job]]
    ) -> None:
        """Have cells for so many at `position`, unless the sequence is changed; `jobs()`: who else waits.

        Those younger than this one lose theirs for it; until older ones are through, it waits itself.
        """
        ticket = self._gate.running
        with self._waiting(ticket, live):
            while live.n == position:
                if live.n or not self._older_waits(ticket):
                    if self.have(tokens, jobs(), ticket, live) or not self._others_hold(live):
                        return
                    if self._give_way():
                        continue
                self._gate.check()  # the others' next tokens come, and then their cells can be had
                self._gate.step_aside(ticket, partial(time.sleep, POLL / 100))

    @contextmanager
    def _waiting(self, ticket: Ticket, live: LiveSequence) -> Iterator[None]:
        """A request waits for cells."""
        self._short[ticket] = live
        try:
            yield
        finally:
            self._short.pop(ticket, None)

    def _give_way(self) -> bool:
        """Where all that hold cells wait for more, the youngest loses its own; False if nobody does.

        The oldest never does: it goes on first.
        """
        short = _inside(self._short)
        waiting = list(short.values())
        if any(live.n and live not in waiting for live in self._shared.members):
            return False
        for ticket in sorted(short, key=lambda ticket: -ticket.born)[:-1]:
            if short[ticket].n:
                self._take(ticket, short[ticket])
                return True
        return False

    def _take(self, ticket: Ticket, live: LiveSequence) -> None:
        """A request that waits loses its cells."""
        runner = self._slots.runner_of(live)
        if ticket in self._answering:
            runner.save_tip()
        else:  # what a prompt's end has not proven is not stored; what lies below it may be wanted
            runner.store_attention()
        live.empty()

    def that_fit(self, jobs: list[Job]) -> list[Job]:
        """Those of them that there are cells for; the youngest lose theirs."""
        if jobs and self.free() < len(jobs):
            oldest = min(jobs, key=lambda job: job.ticket.born)
            self.have(len(jobs), jobs, oldest.ticket, oldest.live)
        return [job for job in jobs if not job.done]

    def have(self, tokens: int, jobs: list[Job], ticket: Ticket, live: LiveSequence) -> bool:
        """Have cells for so many tokens, if that can be; for `ticket`, whose sequence is not to lose any.

        Idle slots lose theirs first, then the youngest of those that wait, for a step or for cells, if they
        are younger than this one.
        """
        while self.free() < tokens and (self._empty_idle(live) or self._gate.make_way(self._gate.running)):
            continue
        if self.free() >= tokens:
            return True
        tokens_of = {job.ticket: job for job in jobs}
        waiting = _inside({**self.pausing, **self._short})
        held = [t for t, live in waiting.items() if live.n and t.rests_on is None and t not in tokens_of]
        for other in sorted((*held, *tokens_of), key=lambda other: -other.born):
            if self.free() >= tokens or other.born <= ticket.born:
                break
            if other in tokens_of:
                self._empty(self._slots.runner_of(tokens_of[other].live))
                tokens_of[other].end(NoRoom("cells have run out"))
            else:
                self._take(other, waiting[other])
        return self.free() >= tokens

    def _empty(self, runner: RequestRunner) -> None:
        runner.save_tip()
        runner.live.empty()

    def _others_hold(self, live: LiveSequence) -> bool:
        return any(other.n for other in self._shared.members if other is not live)

    def _empty_idle(self, live: LiveSequence) -> bool:
        """Empty the slot that nobody has for longest; False if there is none."""
        idle = self._slots.idle(live, self._unbegun(self._gate.running))
        if idle is not None:
            self._empty(idle)
        return idle is not None

    def _unbegun(self, ticket: Ticket) -> list[Ticket]:
        """Requests that have not begun in their slots: they wait for another prompt, or behind `ticket`."""
        first, *others = self._prompts or (ticket,)
        behind = first in self._short and first.request is None and first.born > ticket.born
        return [first, *others] if behind and first.rests_on is None else others

    @property
    def quiet(self) -> bool:
        """No request wants to decode, nor is one about to come in."""
        return not self._gate.crowded and all(t.over for t in (*self._answering, *self._prompts))

    @property
    def any_idle(self) -> bool:
        """Tokens would be computed with cells that no request uses."""
        return self._masked and any(
            slot.evaluation and slot.evaluation.runner.live.n for slot in self._slots.free()
        )

    @property
    def computed(self) -> tuple[int, int]:
        """Tokens of prompts, and steps of answers, so far."""
        return self.prompt_tokens, self.steps

    def release_idle(self, costs: Costs, coming: int = 0) -> None:
        """Have idle slots give their cells away once computing beside them has cost what loading them does.

        That is at most twice the least there is, whoever comes next. `coming`: tokens of a prompt that is
        about to be decoded. What the cache has not got stays.
        """
        self.look_at = self.steps + LOOK_STEPS
        if not self._masked:
            return
        for slot in self._slots.free():
            if (evaluation := slot.evaluation) is None or evaluation.handoff:
                continue  # what a chat handler has decoded is gone on from soon
            runner, (tokens, steps) = evaluation.runner, slot.idle_from
            tokens, steps = self.prompt_tokens + coming - tokens, self.steps - steps
            beside = tokens * costs.prefill_seconds + steps * costs.token_seconds
            cells = self._shared.cells_held() - self._shared.cells_held(without=runner.live)
            if not cells or beside < keep_seconds(costs, cells):  # those that others hold stay anyway
                continue
            runner.save_tip()
            if runner.checkpoints.serve_all():
                runner.live.empty()
            else:
                slot.idle_from = self.computed


def keep_seconds(costs: Costs, cells: int) -> float:
    """How long others compute beside an idle slot before it is to lose so many cells."""
    snapshot = costs.restore_seconds or costs.snapshot_seconds
    return max(LEAST_LOADING, snapshot + cells * costs.segment_seconds) / (MASKED_SHARE * cells)


def _inside(waiting: dict[Ticket, LiveSequence]) -> dict[Ticket, LiveSequence]:
    """Those of them that do wait."""
    return {ticket: live for ticket, live in waiting.items() if ticket.acts}
