"""The ladder: what a history that parts anywhere loses is bounded, with no more cuts than are paid for."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from llamahybrid.prompt_cache.placement import GRAIN, MIN_SPACING, RATIOS, batch_ends, ladder, rungs


def most_lost(total: int, cached: int, kept: Iterable[int], distance: int) -> int:
    """Known tokens decoded again where a history parts so many tokens before the end."""
    at = total - distance
    return at - max((k for k in kept if k <= at), default=cached)


@given(st.integers(32, 40_000), st.sampled_from(RATIOS), st.data())
def test_a_loss_is_bounded_by_its_distance(total: int, ratio: float, data: st.DataObject) -> None:
    """Whatever the lengths, and whatever else is kept."""
    cached = data.draw(st.integers(0, total - 16))
    taken = data.draw(st.lists(st.integers(cached + 1, total - 1), max_size=8, unique=True))
    kept = [*rungs(total, cached, ratio, taken), *taken]
    for distance in range(1, total - cached, max(1, (total - cached) // 500)):
        assert most_lost(total, cached, kept, distance) <= (ratio - 1) * distance + GRAIN


@given(st.integers(600, 40_000), st.sampled_from([64, 512, 2048]))
def test_batch_ends_cost_nothing_and_bound_what_lies_behind_them(total: int, step: int) -> None:
    ends = batch_ends(total, 0, step, most=1 << 20)
    assert all(end % step == 0 for end in ends)
    for distance in range(step + MIN_SPACING, total, max(1, total // 500)):
        lost = most_lost(total, 0, ends, distance)
        assert lost <= max(step, 0.25 * distance + step)


@given(st.integers(16, 40_000), st.integers(0, 30))
def test_a_ladder_has_no_more_rungs_than_were_paid_for(total: int, most: int) -> None:
    assert len(ladder(total, 0, most)) <= most


def test_the_finest_ladder_is_taken_that_can_be_paid_for() -> None:
    lengths = [len(ladder(3000, 0, most)) for most in range(16)]
    assert lengths == sorted(lengths)
    assert lengths[1] == 1
    assert lengths[15] > 9


def test_a_stored_checkpoint_counts_as_a_rung() -> None:
    there = rungs(4000, 0, 4.0)
    assert there == (3992, 3968, 3872, 3584, 2560)
    assert rungs(4000, 0, 4.0, there) == ()
    assert rungs(4000, 0, 4.0, [3890]) == (3992, 3968, 3584, 2560), "110 before the end will do for 128"


def test_a_prompt_of_one_batch_passes_no_batch_end() -> None:
    assert batch_ends(600, 500, 512, most=9) == (), "512 lies in it, and would cost a batch"
    assert batch_ends(1100, 500, 512, most=9) == (1024, 512)
    assert ladder(3000, 0, 0) == ladder(3000, 0, -1) == ()
