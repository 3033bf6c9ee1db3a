"""What is remembered of reads, and of those that were given up."""

from __future__ import annotations

import pytest

from llamahybrid.prompt_cache import lateness
from llamahybrid.prompt_cache.lateness import (
    FADE_SECONDS,
    LARGE_READ,
    READ_SAMPLES,
    REMEMBERED_SECONDS,
    Lateness,
    ReadCosts,
)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set."""
    clock = [100.0]
    monkeypatch.setattr(lateness.time, "monotonic", lambda: clock[0])
    return clock


def test_nothing_is_known_before_a_read_was_given_up(now: list[float]) -> None:
    assert Lateness().seconds() == 0.0


def test_the_longest_wait_in_vain_counts_for_a_while(now: list[float]) -> None:
    late = Lateness()
    late.gave_up(0.1)
    late.gave_up(0.05)
    assert late.seconds() == 0.1
    now[0] += REMEMBERED_SECONDS
    assert late.seconds() == 0.0
    late.gave_up(0.05)
    assert late.seconds() == 0.05, "what was long ago does not come back"


def test_a_read_that_comes_ends_it(now: list[float]) -> None:
    late = Lateness()
    late.gave_up(0.1)
    late.worked()
    assert late.seconds() == 0.0


def test_what_reads_take_is_not_known_before_there_was_one(now: list[float]) -> None:
    assert ReadCosts().seconds(1 << 30) == 0.0


def test_large_reads_tell_the_bandwidth_and_small_ones_the_rest(now: list[float]) -> None:
    costs = ReadCosts()
    costs.measured(1000, 0.25)
    costs.measured(LARGE_READ, 1.0)
    assert costs.seconds(0) == 0.25
    assert costs.seconds(3 * LARGE_READ) == 3.25
    for _ in range(READ_SAMPLES):
        costs.measured(1000, 0.125)
    assert costs.seconds(0) == 0.125


def test_a_place_that_was_slow_once_is_tried_again(now: list[float]) -> None:
    costs = ReadCosts()
    costs.measured(1000, 8.0)
    assert costs.seconds(1000) == 8.0
    now[0] += FADE_SECONDS
    assert costs.seconds(1000) == 4.0
    now[0] += 9 * FADE_SECONDS
    assert costs.seconds(1000) < 0.01
    costs.measured(1000, 8.0)
    assert costs.seconds(1000) == 8.0, "it was slow again"
