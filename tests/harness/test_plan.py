"""Time that is too short shortens conversations, and then leaves some out; costs come from the workloads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from llamahybrid.harness import plan as planning
from llamahybrid.harness.directed import PROBES
from llamahybrid.harness.plan import SCALES, Cost, Plan, Speed, cost_of, fitting, measured
from llamahybrid.harness.report import Sameness
from llamahybrid.harness.workloads.tokens import TOKEN_WORKLOADS, Workload, unrelated
from tests.harness.pretended import PretendSession

UNRELATED = Workload("unrelated", unrelated)


def test_cost_counts_every_prompt_from_its_beginning() -> None:
    cost = cost_of(UNRELATED, 1.0)
    assert cost == Cost(180 + 240 + 120 + 300 + 4 * 3, 4 * 24, compared=True, least=0.5)
    for workload in TOKEN_WORKLOADS[:-1]:
        full, short = cost_of(workload, 1.0), cost_of(workload, SCALES[-1])
        assert 0 < short.prompt < full.prompt / 3, workload.name
        assert 0 < short.answer < full.answer / 3, workload.name


def test_longest_scale_that_fits_is_taken() -> None:
    assert [fitting(lambda scale: 8 * scale, each) for each in (8, 4, 3, 0)] == [1.0, 0.5, 0.25, SCALES[-1]]
    cost = PROBES[0].cost(SCALES[-1])
    assert cost.prompt > 2 * cost_of(PROBES[0].workload, SCALES[-1]).prompt, "a cache remembers its prompts"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands; `clock.now` sets it."""
    standing = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(planning, "time", SimpleNamespace(monotonic=lambda: standing.now))
    return standing


def test_workload_begins_if_its_first_requests_fit() -> None:
    speed, cost = Speed(100.0, 100.0, comparing=0.5), Cost(900, 100, least=0.5)
    assert not Plan().lacks(cost)
    assert not Plan(8.0, speed=speed).lacks(cost), "15 s for all of it, 7.5 s for its first half"
    assert "it needs about 8 s" in Plan(7.0, speed=speed).lacks(cost)
    assert not Plan(6.0, speed=speed).lacks(Cost(900, 100, compared=False, least=0.5))
    assert Plan(8.0, speed=speed, opening=2.0).lacks(cost)
    assert "the time was over" in Plan(-1.0, speed=speed).lacks(cost)


def test_time_that_a_step_leaves_is_shared_by_those_that_follow(clock: SimpleNamespace) -> None:
    one, two = Cost(100, 0), Cost(300, 0)
    plan = Plan(40.0, speed=Speed(10.0, 10.0), left=80.0)
    plan.begin(one)
    assert (plan.ask_until, plan.compare_until) == (1005.0, 1010.0), "a quarter, half of it for comparisons"
    clock.now += 2  # most of it was reused
    plan.begin(two)
    assert (plan.ask_until, plan.compare_until) == (1021.0, 1040.0)
    clock.now += 50
    plan.begin(two)
    assert plan.compare_until == clock.now, "the time is over"
    assert plan.share(Cost(600, 0), 0.15) == 0.05


def test_time_of_comparisons_is_measured(clock: SimpleNamespace) -> None:
    class Slow(PretendSession):
        def sameness(self, *_: object) -> tuple[Sameness, str]:
            clock.now += 3.0
            return "same", ""

    assert measured(Slow(lambda ask: None, seconds=2.0), 0.0).comparing == 1.5
    assert measured(Slow(lambda ask: None, seconds=2.0), 0.0, compared=False).comparing == 0.0


@pytest.mark.parametrize(("seconds", "words"), [(0.0, [6]), (30.0, [6, 12, 24, 48, 96]), (1.0, [6])])
def test_speed_is_measured_by_ever_longer_requests_within_a_time(seconds: float, words: list[int]) -> None:
    asked: list[int] = []
    speed = measured(PretendSession(lambda ask: asked.append(len(ask.tokens)), seconds=2.0), seconds)
    assert asked == words
    assert (speed.prefill, speed.decode) == (words[-1], max(1, words[-1] // 6 - 1))
