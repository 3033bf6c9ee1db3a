"""Assertions on reports pass on what was shown, and fail with the reason on anything unknown."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from llamahybrid.assertions import assert_reuse, assert_same_answer, assert_sound
from llamahybrid.engine.bindings import stock
from llamahybrid.errors import EngineError
from llamahybrid.harness.hazards import runner
from llamahybrid.harness.report import Report
from tests.harness.reports import report, request, target, verdict, workload


def of(**figures: object) -> Report:
    return report(target("ours", workload(requests=(request(**figures),))))


def test_reuse_is_asserted_as_a_share_of_known_tokens() -> None:
    assert_reuse(of(), 1.0)
    assert_reuse(of(cached=45), 0.9)
    assert_reuse(of(matched=100, cached=99), 1.0)  # the last one is decoded in any case
    with pytest.raises(AssertionError, match=r"44 of 50 known tokens were reused \(88%\), at least 90%"):
        assert_reuse(of(cached=44), 0.9)
    with pytest.raises(AssertionError, match=r"chat 0, turn 1: no checkpoint"):
        assert_reuse(of(cached=44, miss="no checkpoint"), 0.9)


def test_one_bad_workload_fails_beside_good_ones() -> None:
    bad = workload("bad", requests=(request(cached=0),))
    with pytest.raises(AssertionError, match="ours, bad"):
        assert_reuse(report(target("ours", workload("good", 40), bad)), 0.5)


@pytest.mark.parametrize("hidden", ["total", "matched", "cached"])
def test_hidden_figures_do_not_pass(hidden: str) -> None:
    with pytest.raises(AssertionError, match="cannot tell"):
        assert_reuse(of(**{hidden: None}), 0.0)


def test_false_reports_of_reuse_do_not_pass() -> None:
    lying = workload(verdicts=(verdict("reports-what-it-reused", "bad", "9 of 4"),))
    with pytest.raises(AssertionError, match=r"not so: 9 of 4"):
        assert_reuse(report(target("ours", lying)), 0.5)
    with pytest.raises(AssertionError, match="nothing to reuse"):
        assert_reuse(of(matched=0, cached=0), 0.5)


def test_reuse_of_directed_probes_is_not_measured() -> None:
    probe = workload("probe: a history cut far back", requests=(request(cached=0),))
    assert_reuse(report(target("ours", probe, workload())), 1.0)


def test_directed_probes_alone_do_not_pass() -> None:
    probe = workload("probe: a history cut far back")
    with pytest.raises(AssertionError, match="ours: no workload ran but probes"):
        assert_reuse(report(target("ours", probe)), 0.0)
    assert_same_answer(report(target("ours", probe)))


@pytest.mark.parametrize("check", [lambda r: assert_reuse(r, 0.0), assert_same_answer])
def test_workload_that_did_not_run_does_not_pass(check: object) -> None:
    left_out = workload("a chat", requests=(), verdicts=(verdict("exact", "cannot tell", "no template"),))
    with pytest.raises(AssertionError, match="ours, a chat: cannot tell: no template"):
        check(report(target("ours", workload(), left_out)))  # type: ignore[operator]


def test_answers_other_than_a_fresh_contexts_fail() -> None:
    assert_same_answer(report())
    assert_same_answer(of(answer="tie"))
    with pytest.raises(AssertionError, match="chat 0, turn 1: the answer is not that"):
        assert_same_answer(of(answer="different"))
    with pytest.raises(AssertionError, match="cannot tell"):
        assert_same_answer(of(answer="unknown"))
    some = report(target("ours", workload(requests=(request(), request(turn=1, answer="unknown")))))
    assert_same_answer(some, allow_unknown=True)
    with pytest.raises(AssertionError, match="no answer could be compared"):
        assert_same_answer(of(answer="unknown"), allow_unknown=True)


@pytest.mark.parametrize("check", [lambda r: assert_reuse(r, 0.0), assert_same_answer])
def test_target_that_did_not_run_does_not_pass(check: object) -> None:
    for made, said in (
        (report(target(error="it died")), "it died"),
        (report(target("ours", workload(requests=()))), "was asked nothing"),
        (Report("", {}, (), ()), "no target"),
    ):
        with pytest.raises(AssertionError, match=said):
            check(made)  # type: ignore[operator]


def test_assert_sound_names_the_hazard_that_hits() -> None:
    assert_sound(stock(), "rollback-one-batch")
    with pytest.raises(
        AssertionError, match=r"1 of 2 hazards hit .*\n  hazard:rollback-twice: .*: silently wrong"
    ):
        assert_sound(stock(), "rollback-one-batch", "rollback-twice")
    with pytest.raises(ValueError, match="nonsense"):
        assert_sound(stock(), "nonsense")
    with pytest.raises(EngineError):
        assert_sound(stock() / "nowhere")


@pytest.mark.parametrize(
    ("outcomes", "error", "said"),
    [
        (("ok", "cannot tell"), None, None),  # of an engine of ours without the patch for the second
        (("ok", "bad"), None, "1 of 2 hazards hit"),
        (("cannot tell",), None, "cannot tell .*: hazard:0: why"),
        (("cannot tell",), "no hazard applies", "cannot tell .*: no hazard applies"),
        (("ok", "cannot tell"), "1 probes failed", "cannot tell .*: 1 probes failed"),
    ],
)
def test_hazards_are_judged_as_in_reports(
    monkeypatch: pytest.MonkeyPatch, outcomes: tuple[str, ...], error: str | None, said: str | None
) -> None:
    found = tuple(verdict(f"hazard:{i}", outcome, "why\nmore") for i, outcome in enumerate(outcomes))
    made = report(target("libllama", hazards=found, error=error))
    monkeypatch.setattr(runner, "report", lambda probes, library: made)
    with pytest.raises(AssertionError, match=said) if said else nullcontext():
        assert_sound(stock())
