"""What users do, in their words, and the plan each of it gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from llamahybrid.prompt_cache import Costs, LiveView, Plan, PromptCache
from llamahybrid.prompt_cache.base import Logits
from llamahybrid.request.report import sentence
from tests.lab.fake_engine import FakeEngine, Kind, logits_of
from tests.lab.integrity import check_integrity

from .workloads import Chat

HISTORY = list(range(100, 400))
DIFFERENT = list(range(1000, 1300))


def engine(kind: Kind = "hybrid", snapshot_costs: Costs | None = None) -> FakeEngine:
    return FakeEngine(PromptCache(1 << 26), kind, costs=snapshot_costs or Costs())


def live_view(tokens: Sequence[int], **changes: object) -> LiveView:
    fields = {
        "namespace": "m",
        "tokens": np.array(tokens, np.int32),
        "cut_floor": len(tokens),
        "needs_checkpoints": True,
        "needs_attention": True,
        "tip_logits": True,
    }
    return LiveView(**{**fields, **changes})  # type: ignore[arg-type]


def plan_for(cache: PromptCache, prompt: Sequence[int], view: LiveView) -> Plan:
    plan = cache.plan(np.array(prompt, np.int32), view, (), Costs())
    cache.release(plan)
    return plan


def told(plan: Plan) -> str:
    """How it starts, in words, without the tokens that it parts from."""
    return sentence(replace(plan, differs=None))


def store(cache: PromptCache, tokens: Sequence[int], position: int, logits: Logits | None = None) -> None:
    cache.admit(live_view(tokens), position, cache.buffer(64), logits)


def test_a_first_prompt_has_nothing_in_common_with_anything() -> None:
    plan = engine().prefill(HISTORY)
    assert (plan.matched, plan.cached, plan.source, plan.to_decode) == (0, 0, "none", 300)
    assert told(plan) == "nothing in common with anything known"


def test_the_next_turn_extends_the_live_sequence() -> None:
    e = engine()
    e.prefill(HISTORY)
    e.generate(DIFFERENT[:30])
    plan = e.prefill([*e.state, *range(50)])
    assert (plan.cached, plan.matched, plan.source, plan.checkpoint) == (330, 330, "live", None)
    assert told(plan) == "live sequence extended by 50 tokens"


def test_stripped_thinking_restores_right_before_the_mark() -> None:
    e, chat = engine(), Chat(seed=3)
    for _ in range(4):
        chat.say("user", 20, 100)
        turn = chat.turn()
        plan = e.prefill(turn.prompt, turn.boundaries)
        e.generate(turn.answer)
        assert plan.cached == plan.matched
    assert plan.source == "ram"
    assert (
        told(plan)
        == f"history differs at token {plan.cached:,} of {plan.total:,}; restored at {plan.cached:,} from RAM"
    )


def test_a_regenerated_answer_samples_from_stored_logits() -> None:
    e = engine()
    e.prefill(HISTORY)
    e.generate(DIFFERENT)
    plan = e.prefill(HISTORY)
    assert (plan.cached, plan.to_decode, plan.source) == (300, 0, "ram")
    assert plan.logits is not None
    assert np.array_equal(plan.logits, logits_of(HISTORY))
    assert told(plan) == "exact prompt repeated: sampling from stored logits"


def test_the_same_prompt_at_once_again_uses_the_live_logits() -> None:
    e = engine()
    e.prefill(HISTORY)
    plan = e.prefill(HISTORY)
    assert (plan.cached, plan.source, plan.logits) == (300, "live", None)
    assert told(plan) == "exact prompt repeated: sampling from the live logits"


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
    e, chat = engine(), Chat(seed=5, keep_thinking=True)
    chat.say("user", 50, 100)
    sources = []
    for _ in range(5):
        turn = chat.turn()
        sources.append(e.prefill(turn.prompt, turn.boundaries).source)
        e.generate(turn.answer)
        chat.say("tool", 100, 400)
    assert sources == ["none", "live", "live", "live", "live"]


def test_a_second_chat_with_the_same_system_prompt_is_a_hit_where_state_is_complete() -> None:
    cache = PromptCache(1 << 26)
    one, two = FakeEngine(cache, "recurrent"), FakeEngine(cache, "recurrent")
    one.prefill(HISTORY[:200] + DIFFERENT, [200])
    assert two.prefill(HISTORY[:200] + DIFFERENT[::-1], [200]).cached == 200


def test_without_live_attention_a_checkpoint_does_not_serve() -> None:
    cache = PromptCache(1 << 26)
    store(cache, HISTORY, 200)
    assert plan_for(cache, HISTORY, live_view(DIFFERENT)).cached == 0
    assert plan_for(cache, HISTORY, live_view(HISTORY[:199])).source == "live"
    assert plan_for(cache, HISTORY, live_view(HISTORY[:200] + DIFFERENT)).cached == 200
    assert plan_for(cache, HISTORY, live_view(DIFFERENT, needs_attention=False)).cached == 200


def test_a_checkpoint_at_the_prompts_end_needs_logits() -> None:
    cache = PromptCache(1 << 26)
    store(cache, HISTORY, 120)
    store(cache, HISTORY, 200)
    elsewhere = live_view(HISTORY)
    assert plan_for(cache, HISTORY[:200], elsewhere).cached == 120
    assert plan_for(cache, HISTORY[:201], elsewhere).cached == 200
    store(cache, HISTORY, 200, np.ones(4, np.float32))
    assert plan_for(cache, HISTORY[:200], elsewhere).cached == 200
    store(cache, HISTORY, 200)
    assert plan_for(cache, HISTORY[:200], elsewhere).logits is not None, "logits once known are kept"


def test_a_live_tip_at_the_prompts_end_needs_logits_too() -> None:
    cache = PromptCache(1 << 26)
    store(cache, HISTORY, 120)
    stale = live_view(HISTORY[:200], tip_logits=False)
    assert plan_for(cache, HISTORY[:200], stale).cached == 120
    assert plan_for(cache, HISTORY[:201], stale).cached == 200
    store(cache, HISTORY, 200, np.ones(4, np.float32))
    plan = plan_for(cache, HISTORY[:200], stale)
    assert (plan.cached, plan.source, plan.checkpoint) == (200, "live", None)
    assert plan.logits is not None


@pytest.mark.parametrize(("floor", "cached"), [(0, 150), (150, 150), (151, 0), (300, 0)])
def test_a_live_cut_reaches_down_to_the_floor(floor: int, cached: int) -> None:
    cache = PromptCache(1 << 26)
    view = live_view(HISTORY, cut_floor=floor)
    assert plan_for(cache, HISTORY[:150] + DIFFERENT, view).cached == cached


def test_a_live_cut_leaves_one_token_to_decode() -> None:
    plan = plan_for(PromptCache(1 << 26), HISTORY[:150], live_view(HISTORY, cut_floor=0))
    assert (plan.cached, plan.logits) == (149, None)
    assert told(plan) == "whole prompt known; live sequence cut to 149"


def test_at_equal_depth_the_live_state_is_preferred() -> None:
    cache = PromptCache(1 << 26)
    store(cache, HISTORY, 200)
    plan = plan_for(cache, HISTORY, live_view(HISTORY[:200]))
    assert (plan.cached, plan.source, plan.checkpoint) == (200, "live", None)


def test_nothing_is_reused_beyond_the_limit() -> None:
    cache = PromptCache(1 << 26)
    store(cache, HISTORY, 80)
    store(cache, HISTORY, 200)
    assert plan_for(cache, HISTORY, live_view(HISTORY, reuse_limit=150)).cached == 80
    assert plan_for(cache, HISTORY, live_view(HISTORY, reuse_limit=79)).cached == 0
    assert plan_for(cache, HISTORY, live_view(HISTORY, cut_floor=0, reuse_limit=150)).cached == 150


def test_another_namespace_is_never_matched() -> None:
    cache = PromptCache(1 << 26)
    store(cache, HISTORY, 200)
    plan = plan_for(cache, HISTORY, live_view([0], namespace="other", needs_attention=False))
    assert (plan.matched, plan.cached) == (0, 0)


def test_plain_attention_gets_no_cuts() -> None:
    view = live_view([], needs_checkpoints=False, cut_floor=0)
    assert cuts_of(view) == ()
    assert cuts_of(live_view([])) != ()


def cuts_of(view: LiveView) -> tuple[int, ...]:
    return PromptCache(1 << 26).plan(np.array(HISTORY, np.int32), view, (50, 250), Costs()).cuts


def test_a_remembered_path_tells_where_histories_differ() -> None:
    cache = PromptCache(1 << 26)
    cache.remember("m", np.array(HISTORY, np.int32))
    plan = plan_for(cache, HISTORY[:170] + DIFFERENT, live_view([0]))
    assert (plan.matched, plan.cached) == (170, 0)
    assert (
        told(plan) == "history differs at token 170 of 470; no restore point before it, 170 known tokens lost"
    )


def test_a_dropped_checkpoint_is_not_offered_again() -> None:
    cache = PromptCache(1 << 26)
    store(cache, HISTORY, 200)
    plan = cache.plan(np.array(HISTORY, np.int32), live_view([*HISTORY[:250], 0]), (), Costs())
    assert plan.checkpoint is not None
    cache.drop(plan.checkpoint)
    cache.release(plan)
    cache.drop(plan.checkpoint)
    assert plan_for(cache, HISTORY, live_view([*HISTORY[:250], 0])).cached == 0
    check_integrity(cache)


def test_hits_misses_and_tokens_saved_are_counted() -> None:
    e = engine()
    e.prefill(HISTORY)
    e.prefill(HISTORY + DIFFERENT)
    e.prefill(DIFFERENT)
    stats = e.cache.stats()
    assert (stats.hits, stats.misses, stats.tokens_saved) == (1, 2, 300)


def test_a_miss_names_the_tokens_that_differ() -> None:
    e = engine()
    e.prefill(HISTORY)
    assert e.prefill([*HISTORY[:170], 7, 8]).differs == (7, HISTORY[170])
    assert e.prefill([*HISTORY[:170], 9]).differs in ((9, 7), (9, HISTORY[170]))
    assert e.prefill([*HISTORY[:170], 9, 9]).differs is None
    assert e.prefill(DIFFERENT).differs is None


def test_the_token_named_is_the_one_where_all_that_is_known_ends() -> None:
    cache = PromptCache(1 << 26)
    cache.remember("m", np.array([*HISTORY[:50], 7], np.int32))
    assert plan_for(cache, [*HISTORY[:100], 9], live_view([*HISTORY[:100], 8])).differs == (9, 8)
    cache.remember("m", np.array(HISTORY[:100], np.int32))
    assert plan_for(cache, [*HISTORY[:100], 9], live_view([*HISTORY[:50], *[8] * 100])).differs is None


def test_a_pinned_prefix_outlives_everything_else() -> None:
    cache = PromptCache(20_000)
    one = FakeEngine(cache, "recurrent")
    system = HISTORY[:200]
    one.prefill(system + DIFFERENT[:40], [200])
    assert cache.pin(system) > 0
    for seed in range(40):
        one.prefill([(seed * 37 + i) % 500 + 2000 for i in range(300)])
        check_integrity(cache)
    assert one.prefill(system + DIFFERENT[100:140], [200]).cached == 200
    cache.ram_bytes = 500
    assert one.prefill(system + DIFFERENT[140:180], [200]).cached == 200
    cache.unpin(system)
    one.prefill([(i * 41) % 500 + 3000 for i in range(300)])
    assert one.prefill(system + DIFFERENT[200:240], [200]).cached == 0


def test_checkpoints_taken_later_on_a_pinned_path_are_kept_too() -> None:
    cache = PromptCache(20_000)
    cache.pin(HISTORY[:200])
    one = FakeEngine(cache, "recurrent")
    one.prefill(HISTORY[:200] + DIFFERENT[:40], [200])
    for seed in range(40):
        one.prefill([(seed * 37 + i) % 500 + 2000 for i in range(300)])
    assert one.prefill(HISTORY[:200] + DIFFERENT[100:140], [200]).cached == 200


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_a_forgotten_chat_is_gone_and_the_others_stay(kind: Kind) -> None:
    cache = PromptCache(1 << 26)
    e = FakeEngine(cache, kind)
    system = HISTORY[:100]
    secret, other = system + DIFFERENT[:80], system + DIFFERENT[::-1][:80]
    for chat in (secret, other):
        e.prefill(chat, [100])
        e.generate(list(range(50)))
    e.prefill([5, 6, 7])
    assert cache.forget(secret) > 0
    check_integrity(cache)
    e.prefill([8, 9])
    again = e.prefill(secret, [100])
    assert again.matched == again.cached == 100
    assert e.prefill(other, [100]).cached == len(other)


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_a_prefix_is_forgotten_with_every_chat_that_goes_on_from_it(kind: Kind) -> None:
    cache = PromptCache(1 << 26)
    e = FakeEngine(cache, kind)
    for start in (0, 80, 160):
        e.prefill(HISTORY[:100] + DIFFERENT[start : start + 80], [60, 100])
        e.generate(list(range(40)))
    e.prefill([5, 6, 7])
    cache.forget(HISTORY[:90])
    check_integrity(cache)
    stats = cache.stats()
    assert (stats.extra["tokens"], stats.extra["idle_bytes"]) == (3, 0)
    assert e.prefill(HISTORY).matched == 0


def test_forgetting_what_is_not_known_does_nothing() -> None:
    cache = PromptCache(1 << 26)
    e = FakeEngine(cache, "hybrid")
    e.prefill(HISTORY)
    entries = cache.stats().entries
    cache.forget(DIFFERENT)
    cache.forget([*HISTORY, 1])
    cache.forget([])
    assert cache.stats().entries == entries


@pytest.mark.parametrize(
    ("costs", "source"),
    [
        (Costs(token_seconds=1e-3, prefill_seconds=1e-3, restore_seconds=0.2), "ram"),
        (Costs(token_seconds=1e-3, prefill_seconds=1e-3, restore_seconds=0.4), "live"),
        (Costs(token_seconds=1e-3, prefill_seconds=1e-3, restore_seconds=0.2, segment_seconds=1e-3), "live"),
        (Costs(token_seconds=0.5, prefill_seconds=1e-3, restore_seconds=0.4), "ram"),
        (Costs(restore_seconds=9.0), "ram"),
    ],
)
def test_a_stored_state_is_restored_where_that_is_faster_than_decoding(costs: Costs, source: str) -> None:
    """300 tokens are saved, and attention of as many is loaded; the live sequence could be cut to 60."""
    cache = PromptCache(1 << 20)
    e = FakeEngine(cache, "hybrid")
    e.prefill([*range(60), *HISTORY])
    e.prefill([*range(60), *DIFFERENT])
    view = replace(e.view(), cut_floor=0)
    prompt = np.array([*range(60), *HISTORY, 1], np.int32)
    plan = cache.plan(prompt, view, (), costs)
    cache.release(plan)
    assert plan.source == source
    assert plan.cached == (360 if source == "ram" else 60)
