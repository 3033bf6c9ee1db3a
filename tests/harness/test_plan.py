"""Time that is too short shortens conversations, and then leaves some out; costs come from the workloads."""

from __future__ import annotations

from llamahybrid.harness.plan import SCALES, Cost, Speed, cost_of, fitting, measured, plan
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


def test_plan_takes_the_longest_scale_that_fits() -> None:
    scales = [plan((APPEND,), Speed(1000.0, 100.0), seconds).scale for seconds in (1000.0, 25.0, 14.0, 1.0)]
    assert scales == sorted(scales, reverse=True)
    assert (scales[0], scales[-1]) == (1.0, SCALES[-1])
    assert fitting(lambda scale: 8 * scale, 4) == 0.5


def test_plan_leaves_out_what_does_not_fit_at_the_shortest() -> None:
    speed = Speed(100.0, 100.0)
    alone = plan((UNRELATED,), speed, 0.0)
    assert alone.left_out == {"unrelated"}
    room = plan((APPEND, UNRELATED), speed, 1e9)
    assert not room.left_out
    assert alone.script_scale > alone.scale, "directed probes keep prompts that a cache would remember"


def test_speed_is_measured_after_a_first_request() -> None:
    asked: list[int] = []
    speed, seconds = measured(PretendSession(lambda ask: asked.append(len(ask.tokens)), seconds=2.0))
    assert asked == [16, 16, 96]
    assert (speed.prefill, speed.decode, seconds) == (96.0, 15.0, 2.0)
    asked.clear()
    speed, _ = measured(PretendSession(lambda ask: asked.append(len(ask.tokens)), seconds=8.0))
    assert (asked, speed.prefill, speed.decode) == ([16, 16], 4.0, 0.75), "a slow one is not asked more"
    asked.clear()
    measured(PretendSession(lambda ask: asked.append(len(ask.tokens)), seconds=0.01))
    assert len(asked) > 2, "a quick one several times"
