"""Time that is too short shortens conversations, and then leaves some out; costs come from the workloads."""

from __future__ import annotations

import time

from llamahybrid.harness.plan import SCALES, Cost, Plan, Speed, cost_of, fitting, longest_scale, measured
from llamahybrid.harness.workloads.tokens import TOKEN_WORKLOADS, Workload, exact_append, unrelated
from tests.harness.pretended import PretendSession

APPEND, UNRELATED = Workload("append", exact_append), Workload("unrelated", unrelated)


def test_cost_counts_every_prompt_from_its_beginning() -> None:
    cost = cost_of(UNRELATED, 1.0)
    assert cost == Cost(180 + 240 + 120 + 300 + 4 * 3, 4 * 24)
    for workload in TOKEN_WORKLOADS[:-1]:
        full, short = cost_of(workload, 1.0), cost_of(workload, SCALES[-1])
        assert 0 < short.prompt < full.prompt / 3, workload.name
        assert 0 < short.answer < full.answer / 3, workload.name


def test_longest_scale_that_fits_is_taken() -> None:
    seconds = (1000.0, 25.0, 14.0, 1.0)
    scales = [longest_scale((APPEND,), Speed(1000.0, 100.0), each) for each in seconds]
    assert scales == sorted(scales, reverse=True)
    assert (scales[0], scales[-1]) == (1.0, SCALES[-1])
    assert fitting(lambda scale: 8 * scale, 4) == 0.5
    assert Plan(scales[-1]).script_scale > scales[-1], "probes keep prompts that a cache would remember"


def test_workload_fits_if_its_time_is_left() -> None:
    speed, now = Speed(100.0, 100.0), time.monotonic()
    assert Plan(speed=speed).seconds(UNRELATED) == 2 * speed.seconds(cost_of(UNRELATED, 1.0))
    assert Plan().fits(UNRELATED)
    assert Plan(speed=speed, until=now + 1e9).fits(UNRELATED)
    assert not Plan(speed=speed, until=now + 1).fits(UNRELATED)


def test_speed_is_measured_after_a_first_request() -> None:
    asked: list[int] = []
    speed = measured(PretendSession(lambda ask: asked.append(len(ask.tokens)), seconds=2.0))
    assert asked == [16, 16, 96]
    assert (speed.prefill, speed.decode) == (96.0, 15.0)
    asked.clear()
    speed = measured(PretendSession(lambda ask: asked.append(len(ask.tokens)), seconds=8.0))
    assert (asked, speed.prefill, speed.decode) == ([16, 16], 4.0, 0.75), "a slow one is not asked more"
    asked.clear()
    measured(PretendSession(lambda ask: asked.append(len(ask.tokens)), seconds=0.01))
    assert len(asked) > 2, "a quick one several times"
