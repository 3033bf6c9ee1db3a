"""The ladder: cuts that lose the least in the mean, no more than are paid for."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from llamahybrid.prompt_cache.ladder import (
    COUNTS,
    GRAIN,
    MIN_SPACING,
    NEAREST,
    RATIOS,
    batch_ends,
    bounding_rungs,
    ladder,
    rungs,
)


def most_lost(total: int, cached: int, kept: Iterable[int], distance: int) -> int:
    """Known tokens decoded again where a history parts so many tokens before the end."""
    at = total - distance
    return at - max((k for k in kept if k <= at), default=cached)


def mean_loss(total: int, cached: int, cuts: Iterable[int]) -> float:
    """Known tokens decoded again, relative to the distance at which a history parts, in the mean over
    distances that are log-uniform from `NEAREST` to the whole; times the logarithm of that range."""
    ends = sorted({max(NEAREST, total - cut) for cut in cuts} | {NEAREST, total - cached})
    return sum(far / near - 1 - math.log(far / near) for near, far in pairwise(ends))


def test_a_prompt_without_known_starts_loses_as_little_as_cuts_can_save() -> None:
    """No other cuts on the grid lose less, of a prompt short enough to try them all."""
    for total, most in ((90, 1), (120, 2), (150, 3), (231, 2)):
        grid = range(MIN_SPACING, total - NEAREST, MIN_SPACING)
        least = min(mean_loss(total, 0, cuts) for cuts in combinations(grid, most))
        assert mean_loss(total, 0, ladder(total, 0, most)) <= 1.1 * least


@given(st.integers(64, 40_000), st.sampled_from(COUNTS), st.data())
def test_no_drawn_cuts_lose_less(total: int, most: int, data: st.DataObject) -> None:
    """Whatever the lengths, and whatever else is kept."""
    cached = data.draw(st.integers(0, total - 48))
    inside = st.integers(cached + MIN_SPACING, total - 1)
    taken = tuple(data.draw(st.lists(inside, max_size=8, unique=True)))
    others = data.draw(st.lists(inside, min_size=1, max_size=most, unique=True))
    ours = mean_loss(total, cached, (*ladder(total, cached, most, taken), *taken))
    assert ours <= 1.25 * mean_loss(total, cached, (*others, *taken)) + 1


@given(st.integers(64, 40_000), st.sampled_from(COUNTS), st.data())
def test_the_rest_of_a_ladder_is_cut_alike(total: int, most: int, data: st.DataObject) -> None:
    """From a cut on, as many others lie where they lay before: equal cuts make equal bits."""
    cuts = ladder(total, 0, most)
    rest = [number for number in range(1, len(cuts)) if number in COUNTS]
    if rest:
        kept = data.draw(st.sampled_from(rest))
        assert ladder(total, cuts[kept], kept) == cuts[:kept]


@given(st.integers(600, 40_000), st.sampled_from([64, 512, 2048]))
def test_batch_ends_cost_nothing_and_bound_what_lies_behind_them(total: int, step: int) -> None:
    ends = batch_ends(total, 0, step, most=1 << 20)
    assert all(end % step == 0 for end in ends)
    for distance in range(step + MIN_SPACING, total, max(1, total // 500)):
        lost = most_lost(total, 0, ends, distance)
        assert lost <= max(step, 0.25 * distance + step)


@given(st.integers(32, 40_000), st.sampled_from(RATIOS), st.data())
def test_rungs_bound_a_loss_by_its_distance(total: int, ratio: float, data: st.DataObject) -> None:
    """Whatever the lengths, and whatever else is kept."""
    cached = data.draw(st.integers(0, total - 16))
    taken = data.draw(st.lists(st.integers(cached + 1, total - 1), max_size=8, unique=True))
    kept = [*rungs(total, cached, ratio, taken), *taken]
    for distance in range(1, total - cached, max(1, (total - cached) // 500)):
        assert most_lost(total, cached, kept, distance) <= (ratio - 1) * distance + GRAIN


@given(st.integers(16, 40_000), st.integers(-1, 30))
def test_no_more_cuts_are_taken_than_were_paid_for(total: int, most: int) -> None:
    assert len(bounding_rungs(total, 0, most, ())) <= max(0, most)
    cuts = ladder(total, 0, most)
    assert len(cuts) <= max(0, most)
    assert all(MIN_SPACING <= cut < total - NEAREST for cut in cuts)


def test_more_cuts_are_taken_where_they_are_paid_for() -> None:
    lengths = [len(ladder(3000, 0, most)) for most in range(25)]
    assert lengths == sorted(lengths)
    assert lengths[1] == 1
    assert lengths[24] == 24


def test_a_stored_checkpoint_takes_the_place_of_a_cut() -> None:
    assert ladder(4000, 0, 2) == (3936, 3520)
    beside = ladder(4000, 0, 1, (3936,))
    assert beside == (3520,)
    assert ladder(4000, 0, 1) not in (beside, (3936,))
    assert len(ladder(4000, 0, 8, (1000, 1004))) == 8, "whatever their distance"


def test_a_prompt_of_one_batch_passes_no_batch_end() -> None:
    assert batch_ends(600, 500, 512, most=9) == (), "512 lies in it, and would cost a batch"
    assert batch_ends(1100, 500, 512, most=9) == (1024, 512)
    assert ladder(3000, 0, 0) == ladder(3000, 0, -1) == ()
