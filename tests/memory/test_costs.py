"""Costs of one process: steady, and of what was measured."""

from __future__ import annotations

import pytest

from llamahybrid.memory import costs
from llamahybrid.memory.costs import FADE_SECONDS, FEW, WINDOW, CostMeter
from llamahybrid.prompt_cache.placement import SMALL_OF_ALONE, UNMEASURED_CUT, cut_tokens

pytestmark = pytest.mark.usefixtures("measured_costs")


def test_the_cost_of_a_cut_is_the_excess_of_small_batches() -> None:
    meter = CostMeter(512)
    meter.decoded(512, 512 * 2e-3)
    meter.decoded(1, 7e-3)
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
    assert cut_tokens(meter.costs()) == pytest.approx(SMALL_OF_ALONE * 2.5), "large batches were held up"


def test_the_cost_of_a_cut_is_that_of_a_machine_with_nothing_else_to_do() -> None:
    """Beside three busy programs most small batches took 50 to 1000 times as long: no prompt had a cut."""
    meter = CostMeter(512)
    meter.decoded(512, 512 * 2e-3)
    meter.decoded(1, 7e-3)
    for number in range(4 * WINDOW):
        meter.decoded(16, 16 * 2e-3 + (5e-3 if number % 5 == 0 else 0.5))
        assert number < FEW or meter.costs().batch_seconds == pytest.approx(5e-3)


def test_a_batch_that_was_held_up_makes_no_cut_cheap() -> None:
    """A model that is still read from disk, a machine that stands still: 24 cuts of one prompt came of it."""
    meter = CostMeter(512)
    meter.decoded(1, 14e-3)
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


def test_reads_that_were_held_up_do_not_keep_others_from_being_tried(now: list[float]) -> None:
    meter = CostMeter(512)
    for _ in range(FEW - 1):
        meter.read(8.0, 4)
        assert meter.read_seconds == 0
    meter.read(12.0, 4)
    assert meter.read_seconds == 2.0
    now[0] += 2 * FADE_SECONDS + 1
    assert meter.read_seconds == 0.5
    meter.read(0.4, 4)
    assert meter.read_seconds == pytest.approx(0.1)
