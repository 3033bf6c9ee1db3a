"""Changes from one report to the next: better, worse, or noted."""

from __future__ import annotations

from typing import Any

import pytest

from llamahybrid.harness.report import Report, TargetFigures, WorkloadFigures
from llamahybrid.harness.report_diff import GRAIN_TOKENS, Change, changes
from tests.harness.reports import report, request, target, verdict, workload


def between(old: Any, new: Any, **options: Any) -> list[Change]:
    """Of two workloads, targets or reports."""

    def whole(part: Any) -> Report:
        if isinstance(part, WorkloadFigures):
            part = target("ours", part)
        return report(part) if isinstance(part, TargetFigures) else part

    return changes(whole(old), whole(new), **options)


def kinds(found: list[Change]) -> list[str]:
    return [change.kind for change in found]


def test_equal_reports_have_no_changes() -> None:
    assert between(report(), report()) == []


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("ok", "bad", "worse"),
        ("ok", "cannot tell", "worse"),
        ("bad", "cannot tell", "worse"),
        ("cannot tell", "bad", "worse"),
        ("bad", "ok", "better"),
        ("cannot tell", "ok", "better"),
        ("cannot tell", "cannot tell", None),
        ("bad", "bad", None),
    ],
)
@pytest.mark.parametrize("hazard", [False, True])
def test_changed_verdicts_are_better_or_worse(old: str, new: str, kind: str | None, hazard: bool) -> None:
    if hazard:
        name = "hazard:x"
        pair = [target("ours", hazards=(verdict(name, outcome, "why"),)) for outcome in (old, new)]
    else:
        name = "exact"
        pair = [workload(verdicts=(verdict(name, outcome, "why"),)) for outcome in (old, new)]  # type: ignore[misc]
    found = between(*pair)
    assert kinds(found) == ([kind] if kind else [])
    assert [change.text for change in found] == ([f"{name} was {old}, is {new}: why"] if kind else [])


def test_more_decoded_tokens_are_worse_and_the_turn_is_named() -> None:
    grain = GRAIN_TOKENS * 4
    assert between(workload(), workload(decoded=240 + grain)) == []
    turns = tuple(request(turn=turn, decoded=60 + (turn == 2) * (grain + 1)) for turn in range(4))
    (found,) = between(workload(), workload(decoded=240 + grain + 1, requests=turns))
    assert (found.kind, found.where) == ("worse", "ours, chat")
    assert found.text == "tokens decoded: 240 before, 249 now, most of it at chat 0, turn 3 (+9)"
    (back,) = between(workload(decoded=240 + grain + 1, requests=turns), workload())
    assert back.kind == "better"
    long = workload(least=10_000, decoded=10_000)
    assert between(long, workload(least=10_000, decoded=10_100)) == []  # one per cent
    assert kinds(between(long, workload(least=10_000, decoded=10_101))) == ["worse"]


def test_fewer_reused_tokens_are_worse() -> None:
    less = workload(requests=tuple(request(turn=turn, cached=40) for turn in range(4)))
    assert [(c.kind, c.text) for c in between(workload(), less)] == [
        ("worse", "tokens reported as reused: 200 before, 160 now")
    ]
    assert kinds(between(less, workload())) == ["better"]


def test_figure_that_disappears_is_worse() -> None:
    hidden = workload(
        decoded=None, ratio=None, requests=tuple(request(turn=t, cached=None) for t in range(4))
    )
    found = between(workload(), hidden)
    assert kinds(found) == ["worse", "worse"]
    assert all("cannot be told" in change.text for change in found)
    assert between(hidden, workload()) == []
    assert between(hidden, hidden) == []


def test_changed_prompts_are_compared_by_ratio() -> None:
    longer = tuple(request(turn=turn, total=140) for turn in range(4))
    same = workload(requests=longer, least=300, decoded=300)
    (note,) = between(workload(), same)
    assert note.kind == "note"
    worse = workload(requests=longer, least=300, decoded=330, ratio=1.1)
    assert kinds(between(workload(), worse)) == ["note", "worse"]
    assert kinds(between(workload(), workload(requests=longer, ratio=None))) == ["note", "worse"]


def test_answers_are_compared_one_by_one() -> None:
    def answers(*each: str) -> WorkloadFigures:
        return workload(requests=tuple(request(turn=turn, answer=one) for turn, one in enumerate(each)))

    found = between(answers("different", "same", "same", "tie"), answers("same", "different", "tie", "same"))
    assert [(c.kind, c.text) for c in found] == [
        ("worse", "1 answers differ, the first of them of chat 0, turn 2"),
        ("better", "1 answers no longer differ, the first of them of chat 0, turn 1"),
    ]
    same = answers("same", "same", "same", "same")
    assert kinds(between(same, answers("unknown", "same", "same", "same"))) == ["worse"]
    assert between(answers("unknown", "same", "same", "same"), same) == []
    late = answers("not compared", "same", "same", "same")
    assert between(same, late) == between(late, same) == [], "a lack of time is no change"


def test_missing_parts_are_worse_when_strict() -> None:
    two = report(target("ours", workload("a"), workload("b")), target("stock"))
    one = report(target("ours", workload("a"), workload("c")))
    assert [(c.kind, c.where, c.text) for c in between(two, one)] == [
        ("note", "ours, c", "is new: there is nothing to compare it with"),
        ("note", "ours, b", "was left out"),
        ("note", "stock", "was left out"),
    ]
    assert kinds(between(two, one, strict=True)) == ["note", "worse", "worse"]
    fewer = workload(verdicts=(verdict(),))
    assert [(c.kind, c.text) for c in between(workload(), fewer)] == [
        ("note", "no verdict any more on exact")
    ]


def test_stopped_target_is_worse_and_versions_are_noted() -> None:
    stopped = target(error="it died", versions={"llama-cpp-python": "0.3.37"})
    assert [(c.kind, c.text) for c in between(target(), stopped)] == [
        ("worse", "ran to its end, and now stopped: it died"),
        ("note", "llama-cpp-python: 0.3.36 before, 0.3.37 now"),
    ]
    assert kinds(between(stopped, target())) == ["better", "note"]
