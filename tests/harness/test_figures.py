"""Verdicts on targets that report everything, report wrong figures, or hide them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llamahybrid.harness import figures
from llamahybrid.harness.conversation import Conversation, Request
from llamahybrid.harness.report import Sameness, Verdict, WorkloadFigures
from llamahybrid.harness.runner import RequestResult, WorkloadRunner
from llamahybrid.harness.targets.base import Reply, Session
from llamahybrid.harness.workloads.speech import Speech, Vocabulary
from llamahybrid.harness.workloads.tokens import Workload


class Told(Session):
    """Answers with what a test says of each request."""

    vocabulary = Vocabulary(tuple(range(100)), None, None)

    def __init__(self, *replies: dict[str, Any], same: Sequence[Sameness] = ("same",) * 9) -> None:
        self._replies, self._same = list(replies), list(same)

    def ask(self, ask: Request) -> Reply:
        told = self._replies.pop(0)
        known = {"prompt": ask.tokens, "tokens": (7, 8), "total": len(ask.tokens)}
        return Reply("text", 0.5, **{**known, **told})

    def sameness(self, ask: Request, reply: Reply) -> tuple[Sameness, str]:
        return self._same.pop(0), "said"


HEAD = tuple(range(40))


def _workload(speech: Speech) -> Conversation:
    yield Request(2, HEAD)
    yield Request(2, (*HEAD, 7, 8, *range(20)))


PLAYED = Workload("two turns", _workload, measured_from=0)


def _figures(session: Session) -> WorkloadFigures:
    return _judged(session, PLAYED, WorkloadRunner(session).converse(PLAYED))


def _judged(
    session: Session, workload: Workload, played: Sequence[RequestResult], scale: float = 1.0
) -> WorkloadFigures:
    found = figures.judged(session, workload.name, played)
    return figures.workload_figures(workload.name, found, bound=workload.bound, scale=scale)


def _verdict(found: WorkloadFigures, name: str) -> Verdict:
    return next(verdict for verdict in found.verdicts if verdict.name == name)


def test_sound_target_has_good_verdicts() -> None:
    found = _figures(Told({"reported": 0, "decoded": 41}, {"reported": 41, "decoded": 22}))
    assert [v.outcome for v in found.verdicts] == ["ok"] * 4
    assert (found.least, found.decoded, found.ratio) == (63, 63, 1.0)
    first, second = found.requests
    assert (first.total, first.matched, first.cached, first.miss) == (40, 0, 0, None)
    assert (second.total, second.matched, second.cached, second.miss) == (62, 41, 41, None)


def test_short_prompts_are_not_judged_by_a_few_tokens() -> None:
    for scale, decoded, outcome in ((1.0, 60, "bad"), (0.5, 60, "cannot tell"), (0.5, 300, "bad")):
        session = Told({"decoded": 41}, {"decoded": decoded})
        played = WorkloadRunner(session).converse(PLAYED)
        found = _judged(session, PLAYED, played, scale)
        assert _verdict(found, "reuse").outcome == outcome


def test_report_that_contradicts_the_counters_is_bad() -> None:
    found = _figures(Told({"reported": 0, "decoded": 41}, {"reported": 41, "decoded": 63}))
    assert _verdict(found, "reports-what-it-reused").outcome == "bad"
    detail = _verdict(found, "reports-what-it-reused").detail
    assert detail.startswith("chat 0, turn 2: it says 41")  # turns count from one, as in tables and misses


def test_impossible_reuse_is_bad() -> None:
    told = {"reported": 0}, {"reported": 60}
    found = _figures(Told(*told))
    assert _verdict(found, "reports-what-it-reused").outcome == "bad"
    assert _verdict(found, "restores-a-prefix").outcome == "ok"
    found = _figures(Told(*told, same=("same", "different")))
    assert _verdict(found, "restores-a-prefix").outcome == "bad"
    assert _verdict(found, "exact").outcome == "bad"


def test_one_wrong_answer_is_bad_beside_unknown_ones() -> None:
    told = {"decoded": 41}, {"decoded": 22}
    assert _verdict(_figures(Told(*told, same=("same", "unknown"))), "exact").outcome == "cannot tell"
    assert _verdict(_figures(Told(*told, same=("different", "unknown"))), "exact").outcome == "bad"
    tied = _verdict(_figures(Told(*told, same=("tie", "same"))), "exact")
    assert (tied.outcome, tied.detail.endswith(", 1 tie")) == ("ok", True)


def test_answers_that_no_time_was_left_for_are_counted_apart() -> None:
    now = time.monotonic()
    for until, outcome, said in (
        (now + 1e9, "ok", "2 answers as without reuse"),
        (now, "cannot tell", "time"),
    ):
        session = Told({"decoded": 41}, {"decoded": 22})
        played = WorkloadRunner(session).converse(PLAYED)
        found = figures.exact_verdict(figures.judged(session, "it", played, until=until))
        assert (found.outcome, said in found.detail) == (outcome, True)
    session = Told({"decoded": 41}, {"decoded": 22})
    one, two = figures.judged(session, "it", WorkloadRunner(session).converse(PLAYED))
    late = replace(one, figures=replace(one.figures, answer="not compared"))
    found = figures.exact_verdict([late, two])
    said = "1 answers as without reuse; the time was over before the other 1"
    assert (found.outcome, found.detail) == ("ok", said)


def _salted(session: Session) -> WorkloadFigures:
    def asked(speech: Speech) -> Conversation:
        yield Request(2, HEAD)

    player = WorkloadRunner(session)
    for salt in ("a", "b"):
        player.ask(Request(2, HEAD, salt=salt))
    return _judged(session, Workload("salts", asked, measured_from=0), player.played)


def test_prompts_of_other_salts_must_be_decoded() -> None:
    session = Told({"decoded": 41, "reported": 0}, {"decoded": 41, "reported": 0})
    session.salts = True
    found = _salted(session)
    assert (found.least, found.ratio) == (82, 1.0)
    assert "another salt" in str(found.requests[1].miss)
