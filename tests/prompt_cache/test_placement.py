"""Limits of placement: where cuts may lie, how many a suffix gets, when decoding is checkpointed."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamahybrid.prompt_cache import Costs, final_due, next_decode_checkpoint, placement
from llamahybrid.prompt_cache.placement import MIN_SPACING, prefill_cuts

UNMEASURED = Costs()
CHEAP_CUTS = Costs(token_seconds=1e-3, prefill_seconds=1e-3, snapshot_seconds=1e-6)
DEAR_CUTS = Costs(token_seconds=1.0, prefill_seconds=1e-3, snapshot_seconds=1.0)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, int, int, list[int]]:
    total = draw(st.integers(1, 12_000))
    cached = draw(st.integers(0, total))
    matched = draw(st.integers(cached, total))
    starts = draw(st.lists(st.integers(1, max(1, total - 1)), max_size=20, unique=True))
    return total, cached, matched, sorted(s for s in starts if s < total)


@given(prompts(), st.sampled_from([UNMEASURED, CHEAP_CUTS, DEAR_CUTS]))
def test_cuts_are_ascending_inside_and_apart(prompt: tuple[int, int, int, list[int]], costs: Costs) -> None:
    total, cached, matched, boundaries = prompt
    cuts = prefill_cuts(total, cached, matched, boundaries, costs)
    assert all(cached < c < total for c in cuts)
    assert all(b - a >= MIN_SPACING for a, b in zip((cached, *cuts), cuts, strict=False))
    assert cuts == prefill_cuts(total, cached, matched, boundaries, costs)


@given(prompts())
def test_every_cut_is_the_branch_a_boundary_or_on_a_grid(prompt: tuple[int, int, int, list[int]]) -> None:
    total, cached, matched, boundaries = prompt
    for cut in prefill_cuts(total, cached, matched, boundaries, UNMEASURED):
        assert cut in boundaries or cut == matched or cut % (16 if boundaries else 8) == 0


@given(prompts(), st.data())
def test_a_warm_prefill_cuts_where_a_cold_one_might(
    prompt: tuple[int, int, int, list[int]], data: st.DataObject
) -> None:
    """Cold or warm, cuts come from the same positions, so that equal prompts get equal bits."""
    total, cached, _, boundaries = prompt
    with_room = Costs(
        token_seconds=1e-9, prefill_seconds=1.0, batch_tokens=data.draw(st.sampled_from([64, 512]))
    )
    possible = set(placement._candidates(total, 0, boundaries)) | set(placement._batch_ends(total, with_room))
    assert set(prefill_cuts(total, cached, cached, boundaries, with_room)) <= possible
    assert set(prefill_cuts(total, 0, 0, boundaries, with_room)) <= possible


@pytest.mark.parametrize(
    ("left", "costs", "most"),
    [
        (7, CHEAP_CUTS, 0),
        (40, UNMEASURED, 1),
        (127, UNMEASURED, 1),
        (255, UNMEASURED, 2),
        (255, CHEAP_CUTS, 2),
        (255, DEAR_CUTS, 1),
        (256, UNMEASURED, 3),
        (999, DEAR_CUTS, 3),
        (1000, UNMEASURED, 2),
        (3000, UNMEASURED, 6),
        (3000, DEAR_CUTS, 1),
        (3000, CHEAP_CUTS, 12),
    ],
)
def test_cuts_are_charged_by_suffix_length(left: int, costs: Costs, most: int) -> None:
    """On a prompt with many message starts, exactly as many cuts as the suffix can pay for."""
    whole_in_a_batch = Costs(
        costs.token_seconds, costs.prefill_seconds, costs.snapshot_seconds, batch_tokens=1 << 20
    )
    total = 5000 + left
    boundaries = range(20, total, 20)
    assert len(prefill_cuts(total, 5000, 5000, boundaries, whole_in_a_batch)) == most


def test_measured_cuts_stay_within_three_percent() -> None:
    costs = Costs(token_seconds=6e-3, prefill_seconds=7.5e-4, snapshot_seconds=1e-4, batch_tokens=1 << 20)
    for left in (1200, 2000, 4000, 9000):
        extra = len(prefill_cuts(left, 0, 0, range(50, left, 50), costs)) * 6.1e-3
        assert 0 < extra <= 0.03 * left * costs.prefill_seconds


def test_a_short_turn_cuts_before_the_thinking_mark() -> None:
    assert prefill_cuts(220, 100, 100, [120, 215, 218], UNMEASURED) == (218,)


def test_a_short_turn_without_boundaries_cuts_near_its_end_on_the_grid() -> None:
    assert prefill_cuts(221, 100, 100, [], UNMEASURED) == (216,)


def test_a_long_prompt_keeps_the_system_prompt_the_branch_and_the_last_messages() -> None:
    cuts = prefill_cuts(3000, 0, 900, [212, 1500, 2700, 2995], UNMEASURED)
    assert {212, 900, 1500, 2700, 2995} <= set(cuts)


def test_batch_ends_are_free_but_few() -> None:
    cuts = prefill_cuts(100_000, 0, 0, [], DEAR_CUTS)
    free = [c for c in cuts if c % 512 == 0]
    assert 5 <= len(free) <= 12
    assert len(cuts) - len(free) <= 1
    assert prefill_cuts(100_000, 99_500, 99_500, [], DEAR_CUTS) != ()


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


@given(frontier=st.integers(0, 5000), micros=st.integers(1, 5000))
def test_snapshots_take_at_most_one_percent_beyond_the_schedule(frontier: int, micros: int) -> None:
    costs = Costs(token_seconds=1e-2, snapshot_seconds=micros * 1e-6)
    extra = set(_decode_checkpoints(3000, frontier, costs)[1:-1])
    schedule = set(_decode_checkpoints(3000, frontier, UNMEASURED)[1:-1])
    # One more than whole gaps fit, because the grid is absolute.
    assert extra == schedule or (len(extra) - 1) * costs.snapshot_seconds <= 0.01 * 3000 * costs.token_seconds
    assert schedule <= extra


def test_cheap_snapshots_come_every_sixteen_tokens_on_the_grid() -> None:
    costs = Costs(token_seconds=1e-2, snapshot_seconds=1e-5)
    assert next_decode_checkpoint(1003, 1003, costs) == 1008
    assert next_decode_checkpoint(1008, 1003, costs) == 1024


def test_an_answers_end_is_kept_from_64_tokens_or_where_it_is_cheap() -> None:
    assert (final_due(63), final_due(64)) == (False, True)
    cheap = Costs(token_seconds=1e-2, snapshot_seconds=1e-4)
    dear = Costs(token_seconds=1e-2, snapshot_seconds=1.0)
    assert (final_due(1, cheap), final_due(0, cheap)) == (True, False)
    assert (final_due(63, dear), final_due(64, dear)) == (False, True)


def test_the_system_prompts_end_is_cut_however_many_messages_follow() -> None:
    for total in (600, 3000):
        starts = range(120, total, 60)
        assert 120 in prefill_cuts(total, 0, 0, starts, UNMEASURED)
        assert 120 in prefill_cuts(total, 0, 0, [0, *starts, total], UNMEASURED), "the ends are no starts"


def test_a_turn_behind_the_live_tip_is_worth_a_checkpoint_there():
    assert placement.tip_due(placement.MIN_SPACING)
    assert not placement.tip_due(placement.MIN_SPACING - 1)


def test_a_very_short_suffix_has_one_cut_however_cheap():
    assert len(placement.prefill_cuts(227, 100, 100, [110, 150, 190], CHEAP_CUTS)) == 1
    assert len(placement.prefill_cuts(355, 100, 100, [110, 150, 190], CHEAP_CUTS)) == 2
