"""Time that is too short shortens conversations, and then leaves some out; costs come from the workloads."""

from __future__ import annotations

from dataclasses import replace
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


def test_workload_begins_if_its_first_requests_fit(clock: SimpleNamespace) -> None:
    speed, cost = Speed(100.0, 100.0, comparing=0.5), Cost(900, 100, least=0.5)

    def begun(seconds: float, cost: Cost = cost, opening: float = 0.0) -> tuple[str, float | None]:
        plan = Plan(seconds, speed=speed, opening=opening)
        return plan.begin(cost), plan.ask_until

    assert Plan().begin(cost) == ""
    assert begun(15.0) == ("", clock.now + 15.0)
    assert begun(9.0) == ("", clock.now + 6.0), "cut short, so that a third is left for comparisons"
    assert "it needs about 8 s" in begun(7.0)[0]
    assert begun(7.0, replace(cost, compared=False)) == ("", clock.now + 7.0)
    assert begun(9.0, opening=4.0)[0]
    assert "the time was over" in begun(-1.0)[0]


def test_plan_learns_from_the_latest_steps_how_long_things_take() -> None:
    plan, cost = Plan(10.0, speed=Speed(100.0, 100.0, comparing=0.0), opening=1.0), Cost(900, 100)
    plan.took(5.0, cost)
    assert plan.needed(cost) == pytest.approx(1 + 10 * 6 / 11), "half of the work was reused"
    plan.took(35.0, cost)
    assert plan.needed(cost) == pytest.approx(1 + 10 * 38.5 / 16), "then the machine was busy"


def test_pause_in_a_short_step_excludes_no_others() -> None:
    plan = Plan(60.0, speed=Speed(100.0, 100.0, comparing=0.0))
    plan.took(8.0, Cost(10, 0))  # eighty times as long as expected
    assert plan.needed(Cost(900, 100)) < 25


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
