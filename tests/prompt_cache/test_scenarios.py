"""Actions of users, in their words, and the plan that each one gets."""

from __future__ import annotations

import numpy as np
import pytest

from llamahybrid.prompt_cache import Costs, PromptCache
from llamahybrid.prompt_cache.base import Reason
from tests.lab.fake_engine import FakeEngine, Kind, logits_of
from tests.lab.integrity import check_integrity
from tests.lab.pretend import PretendSpeech

HISTORY = list(range(100, 400))
DIFFERENT = list(range(1000, 1300))


def engine(kind: Kind = "hybrid", snapshot_costs: Costs | None = None) -> FakeEngine:
    return FakeEngine(PromptCache(1 << 26), kind, costs=snapshot_costs or Costs())


def test_a_first_prompt_has_nothing_in_common_with_anything() -> None:
    plan = engine().prefill(HISTORY)
    assert (plan.matched, plan.cached, plan.source, plan.total) == (0, 0, "none", 300)
    assert plan.reason == Reason("unknown")


def test_stripped_thinking_restores_right_before_the_mark() -> None:
    e, speech = engine(), PretendSpeech(seed=3)
    history = speech.message(200, "system")
    for _ in range(4):
        history += speech.message(60)
        prompt, answer = history + speech.reply(thinking=True), speech.words(120)
        plan = e.prefill(prompt, speech.starts(prompt))
        e.generate(answer)
        assert plan.cached == plan.matched
        history += speech.reply() + answer[60:]
    assert (plan.source, plan.reason) == ("ram", Reason("known"))


def test_a_regenerated_answer_samples_from_stored_logits() -> None:
    e = engine()
    e.prefill(HISTORY)
    e.generate(DIFFERENT)
    plan = e.prefill(HISTORY)
    assert (plan.cached, plan.total, plan.source) == (300, 300, "ram")
    assert plan.logits is not None
    assert np.array_equal(plan.logits, logits_of(HISTORY))
    assert plan.reason == Reason("repeated", stored_logits=True)


def test_the_same_prompt_at_once_again_uses_the_live_logits() -> None:
    e = engine()
    e.prefill(HISTORY)
    plan = e.prefill(HISTORY)
    assert (plan.cached, plan.source, plan.logits) == (300, "live", None)
    assert plan.reason == Reason("repeated")


def test_an_edit_in_the_middle_restores_before_it_and_is_cut_there() -> None:
    e = engine()
    e.prefill(HISTORY, [60, 140, 220])
    plan = e.prefill(HISTORY[:150] + DIFFERENT, [60, 140, 220])
    assert (plan.matched, plan.cached, plan.source) == (150, 140, "ram")
    assert e.prefill(HISTORY[:150] + HISTORY[::-1]).cached in (140, 150)


def test_diverging_twice_at_one_place_finds_the_branch_point() -> None:
    e = engine()
    e.prefill(HISTORY, [60])
    first = e.prefill(HISTORY[:170] + DIFFERENT)
    assert 170 in first.cuts
    second = e.prefill(HISTORY[:170] + DIFFERENT[::-1])
    assert (second.matched, second.cached) == (170, 170)


def test_an_agent_loop_extends_and_never_restores() -> None:
    e = engine()
    for page in range(5):
        tip = len(e.state)
        plan = e.prefill([*e.state, *range(1000 * page, 1000 * page + 400)])
        assert (plan.cached, plan.matched, plan.checkpoint) == (tip, tip, None)
        expected = ("live", Reason("extended")) if page else ("none", Reason("unknown"))
        assert (plan.source, plan.reason) == expected
        e.generate(DIFFERENT[:80])


def test_a_miss_names_the_tokens_that_differ() -> None:
    e = engine()
    e.prefill(HISTORY)
    assert e.prefill([*HISTORY[:170], 7, 8]).differs == (7, HISTORY[170])
    assert e.prefill([*HISTORY[:170], 9]).differs in ((9, 7), (9, HISTORY[170]))
    assert e.prefill([*HISTORY[:170], 9, 9]).differs is None
    assert e.prefill(DIFFERENT).differs is None


@pytest.mark.parametrize("before", [False, True], ids=["later", "before"])
def test_a_pinned_prefix_outlives_everything_else(before: bool) -> None:
    """Pinned before its checkpoints are taken, or later."""
    cache = PromptCache(20_000)
    one = FakeEngine(cache, "recurrent")
    system = HISTORY[:200]
    assert not before or cache.pin(system) == 0
    one.prefill(system + DIFFERENT[:40], [200])
    assert before or cache.pin(system) > 0
    for seed in range(40):
        one.prefill([(seed * 37 + i) % 500 + 2000 for i in range(300)])
        check_integrity(cache)
    assert one.prefill(system + DIFFERENT[100:140], [200]).cached == 200
    cache.ram_bytes = 500
    assert one.prefill(system + DIFFERENT[140:180], [200]).cached == 200
    cache.unpin(system)
    one.prefill([(i * 41) % 500 + 3000 for i in range(300)])
    assert one.prefill(system + DIFFERENT[200:240], [200]).cached == 0
