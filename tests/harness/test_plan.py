"""Time that is too short shortens conversations, and then leaves some out; costs come from the workloads."""

from __future__ import annotations

import pytest

from llamahybrid.harness.directed import PROBES
from llamahybrid.harness.plan import SCALES, Cost, Plan, Speed, cost_of, fitting, measured
from llamahybrid.harness.workloads.tokens import TOKEN_WORKLOADS, Workload, unrelated
from tests.harness.pretended import PretendSession

UNRELATED = Workload("unrelated", unrelated)


def test_cost_counts_every_prompt_from_its_beginning() -> None:
    cost = cost_of(UNRELATED, 1.0)
    assert cost == Cost(180 + 240 + 120 + 300 + 4 * 3, 4 * 24)
    for workload in TOKEN_WORKLOADS[:-1]:
        full, short = cost_of(workload, 1.0), cost_of(workload, SCALES[-1])
        assert 0 < short.prompt < full.prompt / 3, workload.name
        assert 0 < short.answer < full.answer / 3, workload.name


def test_longest_scale_that_fits_is_taken() -> None:
    assert [fitting(lambda scale: 8 * scale, each) for each in (8, 4, 3, 0)] == [1.0, 0.5, 0.25, SCALES[-1]]
    cost = PROBES[0].cost(SCALES[-1])
    assert cost.prompt > 2 * cost_of(PROBES[0].workload, SCALES[-1]).prompt, "a cache remembers its prompts"


def test_workload_fits_if_its_time_is_left() -> None:
    speed, cost = Speed(100.0, 100.0), Cost(900, 100)
    assert Plan().fits(cost)
    assert Plan(11.0, speed=speed).fits(cost)
    assert not Plan(9.0, speed=speed).fits(cost)
    assert not Plan(11.0, speed=speed, opening=2.0).fits(cost)


def test_plan_learns_how_long_things_take() -> None:
    plan, cost = Plan(60.0, speed=Speed(100.0, 100.0)), Cost(900, 100)
    plan.took(1.0, 5.0, cost)
    assert plan.needed(cost) == 6.0, "half of the work was reused"
    plan.took(2.0, 35.0, cost)
    assert plan.needed(cost) == 22.0, "then the machine was busy"
    assert plan.share(Cost(600, 0), 0.05) == 0.5


@pytest.mark.parametrize(("seconds", "words"), [(0.0, [6]), (30.0, [6, 12, 24, 48, 96]), (1.0, [6])])
def test_speed_is_measured_by_ever_longer_requests_within_a_time(seconds: float, words: list[int]) -> None:
    asked: list[int] = []
    speed = measured(PretendSession(lambda ask: asked.append(len(ask.tokens)), seconds=2.0), seconds)
    assert asked == words
    assert (speed.prefill, speed.decode) == (words[-1], max(1, words[-1] // 6 - 1))
