"""Plans of requests: the live sequence and checkpoints in RAM."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from llamahybrid.prompt_cache import Costs, LiveView, Plan, PromptCache
from llamahybrid.prompt_cache.base import Logits, Reason
from tests.lab.fake_engine import FakeEngine
from tests.lab.integrity import check_integrity

from .test_scenarios import DIFFERENT, HISTORY


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


def store(cache: PromptCache, tokens: Sequence[int], position: int, logits: Logits | None = None) -> None:
    cache.admit(live_view(tokens), position, cache.buffer(64), logits)


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
    assert (plan.cached, plan.matched, plan.logits, plan.reason) == (149, 150, None, Reason("known"))


def test_at_equal_depth_the_live_state_is_preferred() -> None:
    cache = PromptCache(1 << 26)
    store(cache, HISTORY, 200)
    plan = plan_for(cache, HISTORY, live_view(HISTORY[:200]))
    assert (plan.cached, plan.source, plan.checkpoint) == (200, "live", None)


def test_no_restore_point_beyond_the_reuse_limit_serves() -> None:
    cache = PromptCache(1 << 26)
    store(cache, HISTORY, 80)
    store(cache, HISTORY, 200)
    assert plan_for(cache, HISTORY, live_view(HISTORY, reuse_limit=150)).cached == 80
    assert plan_for(cache, HISTORY, live_view(HISTORY, reuse_limit=79)).cached == 0
    assert plan_for(cache, HISTORY, live_view(HISTORY, cut_floor=0, reuse_limit=150)).cached == 150


def test_plain_attention_gets_no_cuts() -> None:
    view = live_view([], needs_checkpoints=False, cut_floor=0)
    for each, cut in ((view, False), (live_view([]), True)):
        plan = PromptCache(1 << 26).plan(np.array(HISTORY, np.int32), each, (50, 250), Costs())
        assert bool(plan.cuts) == cut


def test_the_token_named_is_the_one_where_all_that_is_known_ends() -> None:
    cache = PromptCache(1 << 26)
    cache.remember("m", np.array([*HISTORY[:50], 7], np.int32))
    assert plan_for(cache, [*HISTORY[:100], 9], live_view([*HISTORY[:100], 8])).differs == (9, 8)
    cache.remember("m", np.array(HISTORY[:100], np.int32))
    assert plan_for(cache, [*HISTORY[:100], 9], live_view([*HISTORY[:50], *[8] * 100])).differs is None


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


def test_histories_part_at_what_is_matched_only_if_the_tree_reaches_that_far() -> None:
    cache = PromptCache(1 << 26)
    for token in (7, 8):
        cache.remember("m", np.array([*HISTORY[:50], token], np.int32))
    for live, matched, parted in (([0], 50, True), (HISTORY[:100], 100, False)):
        outline = plan_for(cache, [*HISTORY[:matched], *DIFFERENT], live_view(live)).outline
        assert outline is not None
        assert (outline.matched, outline.parted) == (matched, parted)


def chance(plan: Plan) -> float:
    """Return the chance that a later history parts inside what is new of this prompt."""
    assert plan.outline is not None
    return plan.outline.chance


def test_questions_that_nobody_went_on_from_make_the_next_ones_unlikely_to_go_on() -> None:
    e = FakeEngine(PromptCache(1 << 26), "recurrent", "m")
    asked = [chance(e.prefill([*HISTORY, 1000 + n, *DIFFERENT[:20]])) for n in range(5)]
    assert asked == [1, 1, 1 / 4, 1 / 5, 1 / 6]
    e.generate([1, 2, 3])
    e.prefill([*e.state, *DIFFERENT[:9]])
    assert chance(e.prefill([*HISTORY, 2000, *DIFFERENT[:20]])) == 2 / 7


def test_a_history_that_grew_is_unlikely_to_part_in_its_next_turn() -> None:
    e = FakeEngine(PromptCache(1 << 26), "recurrent", "m")
    turns = list[float]()
    for n in range(4):
        turns.append(chance(e.prefill([*e.state, 1000 + n, *HISTORY[:50]])))
        e.generate(DIFFERENT[:40])
    assert turns == [1, 1 / 3, 1 / 4, 1 / 5]
    edited = e.state[:-60]
    assert chance(e.prefill([*edited, 3000, *HISTORY[:50]])) == 1
    assert chance(e.prefill([*e.state, 4000, *HISTORY[:50]])) == 2 / 7


def test_a_history_that_often_parted_is_cut_like_a_first_prompt_at_most() -> None:
    e = FakeEngine(PromptCache(1 << 26), "recurrent", "m")
    e.prefill(HISTORY)
    for n in range(20, 180, 20):
        e.prefill([*HISTORY[:n], 5000 + n, *DIFFERENT[:9]])
    assert chance(e.prefill([*HISTORY, 1, *DIFFERENT[:20]])) == 1
    ends = e.cache.look(lambda store: store.tree.match("m", np.array(HISTORY, np.int32)).turns(len(HISTORY)))
    assert ends == 0, "no other prompt ended on its path"


def test_of_two_answers_at_once_the_one_that_ended_last_is_what_a_prompt_differs_from() -> None:
    cache = PromptCache(1 << 26)
    one, other = (FakeEngine(cache, "recurrent", "m") for _ in range(2))
    other.prefill([*HISTORY, 5, *DIFFERENT])
    one.prefill([*HISTORY, 6, *DIFFERENT])
    assert plan_for(cache, [*HISTORY, 8, 9], live_view([0])).differs == (8, 6)


def test_of_live_tokens_that_no_history_has_nothing_is_known() -> None:
    cache = PromptCache(1 << 26)
    FakeEngine(cache, "recurrent", "m").prefill(HISTORY)
    assert chance(plan_for(cache, [*HISTORY, *DIFFERENT], live_view(HISTORY))) == 1 / 3
    assert chance(plan_for(cache, [*HISTORY, 5, *DIFFERENT], live_view([*HISTORY, 5]))) == 1


ENDING = list(range(30_000, 30_200))
"""Instructions of a client behind a growing text."""


def growing(cache: PromptCache, prompt: Sequence[int]) -> tuple[int, ...]:
    """Return the places at which prompts like this one grew, of its plan."""
    outline = plan_for(cache, prompt, live_view([0], needs_attention=False)).outline
    assert outline is not None
    return outline.growing


def grown(cache: PromptCache, ending: Sequence[int]) -> None:
    """A prompt is answered, and one follows that has more before the same ending."""
    e = FakeEngine(cache, "recurrent", "m")
    e.prefill([*HISTORY, *ending])
    e.generate(DIFFERENT[:30])
    assert growing(cache, [*HISTORY, *DIFFERENT, *ending]) == (len(HISTORY) + len(DIFFERENT),)


@pytest.mark.parametrize("length", [3, 8, 9, 200])
def test_prompts_that_end_as_one_that_grew_are_cut_before_their_ending(length: int) -> None:
    cache, ending = PromptCache(1 << 26), ENDING[:length]
    grown(cache, ending)
    other = DIFFERENT[::-1]
    assert growing(cache, [*other, *ending]) == (len(other),), "of another conversation, too"
    assert growing(cache, [*other, *ending, 9]) == ((len(other),) if length > 8 else ()), "only at the end"
    assert growing(cache, other) == ()


def test_a_prompt_with_several_texts_that_others_grew_before_is_cut_at_each() -> None:
    cache = PromptCache(1 << 26)
    e = FakeEngine(cache, "recurrent", "m")
    for start in (100, 50):
        text = [*HISTORY[start:], *ENDING[start : start + 50]]
        e.prefill(text)
        growing(cache, [*HISTORY[start:], *DIFFERENT, *text[-50:]])
    assert growing(cache, [1, *ENDING[50:150]]) == (1, 51)


def test_an_edit_that_replaces_text_is_no_growth() -> None:
    cache = PromptCache(1 << 26)
    FakeEngine(cache, "recurrent", "m").prefill([*HISTORY, *ENDING])
    assert growing(cache, [*HISTORY, *DIFFERENT, *ENDING[1:]]) == ()


def test_a_text_is_found_between_tokens_alone() -> None:
    """Bytes of tokens contain those of others, shifted."""
    text = [0x01010101] * 3 + [7] * 5
    shifted = np.array([0, *text, 0], "<i4").tobytes()
    cache = PromptCache(1 << 26)
    FakeEngine(cache, "recurrent", "m").prefill([*HISTORY, *text, *ENDING])
    grown_to = [*HISTORY, *DIFFERENT, *text, *ENDING]
    assert growing(cache, grown_to) == (len(HISTORY) + len(DIFFERENT),)
    for by in (1, 2, 3):
        bits = np.frombuffer(shifted[by : by - 4], "<i4").tolist()
        assert growing(cache, [*DIFFERENT, *bits, 9]) == ()
        assert growing(cache, [*DIFFERENT, *text, *bits]) == (len(DIFFERENT),)


def test_forgetting_a_prompt_forgets_the_texts_that_moved() -> None:
    cache = PromptCache(1 << 26)
    grown(cache, ENDING)
    cache.forget(np.array(HISTORY, np.int32))
    assert growing(cache, [*DIFFERENT[::-1], *ENDING]) == ()


def test_attention_that_a_plan_names_counts_until_it_is_released() -> None:
    cache = PromptCache(1 << 26)
    engine = FakeEngine(cache, "paged")
    engine.request(HISTORY)
    engine.request([7] * 30)
    plan = cache.plan(np.array([*HISTORY[:120], 9], np.int32), engine.view(), (), Costs())
    assert (plan.cached, plan.source, plan.checkpoint) == (120, "ram", None)
    cache.ram_bytes = 0
    assert cache.stats().bytes_ram >= sum(s.nbytes for s in plan.segments) > 0
    check_integrity(cache)
    cache.release(plan)
    assert cache.stats().bytes_ram == 0


class Chat:
    """A chat of a template, turn by turn: three tokens ask for each answer; is the prompt cut there?"""

    ASK = (1, 2, 3)

    def __init__(self, cache: PromptCache) -> None:
        self._engine = FakeEngine(cache, "hybrid")
        self._history = list(HISTORY)
        self._words = itertools.count(10_000)

    def turn(self, *, stripped: bool = False) -> bool:
        """Play a turn; `stripped`: its history lacks the tokens that asked and the answer's beginning."""
        self._history += itertools.islice(self._words, 40)
        asks, answer = len(self._history), list(itertools.islice(self._words, 30))
        plan = self._engine.request([*self._history, *self.ASK], [asks], answer)
        self._history += answer[20:] if stripped else [*self.ASK, *answer]
        return asks in plan.cuts


def test_a_chat_that_keeps_what_asked_for_its_answers_is_soon_not_cut_there() -> None:
    chat = Chat(PromptCache(1 << 26))
    assert [chat.turn() for _ in range(6)] == [True, True, False, False, False, False]


def test_a_chat_whose_thinking_is_stripped_is_cut_before_each_answer() -> None:
    chat = Chat(PromptCache(1 << 26))
    assert all(chat.turn(stripped=True) for _ in range(6))


def test_a_history_that_once_parted_inside_what_asked_is_cut_there_from_then_on() -> None:
    chat = Chat(PromptCache(1 << 26))
    assert [chat.turn(stripped=turn == 4) for turn in range(5)][-1] is False
    assert all(chat.turn() for _ in range(6)), "tool calls keep their thinking until the user asks again"
