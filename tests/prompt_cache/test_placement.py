"""Limits of placement: where cuts may lie, how many a suffix gets, when decoding is checkpointed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamahybrid.memory.costs import CostMeter
from llamahybrid.prompt_cache import Costs
from llamahybrid.prompt_cache.base import Outline
from llamahybrid.prompt_cache.ladder import MIN_SPACING
from llamahybrid.prompt_cache.placement import (
    SCARCE,
    SMALL_OF_ALONE,
    cut_tokens,
    final_due,
    next_decode_checkpoint,
    prefill_cuts,
    recut,
)

pytestmark = pytest.mark.usefixtures("measured_costs")

UNMEASURED = Costs()
CHEAP_CUTS = Costs(token_seconds=1e-3, prefill_seconds=1e-3, snapshot_seconds=1e-6)
DEAR_CUTS = Costs(token_seconds=0.1, prefill_seconds=1e-3, snapshot_seconds=0.05)
NO_ENDS = 1 << 20
"""A batch size that no prompt fills."""


def cuts_of(
    total: int, cached: int, matched: int, boundaries: Sequence[int], costs: Costs, **more: Any
) -> tuple[int, ...]:
    return prefill_cuts(Outline(total, cached, matched, tuple(boundaries), **more), costs)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, int, int, list[int]]:
    total = draw(st.integers(1, 40_000))
    cached = draw(st.integers(0, total))
    matched = draw(st.integers(cached, total))
    starts = draw(st.lists(st.integers(1, max(1, total - 1)), max_size=20, unique=True))
    return total, cached, matched, sorted(s for s in starts if s < total)


@given(prompts(), st.sampled_from([UNMEASURED, CHEAP_CUTS, DEAR_CUTS]), st.lists(st.integers(0, 5000)))
def test_cuts_are_ascending_inside_and_apart(
    prompt: tuple[int, int, int, list[int]], costs: Costs, places: list[int]
) -> None:
    total, cached, matched, boundaries = prompt
    growing = tuple(sorted({cached + place for place in places}))
    cuts = cuts_of(total, cached, matched, boundaries, costs, growing=growing)
    assert all(cached < c < total for c in cuts)
    assert all(b - a >= MIN_SPACING for a, b in zip((cached, *cuts), cuts, strict=False))
    assert cuts == cuts_of(total, cached, matched, boundaries, costs, growing=growing)


@given(prompts(), st.integers(0, 6))
def test_no_more_cuts_than_there_is_room_for(prompt: tuple[int, int, int, list[int]], most: int) -> None:
    for parted in (False, True):
        assert len(cuts_of(*prompt, CHEAP_CUTS, most=most, parted=parted)) <= most


def test_short_first_prompt_keeps_its_system_prompt() -> None:
    assert cuts_of(80, 0, 0, (56, 74), UNMEASURED) == (56, 74)
    assert cuts_of(80, 56, 56, (56, 66, 76), UNMEASURED) == (76,)
    assert len(cuts_of(80, 0, 0, (56, 74), DEAR_CUTS)) < 2  # no checkpoint there would ever pay


@given(prompts())
def test_every_cut_is_the_branch_a_boundary_or_on_a_grid(prompt: tuple[int, int, int, list[int]]) -> None:
    total, cached, matched, boundaries = prompt
    for cut in cuts_of(total, cached, matched, boundaries, UNMEASURED):
        assert cut in boundaries or cut == matched or cut % MIN_SPACING == 0


@given(prompts(), st.sampled_from([CHEAP_CUTS, DEAR_CUTS]), st.data())
def test_late_decisions_are_those_of_somebody_who_knew(
    prompt: tuple[int, int, int, list[int]], costs: Costs, data: st.DataObject
) -> None:
    """Costs that turn up on the way give the cuts still to come, and none that is passed or too near one."""
    total, cached, matched, boundaries = prompt
    outline = Outline(total, cached, matched, tuple(boundaries))
    position = data.draw(st.integers(cached, total))
    last = data.draw(st.integers(cached, position))
    late = recut(outline, position, costs, last)
    cuts = prefill_cuts(outline, costs)
    assert set(late) == {c for c in cuts if c > position and c - last >= MIN_SPACING}


@pytest.mark.parametrize(
    ("left", "costs", "most"),
    [
        (7, CHEAP_CUTS, 0),
        (40, UNMEASURED, 1),
        (127, UNMEASURED, 1),
        (255, UNMEASURED, 5),
        (255, DEAR_CUTS, 1),
        (256, DEAR_CUTS, 2),
        (999, DEAR_CUTS, 3),
        (1000, UNMEASURED, 5),
        (3000, UNMEASURED, 15),
        (3000, DEAR_CUTS, 1),
        (3000, CHEAP_CUTS, 24),
    ],
)
def test_cuts_are_charged_by_suffix_length(left: int, costs: Costs, most: int) -> None:
    """On a prompt with many message starts, no more cuts than the suffix can pay for."""
    cuts = cuts_of(5000 + left, 5000, 5000, range(20, 5000 + left, 20), replace(costs, batch_tokens=NO_ENDS))
    assert len(cuts) <= most
    assert bool(cuts) == bool(most)


@given(
    st.integers(1000, 40_000),
    st.floats(1e-5, 1e-2),
    st.floats(1, 60),
    st.just(0.0) | st.floats(1e-3, 40),
    st.booleans(),
)
def test_measured_cuts_stay_within_three_percent(
    left: int, prefill: float, token: float, snapshot: float, marked: bool
) -> None:
    """From 1,000 tokens on; a single cut is taken whatever it costs, so is the system prompt's end."""
    costs = Costs(token * prefill, prefill, snapshot * prefill, batch_tokens=NO_ENDS)
    cuts = cuts_of(left, 0, 0, range(50, left, 50) if marked else (), costs)
    assert len(cuts) <= 1 + marked or len(cuts) * cut_tokens(costs) <= 0.03 * left


def test_a_short_turn_cuts_before_the_thinking_mark() -> None:
    assert cuts_of(220, 100, 100, [120, 215, 218], UNMEASURED)[-1] == 218


def test_a_short_turn_without_boundaries_cuts_near_its_end_on_the_grid() -> None:
    assert cuts_of(221, 100, 101, [], UNMEASURED) == (192,)


def test_a_turn_of_a_history_that_only_grew_has_few_cuts() -> None:
    """The longer it grew, the less likely is it that a later history parts inside this turn."""
    costs = replace(CHEAP_CUTS, batch_tokens=NO_ENDS)
    numbers = [len(cuts_of(1100, 100, 100, [], costs, chance=1 / n)) for n in (1, 2, 4, 8, 16, 32)]
    assert numbers == sorted(numbers, reverse=True)
    assert (numbers[0], numbers[-1]) == (20, 0)
    assert cuts_of(221, 100, 100, [], UNMEASURED, chance=1 / 6) == ()
    assert cuts_of(1100, 100, 500, [], CHEAP_CUTS, chance=1 / 32), "a history parted inside it before"
    assert cuts_of(100, 0, 0, [], UNMEASURED), "of a first prompt nothing is known"


def test_another_text_behind_a_shared_one_is_cut_while_it_may_go_on() -> None:
    """Half of a text that goes on is worth two cuts, in the mean."""
    costs = Costs(token_seconds=1e-2, prefill_seconds=1e-3, batch_seconds=9e-3, snapshot_seconds=1e-3)
    assert cuts_of(1000 + 99, 1000, 1000, [], costs, parted=True, chance=0.2) == ()
    assert len(cuts_of(1000 + 100, 1000, 1000, [], costs, parted=True, chance=0.2)) == 1
    assert cuts_of(1000 + 100, 1000, 1000, [], costs, chance=0.2) == ()


def test_a_short_turn_cuts_where_the_last_prompt_was_left() -> None:
    assert cuts_of(221, 100, 100, [], UNMEASURED, growing=(208,)) == (208,)
    assert cuts_of(221, 100, 100, [], UNMEASURED, growing=(208,), chance=1 / 6) == (208,)
    assert cuts_of(221, 100, 100, [218], UNMEASURED, growing=(208,)) == (208, 218), "one more than without"
    assert cuts_of(126, 8, 8, [60, 118], UNMEASURED, growing=(60,)) == (60, 118), "the last start stays"
    assert cuts_of(221, 100, 100, [218], UNMEASURED, growing=(212,)) == (212,), "histories lack what follows"
    assert cuts_of(321, 0, 0, [300, 318], CHEAP_CUTS, growing=(250,)) == (64, 250, 300, 318)
    assert cuts_of(221, 100, 100, [214], UNMEASURED, growing=(220,)) == (214,), "which serves both"
    assert 155 not in cuts_of(321, 0, 0, [150, 300], CHEAP_CUTS, growing=(155,)), "the start serves both, too"
    assert cuts_of(221, 100, 100, [214, 218], UNMEASURED, growing=(218,)) == (218,)


def test_the_same_divergence_costs_only_once() -> None:
    """A prompt restored before the place where histories part keeps that place, however short it is."""
    assert 140 in cuts_of(180, 100, 140, [], DEAR_CUTS)
    assert 103 in cuts_of(180, 100, 103, [], DEAR_CUTS, parted=True)
    assert 103 not in cuts_of(180, 100, 103, [], DEAR_CUTS)


def test_a_long_prompt_keeps_the_system_prompt_the_branch_and_the_last_messages() -> None:
    cuts = cuts_of(3000, 0, 900, [212, 1500, 2700, 2995], UNMEASURED)
    assert {212, 900, 1500, 2700, 2995} <= set(cuts)


def test_batch_ends_are_free_but_few() -> None:
    cuts = cuts_of(100_000, 0, 0, [], DEAR_CUTS)
    free = [c for c in cuts if c % 512 == 0]
    assert 5 <= len(free) <= 24
    assert cuts_of(100_000, 99_500, 99_500, [], DEAR_CUTS) != ()


GPU = Costs(token_seconds=1e-3, prefill_seconds=2e-5, snapshot_seconds=3e-3, batch_seconds=6e-3)
"""A model of 100M parameters on an H200, by hand: a cut takes as long as 450 tokens of a prompt."""


def test_cuts_take_no_longer_than_their_prompt() -> None:
    starts = [40, 200, 300, 380]
    assert cuts_of(400, 0, 0, starts, replace(GPU, waiting=1)) == cuts_of(400, 0, 0, starts, GPU) == ()
    assert cuts_of(400, 0, 0, [], GPU) == ()
    assert len(cuts_of(800, 0, 0, [*starts, 780], GPU)) == 1


def test_snapshots_at_batch_ends_take_a_share_of_the_prefill() -> None:
    """Each takes as long as 150 tokens: of 4,000 tokens 200 may be spent."""
    assert sum(c % 512 == 0 for c in cuts_of(4000, 0, 0, [], GPU)) == 1
    most = 13
    assert most - 3 <= sum(c % 512 == 0 for c in cuts_of(40_000, 0, 0, [], GPU)) <= most
    assert sum(c % 512 == 0 for c in cuts_of(40_000, 0, 0, [], replace(GPU, snapshot_seconds=0.0))) > most


NOISE = 0.3


@pytest.mark.parametrize(
    ("token", "prefill", "snapshot"),
    [
        pytest.param(3e-4, 1e-5, 6e-5, id="tiny"),
        pytest.param(19e-3, 4.4e-3, 1e-3, id="100M on a CPU"),
        pytest.param(0.2, 0.03, 0.03, id="27B on a CPU"),
        pytest.param(25e-3, 1e-3, 15e-3, id="27B on a GPU"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_decisions_do_not_swing_with_the_clock(
    token: float, prefill: float, snapshot: float, seed: int
) -> None:
    """Samples 30 % off either way, and many far slower: what was decided once is decided again."""
    rng = random.Random(seed)
    meter = CostMeter(512)

    def noisy(seconds: float) -> float:
        return seconds * rng.uniform(1 - NOISE, 1 + NOISE) * (5 if rng.random() < 0.2 else 1)

    def decisions() -> list[object]:
        costs = meter.costs()
        cuts = [cuts_of(n, 0, 0, [], costs) for n in (100, 300, 1200, 5000)]
        return [*cuts, next_decode_checkpoint(1003, 1003, costs), final_due(20, costs)]

    for _ in range(15):
        meter.decoded(1, noisy(token))
        meter.decoded(512, 512 * noisy(prefill))
        meter.saved(1, noisy(snapshot))
    first = decisions()
    for _ in range(200):
        meter.decoded(1, noisy(token))
        meter.decoded(512, 512 * noisy(prefill))
        meter.saved(1, noisy(snapshot))
        assert decisions() == first


@pytest.mark.parametrize(("waiting", "most"), [(0, 10), (1, 5), (2, 3), (3, 2), (7, 1)])
def test_a_cut_is_paid_for_by_all_whom_it_keeps_waiting(waiting: int, most: int) -> None:
    """A cut takes as long as 4 tokens of 2,000."""
    costs = Costs(token_seconds=4e-3, prefill_seconds=1e-3, batch_seconds=3e-3, snapshot_seconds=1e-3)
    costs = replace(costs, batch_tokens=NO_ENDS)
    assert len(cuts_of(2000, 0, 0, [], replace(costs, waiting=waiting))) == most


def test_a_short_prompt_spends_none_of_others_time_on_cuts() -> None:
    """19 % of 500 tokens are worth it alone; others who wait have nothing of what a cut saves this one."""
    assert len(cuts_of(500, 0, 0, [], DEAR_CUTS)) == 3
    assert cuts_of(500, 0, 0, [], replace(DEAR_CUTS, waiting=1)) == ()
    assert cuts_of(500, 0, 0, [], replace(UNMEASURED, waiting=3)) == ()


def test_the_last_parting_point_is_cut_while_others_wait() -> None:
    costs = replace(DEAR_CUTS, waiting=7)
    assert cuts_of(500, 0, 0, [], costs, growing=(410,)) == (410,)
    assert cuts_of(500, 0, 0, [], costs, growing=(410,), most=0) == ()


def test_message_starts_are_cut_while_others_wait() -> None:
    starts = [40, 500, 560]
    alone = cuts_of(600, 0, 0, starts, DEAR_CUTS)
    assert alone
    assert cuts_of(600, 0, 0, starts, replace(DEAR_CUTS, waiting=7)) == alone


def _decode_checkpoints(answer: int, frontier: int, costs: Costs) -> list[int]:
    at = [frontier]
    while at[-1] < frontier + answer:
        at.append(next_decode_checkpoint(at[-1], frontier, costs))
    return at


@given(frontier=st.integers(0, 5000))
def test_decoding_is_checkpointed_at_least_by_the_schedule(frontier: int) -> None:
    at = _decode_checkpoints(6000, frontier, UNMEASURED)
    for a, b in pairwise(at):
        generated = a - frontier
        assert 0 < b - a <= (64 if generated < 512 else 256 if generated < 2048 else 1024)


@given(frontier=st.integers(0, 5000), micros=st.integers(1001, 5000))
def test_snapshots_take_about_one_percent_beyond_the_schedule(frontier: int, micros: int) -> None:
    """Gaps are the nearest powers of two, so the share may be 1.42 %; kilobytes cost nothing to speak of."""
    costs = Costs(token_seconds=1e-2, snapshot_seconds=micros * 1e-6)
    extra = set(_decode_checkpoints(3000, frontier, costs)[1:-1])
    schedule = set(_decode_checkpoints(3000, frontier, UNMEASURED)[1:-1])
    # One more than whole gaps fit, because the grid is absolute.
    share = (len(extra) - 1) * costs.snapshot_seconds / (3000 * costs.token_seconds)
    assert extra == schedule or share <= 0.0142
    assert schedule <= extra


@pytest.mark.parametrize(("together", "gap"), [(1, 256), (4, 512), (8, 1024)])
def test_snapshots_of_a_gpu_are_farther_apart(together: int, gap: int) -> None:
    """Every 64 tokens they took 5 % of an answer's time; a prompt's tokens are decoded 50 times as fast."""
    assert next_decode_checkpoint(2048, 2048, GPU, together) == 2048 + gap
    slow = replace(GPU, prefill_seconds=5e-4)  # more than 128 tokens again would take longer than 64 singly
    assert next_decode_checkpoint(2048, 2048, slow, together) == 2048 + 128
    unmeasured = replace(GPU, prefill_seconds=0.0)
    assert next_decode_checkpoint(2048, 2048, unmeasured, together) == 2048 + 64


def test_a_snapshot_of_microseconds_is_taken_whatever_a_token_takes() -> None:
    """On a tiny model its share of decode time hovers about the bound: the gap must not hover with it."""
    for micros in (5, 60, 300, 1000):
        costs = Costs(token_seconds=3e-4, snapshot_seconds=micros * 1e-6)
        assert next_decode_checkpoint(1003, 1003, costs) == 1008
        assert next_decode_checkpoint(1008, 1003, costs) == 1024


def test_answers_that_are_decoded_together_have_no_more_checkpoints_than_the_schedule_has() -> None:
    """An answer may spend the rest of its own share of time, not the time of answers that wait for it."""
    costs = Costs(token_seconds=1e-2, snapshot_seconds=1.6e-3)
    gaps = {n: next_decode_checkpoint(1024, 1000, costs, n) - 1024 for n in (1, 2, 4, 8)}
    assert gaps == {1: 16, 2: 64, 4: 64, 8: 64}
    costs = replace(costs, snapshot_seconds=2e-4)  # nobody notices it alone, and each waits for those of all
    gaps = {n: next_decode_checkpoint(1024, 1000, costs, n) - 1024 for n in (1, 5, 8)}
    assert gaps == {1: 16, 5: 16, 8: 64}


@given(frontier=st.integers(0, 5000), together=st.integers(2, 8))
def test_of_answers_that_are_decoded_together_none_is_less_than_half_a_gap_behind_the_last(
    frontier: int, together: int
) -> None:
    """A prompt's end, which has one, lies anywhere between two places of the grid."""
    costs = Costs(token_seconds=1e-2, snapshot_seconds=1.6e-3)
    at = [frontier]
    while at[-1] < frontier + 4000:
        at.append(next_decode_checkpoint(at[-1], frontier, costs, together))
    for a, b in pairwise(at):
        gap = 64 if a - frontier < 512 else 256 if a - frontier < 2048 else 1024
        assert gap / 2 <= b - a < 1.5 * gap
        assert b % gap == 0
    free = replace(costs, snapshot_seconds=1e-5)
    assert next_decode_checkpoint(1023, 1000, free, together) == 1024, "what takes no time may be near"


def test_an_answers_end_is_kept_from_64_tokens_or_where_it_is_cheap() -> None:
    assert (final_due(63, UNMEASURED), final_due(64, UNMEASURED)) == (False, True)
    cheap = Costs(token_seconds=1e-2, snapshot_seconds=1e-4)
    dear = Costs(token_seconds=1e-2, snapshot_seconds=1.0)
    assert (final_due(1, cheap), final_due(0, cheap)) == (True, False)
    assert (final_due(63, dear), final_due(64, dear)) == (False, True)


def test_a_single_token_stands_in_for_a_cut_until_small_batches_were_measured() -> None:
    costs = Costs(token_seconds=21e-3, prefill_seconds=1e-3)
    assert cut_tokens(costs) == pytest.approx(SMALL_OF_ALONE * 20)
    assert SMALL_OF_ALONE < 1, "it reads all weights, too, and has nothing else to do"
    assert cut_tokens(replace(costs, batch_seconds=3e-3)) == cut_tokens(costs), "large ones were held up"
    assert cut_tokens(replace(costs, batch_seconds=23e-3, snapshot_seconds=1e-3)) == pytest.approx(24)


def test_only_message_starts_are_cut_in_a_scarce_budget() -> None:
    marked = Outline(5000, 0, 0, (600, 4000, 4900), most=SCARCE - 1)
    assert prefill_cuts(marked, Costs()) == (600, 4000, 4900)
    assert len(prefill_cuts(replace(marked, most=SCARCE), Costs())) > 3
    assert len(prefill_cuts(replace(marked, boundaries=()), Costs())) > 3


def test_the_system_prompts_end_is_cut_however_many_messages_follow() -> None:
    for total in (600, 3000):
        starts = range(120, total, 60)
        assert 120 in cuts_of(total, 0, 0, starts, UNMEASURED)
        assert {120, starts[-1]} <= {*cuts_of(total, 0, 0, starts, DEAR_CUTS)}
        assert 120 in cuts_of(total, 0, 0, [0, *starts, total], UNMEASURED), "the ends are no starts"
    dear = replace(DEAR_CUTS, batch_tokens=NO_ENDS)
    assert cuts_of(3000, 0, 0, range(120, 3000, 60), dear) == (120, 2940), "where cuts are dear, these two"
    assert cuts_of(3000, 60, 60, range(120, 3000, 60), dear) == (2940,), "of a first prompt"
