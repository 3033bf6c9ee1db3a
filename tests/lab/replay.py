"""Replays a trace on a context made of numbers: a real PromptCache, state of a given size that holds nothing.

Buffers are never written to, so the sizes of a real model cost address space, not memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llamahybrid.prompt_cache import Costs, LiveView, Plan, PromptCache, final_due, next_decode_checkpoint
from llamahybrid.prompt_cache.base import Segment
from llamahybrid.prompt_cache.placement import tip_due
from tests.lab.policies import Shape
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
    shape: Shape


MIB = 1 << 20
SCALE = 64
"""Real sizes are divided by it, so that no system refuses the address space; the tokens' own bytes stay
below half a per cent of their KV."""


def sizes(name: str, snapshot: int, token: int, token_seconds: float, shape: Shape) -> Sizes:
    """A model with decoding 20 times slower than prefill, and snapshots copied at 5 GB/s."""
    costs = Costs(token_seconds, token_seconds / 20, snapshot / 5e9, snapshot / 5e9, snapshot // SCALE)
    return Sizes(name, snapshot // SCALE, token // SCALE, costs, shape)


LARGE = sizes("27B hybrid", 150 * MIB, 64 << 10, 0.05, Shape(16, 48, 64, 5120, 128))
"""The proportions of Qwen3.6-27B: a snapshot is worth 2,400 tokens of KV."""
SMALL = sizes("small hybrid", 4 * MIB, 16 << 10, 0.01, Shape(6, 18, 24, 1024, 128))
"""A snapshot is worth 256 tokens of KV."""
RECURRENT = sizes("recurrent", 16 * MIB, 0, 0.02, Shape(0, 32, 0, 2560, 64))
"""No KV at all: every checkpoint takes the same bytes."""


class Player:
    """One context and its cache; counts prompt tokens and those that were not decoded."""

    def __init__(self, cache: PromptCache, sizes: Sizes) -> None:
        self.cache = cache
        self.sizes = sizes
        self.live: Tokens = np.empty(0, np.int32)
        self.total = 0
        self.cached = 0

    def view(self) -> LiveView:
        """What the context holds now."""
        paged = self._split if self.sizes.token else None
        n = len(self.live)
        return LiveView(NAMESPACE, self.live, n, True, self.sizes.token > 0, n > 0, split=paged)

    def ask(self, ask: Ask) -> Plan:
        """A request from plan to answer, with the checkpoints that placement asks for."""
        tip, prompt = len(self.live), ask.prompt
        plan = self.cache.plan(prompt, self.view(), ask.boundaries, self.sizes.costs)
        try:
            extends = plan.source == "live" and plan.cached == tip > 0
            if not extends:
                self._leave()
        finally:
            self.cache.release(plan)
        self.live = prompt[: plan.cached]
        if extends and tip_due(plan.left) and not plan.stored:
            self._checkpoint()
        for stop in plan.cuts:
            self.live = prompt[:stop]
            self._checkpoint()
        self.live = prompt
        if plan.cached < plan.total:
            self._checkpoint(logits=True)
        self._answer(prompt, ask.answer)
        self.cache.remember(NAMESPACE, self.live)
        self._page_out()
        self.total += plan.total
        self.cached += plan.cached
        return plan

    def play(self, trace: Sequence[Ask]) -> float:
        """The token hit rate over a trace: prompt tokens not decoded, over all."""
        for ask in trace:
            self.ask(ask)
        return self.cached / self.total

    def _answer(self, prompt: Tokens, answer: Tokens) -> None:
        whole = np.concatenate([prompt, answer])
        frontier = last = len(prompt)
        due = next_decode_checkpoint(frontier, frontier, self.sizes.costs)
        while due <= len(whole):
            self.live = whole[:due]
            self._checkpoint()
            last, due = due, next_decode_checkpoint(due, frontier, self.sizes.costs)
        self.live = whole
        if last < len(whole) and final_due(len(whole) - last, self.sizes.costs):
            self._checkpoint()

    def _checkpoint(self, logits: bool = False) -> None:
        buffer = self.cache.buffer(self.sizes.snapshot)
        self.cache.admit(self.view(), len(self.live), buffer, LOGITS if logits else None)

    def _leave(self) -> None:
        if len(self.live) and tip_due(self.cache.unstored(self.view())):
            self._checkpoint()
        self._page_out()

    def _page_out(self) -> None:
        view = self.view()
        for start, end in self.cache.missing(view):
            if not self.cache.keep(view, self._segment(start, end)):
                return

    def _segment(self, start: int, end: int) -> Segment:
        return Segment(start, end, np.empty((end - start) * self.sizes.token, np.uint8))

    def _split(self, segment: Segment, path: Tokens, at: int) -> tuple[Segment, Segment]:
        return self._segment(segment.start, at), self._segment(at, segment.end)
