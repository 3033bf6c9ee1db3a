"""Costs of one process: steady, and of what was measured."""

from __future__ import annotations

from itertools import pairwise

import pytest

from llamahybrid.memory import costs
from llamahybrid.memory.costs import BAND, FADE_SECONDS, FEW, WINDOW, CostMeter
from llamahybrid.prompt_cache import Costs
from llamahybrid.prompt_cache.placement import UNMEASURED_CUT, cut_tokens

pytestmark = pytest.mark.usefixtures("measured_costs")

KEPT = Costs(token_seconds=1e-2, prefill_seconds=1e-3, snapshot_seconds=1e-4, restore_seconds=2e-4)


def test_known_costs_stand_until_they_are_off_by_half() -> None:
    meter = CostMeter(512, KEPT)
    for seconds in (5e-3, 5e-3):
        meter.decoded(1, seconds)
        assert meter.costs().token_seconds == 1e-2, "a few samples are no contradiction"
    for _ in range(FEW):
        meter.decoded(512, 512 * 1e-3 * 0.99 * BAND)
        meter.decoded(1, 5e-3)
    assert meter.costs().prefill_seconds == 1e-3
    assert meter.costs().token_seconds == 5e-3


def test_each_measurement_shows_in_the_costs() -> None:
    meter = CostMeter(512)
    seen = [meter.costs()]
    for measure in (
        lambda: meter.decoded(1, 0.01),
        lambda: meter.decoded(100, 0.1),
        lambda: meter.saved(1000, 0.002),
        lambda: [meter.restored(0.003, 0) for _ in range(FEW)],
        lambda: [meter.restored(0.3, 1000) for _ in range(FEW)],
    ):
        measure()
        seen.append(meter.costs())
        assert meter.costs() is seen[-1], "nothing was measured since"
    assert all(a != b for a, b in pairwise(seen))
    assert seen[-1].snapshot_bytes == 1000


def test_the_cost_of_a_cut_is_the_excess_of_small_batches() -> None:
    meter = CostMeter(512)
    meter.decoded(512, 512 * 2e-3)
    meter.decoded(1, 20e-3)
    for tokens in (8, 9, 20):
        assert meter.costs().batch_seconds == 0
        meter.decoded(tokens, tokens * 2e-3 + 5e-3)
    meter.decoded(40, 1.0)
    found = meter.costs()
    assert found.batch_seconds == pytest.approx(5e-3)
    assert cut_tokens(found) == pytest.approx(2.5)
    for _ in range(WINDOW):
        meter.decoded(16, 1e-3)
    assert 0 < meter.costs().batch_seconds < 1e-4, "less than their share is none, not unmeasured"


def test_a_batch_that_was_held_up_makes_no_cut_cheap() -> None:
    """A model that is still read from disk, a machine that stands still: 24 cuts of one prompt came of it."""
    meter = CostMeter(512)
    meter.decoded(1, 20e-3)
    meter.decoded(128, 10.0)
    assert cut_tokens(meter.costs()) == UNMEASURED_CUT, "a token of a batch takes no longer than one alone"
    meter.decoded(128, 128 * 2e-3)
    assert meter.costs().prefill_seconds == 2e-3, "at once, however few there are"
    for tokens in (8, 9, 20):
        meter.decoded(tokens, tokens * 2e-3 + 10e-3)
    assert meter.costs().batch_seconds == pytest.approx(10e-3)
    assert cut_tokens(meter.costs()) == pytest.approx(5.0)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set."""
    clock = [100.0]
    monkeypatch.setattr(costs.time, "monotonic", lambda: clock[0])
    return clock


def test_restores_that_were_held_up_do_not_keep_others_from_being_tried(now: list[float]) -> None:
    meter = CostMeter(512)
    for _ in range(FEW):
        meter.restored(8.0, 1)
        meter.restored(8.0 + 64 * 0.5, 64)
    said = meter.costs()
    assert (said.restore_seconds, said.segment_seconds) == (8.0, 0.5)
    now[0] += FADE_SECONDS - 1
    assert meter.costs() == said
    now[0] += 2 * FADE_SECONDS
    assert (meter.costs().restore_seconds, meter.costs().segment_seconds) == (2.0, 0.125)
    meter.restored(0.01, 1)
    assert meter.costs().restore_seconds == 0.01
    assert meter.costs().segment_seconds == 0.5, "that was not tried"


def test_costs_of_an_earlier_process_fade_too(now: list[float]) -> None:
    meter = CostMeter(512, Costs(prefill_seconds=1e-3, restore_seconds=8.0))
    assert meter.costs().restore_seconds == 8.0
    now[0] += 3 * FADE_SECONDS
    assert meter.costs().restore_seconds == 1.0
    meter.restored(0.01, 1)
    assert meter.costs().restore_seconds == 0.01, "it takes no longer than that"
    meter.restored(9.0, 1)
    meter.restored(9.0, 1)
    assert meter.costs().restore_seconds == 0.01, "those were held up"
