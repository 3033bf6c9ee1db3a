"""What is remembered of reads that were given up."""

from __future__ import annotations

import pytest

from llamahybrid.prompt_cache import lateness
from llamahybrid.prompt_cache.lateness import REMEMBERED_SECONDS, Lateness


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
