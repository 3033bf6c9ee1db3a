"""Replays a trace on a context made of numbers: a real PromptCache, state of a given size that holds nothing.

Buffers are never written to, so the sizes of a real model cost address space, not memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llamahybrid.prompt_cache import Costs, LiveView, Plan, PromptCache
from llamahybrid.prompt_cache.base import Bytes, Logits, Segment
from llamahybrid.request.schedule import Action, Actions, Schedule, before_tip_goes, gives_up_tip
from tests.lab.traces import Ask, Tokens

NAMESPACE = "model"
LOGITS = np.zeros(1, np.float32)


@dataclass(frozen=True)
class Sizes:
    """A model's state in bytes, and what it costs to handle."""

    name: str
    snapshot: int
    token: int
    """Attention KV of one token; 0: recurrent memory alone."""
    costs: Costs


MIB = 1 << 20
SCALE = 64
"""Real sizes are divided by it, so that no system refuses the address space; the tokens' own bytes stay
below half a per cent of their KV."""


def sizes(name: str, snapshot: int, token: int, token_seconds: float) -> Sizes:
    """A model with decoding 20 times slower than prefill, and snapshots copied at 5 GB/s."""
    costs = Costs(token_seconds, token_seconds / 20, snapshot / 5e9, snapshot / 5e9, snapshot // SCALE)
    return Sizes(name, snapshot // SCALE, token // SCALE, costs)


LARGE = sizes("27B hybrid", 150 * MIB, 64 << 10, 0.05)
"""The proportions of Qwen3.6-27B: a snapshot is worth 2,400 tokens of KV."""
SMALL = sizes("small hybrid", 4 * MIB, 16 << 10, 0.01)
"""A snapshot is worth 256 tokens of KV."""
RECURRENT = sizes("recurrent", 16 * MIB, 0, 0.02)
"""No KV at all: every checkpoint takes the same bytes."""


class Player:
    """One context and its cache; counts prompt tokens and those that were not decoded."""

    def __init__(self, cache: PromptCache, sizes: Sizes) -> None:
        self.cache = cache
        self.sizes = sizes
        self.live: Tokens = np.empty(0, np.int32)
        self.total = 0
        self.cached = 0
        self._staged: list[tuple[int, Bytes]] = []
        self._schedule: Schedule | None = None

    def view(self) -> LiveView:
        """What the context holds now."""
        paged = self._split if self.sizes.token else None
        n = len(self.live)
        return LiveView(NAMESPACE, self.live, n, True, self.sizes.token > 0, n > 0, split=paged)

    def ask(self, ask: Ask) -> Plan:
        """A request from plan to answer, with the checkpoints of its `Schedule`."""
        tip, prompt, costs = len(self.live), ask.prompt, self.sizes.costs
        plan = self.cache.plan(prompt, self.view(), ask.boundaries, costs)
        try:
            if gives_up_tip(plan, tip):
                self._carry_out(before_tip_goes(self.cache.unstored(self.view())))
        finally:
            self.cache.release(plan)
        self.live = prompt[: plan.cached]
        self._schedule = schedule = Schedule(plan, costs, lambda: costs)
        self._carry_out(schedule.begin(tip))
        for stop in (*plan.cuts, plan.total):
            self.live = prompt[:stop]
            self._carry_out(schedule.decoded(stop))
        self._carry_out(schedule.prompt_done(plan.total, True))
        whole = np.concatenate([prompt, ask.answer])
        while len(self.live) < len(whole):
            self._carry_out(schedule.before_token(len(self.live)))
            self.live = whole[: schedule.next_due]
        self._carry_out(schedule.end(len(whole)))
        self.total += plan.total
        self.cached += plan.cached
        return plan

    def play(self, trace: Sequence[Ask]) -> float:
        """The token hit rate over a trace: prompt tokens not decoded, over all."""
        for ask in trace:
            self.ask(ask)
        return self.cached / self.total

    def _carry_out(self, actions: Actions) -> None:
        """Do what the schedule answered; logits are always numbers here."""
        for action in actions:
            match action:
                case Action.STAGE:
                    self._staged.append((len(self.live), self.cache.buffer(self.sizes.snapshot)))
                case Action.ADMIT_STAGED:
                    view = self.view()
                    for position, snapshot in self._staged:
                        self.cache.admit(view, position, snapshot)
                    self._staged.clear()
                case Action.CHECKPOINT | Action.CHECKPOINT_IF_FINITE:
                    self._checkpoint()
                case Action.CHECKPOINT_WITH_LOGITS:
                    self._checkpoint(LOGITS)
                case Action.REMEMBER:
                    self.cache.remember(NAMESPACE, self.live)
                case Action.PAGE_OUT | Action.PAGE_OUT_LATER:
                    self._page_out()

    def _checkpoint(self, logits: Logits | None = None) -> None:
        buffer = self.cache.buffer(self.sizes.snapshot)
        if self.cache.admit(self.view(), len(self.live), buffer, logits) and self._schedule is not None:
            self._schedule.stored(len(self.live))

    def _page_out(self) -> None:
        view = self.view()
        for start, end in self.cache.missing(view):
            record = self.cache.segment_buffer(view, (end - start) * self.sizes.token)
            if record is None or not self.cache.store_segment(view, Segment(start, end, record)):
                return

    def _segment(self, start: int, end: int) -> Segment:
        return Segment(start, end, np.empty((end - start) * self.sizes.token, np.uint8))

    def _split(self, segment: Segment, path: Tokens, at: int) -> tuple[Segment, Segment]:
        return self._segment(segment.start, at), self._segment(at, segment.end)
