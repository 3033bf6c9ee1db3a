"""Times are compared beside a control target: load of the machine is no change."""

from __future__ import annotations

import random
from collections.abc import Callable

from llamahybrid.harness.drift import drifts, sign_test
from llamahybrid.harness.report import Report, TargetFigures
from tests.harness.reports import report, request, target, workload

Load = Callable[[], float]
CHANCE = random.Random()
"""Of this module alone: threads of other tests draw from the common one."""


def played(name: str, load: Load, first: float = 1.0, workloads: int = 10, **more: object) -> TargetFigures:
    """Ten turns each; `first` stretches the first token, `load` everything, workload by workload."""
    done = []
    for i in range(workloads):
        slow = load()
        turns = []
        for turn in range(10):
            noise, rest = CHANCE.uniform(0.8, 1.3), CHANCE.uniform(0.8, 1.3)
            ttft = 0.02 * first * slow * noise
            turns.append(request(str(i), turn, ttft=ttft, seconds=ttft + 0.05 * slow * rest))
        done.append(workload(str(i), requests=tuple(turns)))
    return target(name, *done, **more)


def run(load: Load, first: float = 1.0, **more: object) -> Report:
    return report(played("stock", load), played("ours", load, first, **more))


def idle() -> float:
    return 1.0


def busy() -> float:
    return CHANCE.choice((1.0, 1.5, 4.0, 9.0))


def test_noise_and_load_are_no_drift() -> None:
    CHANCE.seed(1)
    reports = [run(load) for load in (idle, busy) * 10]
    assert [list(drifts(old, new)) for old in reports for new in reports if old is not new] == [[]] * 380


def test_busy_machine_is_no_drift() -> None:
    CHANCE.seed(2)
    later = report(played("stock", idle), played("ours", lambda: 6.0))
    assert list(drifts(run(idle), later)) == []


def test_later_first_tokens_are_seen_under_load() -> None:
    CHANCE.seed(3)
    (found,) = drifts(run(idle), run(busy, first=1.8))
    assert (found.target, found.controls, found.workloads) == ("ours", ("stock",), 10)
    assert 1.5 < found.factor < 2.2
    (back,) = drifts(run(busy, first=1.8), run(idle))
    assert back.factor < 1


def test_no_drift_without_a_control_or_enough_workloads() -> None:
    CHANCE.seed(4)
    few = [report(*(played(n, idle, 1 + (n == "ours") * x, 7) for n in ("stock", "ours"))) for x in (0, 4)]
    assert list(drifts(*few)) == []
    alone = [report(played("ours", idle, x)) for x in (1, 5)]
    assert list(drifts(*alone)) == []
    other = {"llama-cpp-python": "0.3.37"}
    changed = report(played("stock", idle, versions=other), played("ours", idle, 5, versions=other))
    assert list(drifts(run(idle), changed)) == []


def test_the_sign_test() -> None:
    assert sign_test(8, 8) == sign_test(0, 8) == 2 / 256
    assert sign_test(7, 7) > 0.01
    assert sign_test(5, 10) == 1.0
