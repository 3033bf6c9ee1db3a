"""The most that any eviction could save on a small trace, knowing the future: a dynamic program.

A *place* is a token path at whose end a checkpoint may be kept; each request offers a few. After a request
any of the places stored, or decoded in it, may be kept if they fit together: a snapshot each, and the
attention KV of all their paths, each token once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import numpy as np

from llamahybrid.prompt_cache import Plan, PromptCache
from llamahybrid.prompt_cache.nodes import common_prefix
from tests.lab.replay import Player, Sizes
from tests.lab.traces import Ask, Tokens


def offered(ask: Ask) -> tuple[int, ...]:
    """Positions of a prompt where a checkpoint may be taken: the first message's end, the last message's."""
    return tuple(sorted({ask.boundaries[0], ask.boundaries[-2]}))


class FewPlaces(Player):
    """Takes checkpoints where `offered` says and at answers' ends, whatever was evicted."""

    def ask(self, ask: Ask) -> Plan:
        """See `Player.ask`."""
        plan = self.cache.plan(ask.prompt, self.view(), ask.boundaries, self.sizes.costs)
        try:
            if not (plan.source == "live" and plan.cached == len(self.live)):
                self._page_out()
        finally:
            self.cache.release(plan)
        whole = np.concatenate([ask.prompt, ask.answer])
        for stop in (*offered(ask), len(whole)):
            if stop > plan.cached:
                self.live = whole[:stop]
                self._checkpoint()
        self.cache.remember("model", self.live)
        self._page_out()
        self.total += plan.total
        self.cached += plan.cached
        return plan


@dataclass(frozen=True)
class Step:
    """One request, in places (bit numbers)."""

    prompt: int
    """Tokens of the prompt."""
    live: int
    """Tokens that the sequence before it saves, if it is all a prefix of this prompt."""
    serves: tuple[int, ...]
    """Places that lie on the prompt, shallowest first."""
    offers: tuple[int, ...]
    """Places that may be kept when it is over, if they were decoded."""


class Problem:
    """A trace as places and edges between them."""

    def __init__(self, trace: Sequence[Ask], sizes: Sizes) -> None:
        self.sizes = sizes
        self.positions: list[int] = []
        self._paths: list[Tokens] = []
        numbers: dict[bytes, int] = {}
        wholes = [np.concatenate([ask.prompt, ask.answer]) for ask in trace]
        offers = []
        for ask, whole in zip(trace, wholes, strict=True):
            row = []
            for at in (*offered(ask), len(whole)):
                key = whole[:at].tobytes()
                if key not in numbers:
                    numbers[key] = len(self.positions)
                    self.positions.append(at)
                    self._paths.append(whole[:at])
                row.append(numbers[key])
            offers.append(tuple(row))
        self.lengths, self.above = self._edges()
        self._known: dict[int, int] = {}
        self.steps = [
            self._step(trace[t].prompt, wholes[t - 1] if t else wholes[t][:0], offers[t])
            for t in range(len(trace))
        ]
        self.useful = self._useful()
        self.serving = [
            sum(1 << t for t, step in enumerate(self.steps) if p in step.serves)
            for p in range(len(self.positions))
        ]
        """The requests (bit mask) that each place lies on the prompt of."""

    def bytes(self, stored: int) -> int:
        """What a set of places (bit mask) takes, with the KV of their paths."""
        known = self._known.get(stored)
        if known is None:
            edges = reduce(or_, (self.above[bit.bit_length() - 1] for bit in bits(stored)), 0)
            tokens = sum(self.lengths[bit.bit_length() - 1] for bit in bits(edges))
            known = stored.bit_count() * self.sizes.snapshot + tokens * self.sizes.token
            self._known[stored] = known
        return known

    def saved(self, stored: int, step: Step) -> int:
        """Tokens that a request need not decode."""
        deepest = next((p for p in reversed(step.serves) if stored >> p & 1), None)
        return max(step.live, 0 if deepest is None else self.positions[deepest])

    def available(self, stored: int, t: int) -> int:
        """Places that may be kept after request `t`, those without a future left out."""
        step = self.steps[t]
        reused = self.saved(stored, step)
        made = sum(1 << p for p in step.offers if self.positions[p] > reused)
        pool = (stored | made) & self.useful[t]
        if self.sizes.token:
            return pool
        # Without KV all places cost the same, so one is useless beside a deeper one that serves all it does.
        later = -1 << t + 1
        return sum(b for b in bits(pool) if not any(self._covers(d, b, later) for d in bits(pool)))

    def _covers(self, deeper: int, place: int, later: int) -> bool:
        """Whether a place (bit) lies under another and serves all requests of `later` that the other does."""
        d, p = deeper.bit_length() - 1, place.bit_length() - 1
        same = self.serving[d] & later == self.serving[p] & later
        return same and self.positions[d] > self.positions[p] and bool(self.serving[d] & later)

    def _edges(self) -> tuple[list[int], list[int]]:
        """The tree of all places: tokens of each edge, and the edges (bit mask) of each place's path."""
        cuts = [sorted({common_prefix(path, other) for other in self._paths} - {0}) for path in self._paths]
        number: dict[bytes, int] = {}
        lengths: list[int] = []
        above: list[int] = []
        for path, ends in zip(self._paths, cuts, strict=True):
            mask = start = 0
            for end in ends:
                key = path[:end].tobytes()
                if key not in number:
                    number[key] = len(lengths)
                    lengths.append(end - start)
                mask |= 1 << number[key]
                start = end
            above.append(mask)
        return lengths, above

    def _step(self, prompt: Tokens, before: Tokens, offers: tuple[int, ...]) -> Step:
        n = len(prompt)
        live = len(before) if len(before) < n and common_prefix(before, prompt) == len(before) else 0
        serves = [
            p
            for p, path in enumerate(self._paths)
            if len(path) < n and common_prefix(path, prompt) == len(path)
        ]
        serves.sort(key=self.positions.__getitem__)
        return Step(n, live, tuple(serves), offers)

    def _useful(self) -> list[int]:
        """For each request, the places that serve a later one."""
        masks = [0]
        for step in reversed(self.steps[1:]):
            masks.append(masks[-1] | sum(1 << p for p in step.serves))
        return masks[::-1]


def optimum(trace: Sequence[Ask], sizes: Sizes, ram_bytes: int) -> int:
    """Most tokens that evictions can leave to be reused on `trace` within a budget; exact.

    Forward over the sets that could be stored after each request, with the best total for each. Only sets
    that nothing more fits into are followed: a larger set never saves less, later on.
    """
    problem = Problem(trace, sizes)
    best = {0: 0}
    for t, step in enumerate(problem.steps):
        after: dict[int, int] = {}
        for stored, total in best.items():
            score = total + problem.saved(stored, step)
            for kept in _fitting(problem, problem.available(stored, t), ram_bytes):
                if score > after.get(kept, -1):
                    after[kept] = score
        best = after
    return max(best.values())


def brute_force(trace: Sequence[Ask], sizes: Sizes, ram_bytes: int) -> int:
    """The same by trying every subset after every request; exponential in the trace's length."""
    problem = Problem(trace, sizes)

    def most(t: int, stored: int) -> int:
        if t == len(problem.steps):
            return 0
        step = problem.steps[t]
        pool = problem.available(stored, t)
        subsets = (s for s in _subsets(pool) if problem.bytes(s) <= ram_bytes)
        return problem.saved(stored, step) + max(most(t + 1, s) for s in subsets)

    return most(0, 0)


def replayed(trace: Sequence[Ask], cache: PromptCache, sizes: Sizes) -> int:
    """Tokens that a cache leaves to be reused on `trace`, checkpoints taken where the optimum takes them."""
    player = FewPlaces(cache, sizes)
    player.play(trace)
    return player.cached


def _fitting(problem: Problem, pool: int, ram_bytes: int) -> Iterator[int]:
    """Subsets of `pool` that fit and that nothing more of it fits into."""

    def fits(subset: int) -> bool:
        return problem.bytes(subset) <= ram_bytes

    def grow(subset: int, rest: int) -> Iterator[int]:
        if not rest:
            if not any(fits(subset | bit) for bit in bits(pool & ~subset)):
                yield subset
            return
        bit = rest & -rest
        if fits(subset | bit):
            yield from grow(subset | bit, rest ^ bit)
        yield from grow(subset, rest ^ bit)

    if fits(pool):
        yield pool
    else:
        yield from grow(0, pool)


def bits(mask: int) -> Iterator[int]:
    """The single bits of a mask, lowest first."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit


def _subsets(pool: int) -> Iterator[int]:
    """All subsets of a bit mask, the empty one last."""
    subset = pool
    while subset:
        yield subset
        subset = (subset - 1) & pool
    yield 0
