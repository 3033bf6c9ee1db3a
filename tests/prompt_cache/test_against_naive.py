"""Any order of requests, on every kind of memory: the state is the prompt's, and the twin agrees."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llamahybrid.prompt_cache import Checkpoint, Costs, Plan, PromptCache
from llamahybrid.prompt_cache.placement import prefill_cuts
from tests.lab.fake_engine import FakeEngine, Kind
from tests.lab.integrity import check_integrity
from tests.lab.naive import NaivePromptCache

AMPLE = 1 << 26
LONGEST = 120
few_tokens = st.lists(st.integers(0, 2), max_size=25)


class Conversations(RuleBasedStateMachine):
    """Two engines per cache (they share it), driven alike over PromptCache and its naive twin."""

    kinds: ClassVar[tuple[Kind, ...]] = ("recurrent", "hybrid", "window", "plain", "paged")

    @initialize(kind=st.sampled_from(kinds), names=st.sampled_from([("a", "a"), ("a", "b")]))
    def start(self, kind: Kind, names: tuple[str, str]) -> None:
        self.cache, self.naive = PromptCache(AMPLE), NaivePromptCache()
        self.engines = [FakeEngine(self.cache, kind, n, Costs(), snapshot_tokens=16) for n in names]
        self.twins = [FakeEngine(self.naive, kind, n, Costs(), snapshot_tokens=16) for n in names]
        self.histories: list[list[int]] = [[]]
        self.held: list[tuple[Plan, Checkpoint | None, bytes]] = []
        self.exact = True  # nothing was evicted, so the twin knows no more than the cache

    def ask(self, which: int, prompt: list[int]) -> None:
        boundaries = [i for i, token in enumerate(prompt) if token == 2 and i][:3]
        plan = self.engines[which].prefill(prompt, boundaries)
        twin = self.twins[which].prefill(prompt, boundaries)
        assert self.engines[which].state == prompt
        if self.exact:
            assert (plan.matched, plan.cached, plan.source) == (twin.matched, twin.cached, twin.source)
            assert (plan.outline is None) == (twin.outline is None)
            if plan.outline is not None and twin.outline is not None:  # chances are not the twin's to learn
                assert plan.cuts == prefill_cuts(replace(twin.outline, chance=plan.outline.chance), Costs())
            assert (plan.logits is None) == (twin.logits is None)
        assert plan.matched <= twin.matched
        assert self.engines[which].logits is not None
        self.histories.append(prompt)

    @rule(which=st.integers(0, 1), tail=few_tokens)
    def append(self, which: int, tail: list[int]) -> None:
        self.ask(which, [*self.engines[which].state, 1, *tail][:LONGEST])

    @rule(which=st.integers(0, 1), data=st.data(), tail=few_tokens)
    def branch_or_truncate(self, which: int, data: st.DataObject, tail: list[int]) -> None:
        base = data.draw(st.sampled_from(self.histories))
        keep = data.draw(st.integers(0, len(base)))
        self.ask(which, (base[:keep] + tail)[:LONGEST] or [0])

    @rule(which=st.integers(0, 1), data=st.data())
    def regenerate(self, which: int, data: st.DataObject) -> None:
        self.ask(which, data.draw(st.sampled_from(self.histories)) or [0])

    @rule(which=st.integers(0, 1), answer=few_tokens)
    def generate(self, which: int, answer: list[int]) -> None:
        for engine in (self.engines[which], self.twins[which]):
            if engine.state:
                engine.generate(answer[: LONGEST - len(engine.state)])

    @rule(which=st.integers(0, 1))
    def checkpoint_where_it_stands(self, which: int) -> None:
        for engine in (self.engines[which], self.twins[which]):
            if engine.state and engine.kind != "plain":
                engine.checkpoint()

    @rule(which=st.integers(0, 1))
    def lose_the_live_state(self, which: int) -> None:
        for engine in (self.engines[which], self.twins[which]):
            engine.state, engine.logits = [], None

    @rule(budget=st.integers(300, 6000))
    def shrink_the_budget(self, budget: int) -> None:
        self.cache.ram_bytes = budget
        self.exact = False

    @rule(which=st.integers(0, 1), data=st.data(), tail=few_tokens, budget=st.integers(0, 3000))
    def starve_a_pinned_prefix(self, which: int, data: st.DataObject, tail: list[int], budget: int) -> None:
        base = data.draw(st.sampled_from(self.histories))
        prefix = base[: data.draw(st.integers(0, len(base)))]
        if self.engines[which].kind in ("plain", "paged"):
            return  # no snapshot to keep
        cold = FakeEngine(self.cache, self.engines[which].kind, self.engines[which].namespace)
        prompt = np.array([*prefix, 99], np.int32)
        before = self.cache.peek(prompt, cold.view(), Costs())
        self.cache.pin(prefix)
        self.cache.ram_bytes = budget
        assert self.cache.peek(prompt, cold.view(), Costs()) == before
        self.cache.unpin(prefix)
        self.exact = False

    @rule(which=st.integers(0, 1), data=st.data())
    def hold_a_plan(self, which: int, data: st.DataObject) -> None:
        prompt = np.array(data.draw(st.sampled_from(self.histories)), np.int32)
        plan = self.cache.plan(prompt, self.engines[which].view(), (), Costs())
        self.naive.plan(prompt, self.twins[which].view(), (), Costs())  # which counts, and teaches it a tail
        snapshot = plan.checkpoint.snapshot.tobytes() if plan.checkpoint else b""
        self.held.append((plan, plan.checkpoint, snapshot))

    @precondition(lambda self: self.held)
    @rule(twice=st.booleans())
    def release_a_plan(self, twice: bool) -> None:
        plan, _, _ = self.held.pop(0)
        for _ in range(1 + twice):
            self.cache.release(plan)

    @precondition(lambda self: any(checkpoint for _, checkpoint, _ in self.held))
    @rule()
    def drop_what_a_plan_names(self) -> None:
        checkpoint = next(c for _, c, _ in self.held if c)
        self.cache.drop(checkpoint)
        self.exact = False

    @rule(
        data=st.data(),
        which=st.integers(0, 1),
        beyond=st.just([]) | few_tokens,
        goes_on=st.booleans(),
        again=st.booleans(),
    )
    def forget(self, data: st.DataObject, which: int, beyond: list[int], goes_on: bool, again: bool) -> None:
        base = data.draw(st.sampled_from([*self.histories, self.engines[which].state]))
        prefix = base[: data.draw(st.integers(0, len(base)))] + beyond
        self.cache.forget(prefix)
        self.naive.forget(prefix)
        for engine, twin in zip(self.engines, self.twins, strict=True):
            assert engine.followed.forgotten == twin.followed.forgotten
        if goes_on:  # the request that runs has not heard of it
            self.generate(which, [1, 0, 1])
            self.checkpoint_where_it_stands(which)
        if again:
            self.ask(which, base or [0])

    @rule(which=st.integers(0, 1), data=st.data(), tail=few_tokens)
    def peek(self, which: int, data: st.DataObject, tail: list[int]) -> None:
        prompt = np.array([*data.draw(st.sampled_from(self.histories)), *tail] or [0], np.int32)
        depths = [
            cache.peek(prompt, engine.view(), Costs())
            for cache, engine in ((self.cache, self.engines[which]), (self.naive, self.twins[which]))
        ]
        if self.exact:
            assert depths[0] == depths[1]

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.naive.clear()
        assert self.cache.stats().entries == 0

    @invariant()
    def sound(self) -> None:
        check_integrity(self.cache)
        check_integrity(self.naive)

    @invariant()
    def both_count_the_same(self) -> None:
        mine, twins = self.cache.stats(), self.naive.stats()
        if self.exact:
            assert (mine.hits, mine.misses, mine.tokens_saved) == (
                twins.hits,
                twins.misses,
                twins.tokens_saved,
            )

    @invariant()
    def held_snapshots_are_untouched(self) -> None:
        for _, checkpoint, snapshot in self.held:
            assert checkpoint is None or checkpoint.snapshot.tobytes() == snapshot

    @invariant()
    def within_budget(self) -> None:
        assert self.held or self.cache.stats().bytes_ram <= self.cache.ram_bytes


TestConversations = Conversations.TestCase
TestConversations.settings = settings(max_examples=120, stateful_step_count=30)
