"""Verdicts of what was played: on targets that tell all, tell wrong things, or hide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamahybrid.evaluate import figures
from llamahybrid.evaluate.conversation import Conversation, Request
from llamahybrid.evaluate.play import Played, Player
from llamahybrid.evaluate.report import Sameness, Verdict, WorkloadFigures
from llamahybrid.evaluate.speech import Speech, Vocabulary
from llamahybrid.evaluate.targets.base import Ask, Reply, Session
from llamahybrid.evaluate.workloads import Workload


class Told(Session):
    """Answers with what a test says of each request."""

    vocabulary = Vocabulary(tuple(range(100)), None, None)

    def __init__(self, *replies: dict[str, Any], same: Sequence[Sameness] = ("same",) * 9) -> None:
        self._replies, self._same = list(replies), list(same)

    def ask(self, ask: Ask) -> Reply:
        told = self._replies.pop(0)
        known = {"prompt": ask.tokens, "tokens": (7, 8), "total": len(ask.tokens)}
        return Reply("text", 0.5, **{**known, **told})

    def sameness(self, ask: Ask, reply: Reply) -> tuple[Sameness, str]:
        return self._same.pop(0), "said"


HEAD = tuple(range(40))


def _workload(speech: Speech) -> Conversation:
    yield Request(2, HEAD)
    yield Request(2, (*HEAD, 7, 8, *range(20)))


PLAYED = Workload("two turns", _workload, measured_from=0)


def _figures(session: Session, total: int | None = None) -> WorkloadFigures:
    return figures.workload_figures(session, PLAYED, Player(session).converse(PLAYED), total)


def _verdict(found: WorkloadFigures, name: str) -> Verdict:
    return next(verdict for verdict in found.verdicts if verdict.name == name)


def test_all_is_told_and_right() -> None:
    found = _figures(Told({"reported": 0, "decoded": 41}, {"reported": 41, "decoded": 22}))
    assert [v.outcome for v in found.verdicts] == ["ok"] * 4
    assert (found.least, found.decoded, found.ratio) == (63, 63, 1.0)
    first, second = found.requests
    assert (first.total, first.matched, first.cached, first.left, first.miss) == (40, 0, 0, 40, None)
    assert (second.total, second.matched, second.cached, second.left, second.miss) == (62, 41, 41, 21, None)


def test_what_is_decoded_again_is_a_miss() -> None:
    found = _figures(Told({"decoded": 41}, {"decoded": 63}))
    assert _verdict(found, "reuse").outcome == "bad"
    assert "41 tokens" in str(found.requests[1].miss)
    assert found.ratio == 104 / 63


def test_counters_that_disagree_with_what_is_reported() -> None:
    found = _figures(Told({"reported": 0, "decoded": 41}, {"reported": 41, "decoded": 63}))
    assert _verdict(found, "reports-what-it-reused").outcome == "bad"
    detail = _verdict(found, "reports-what-it-reused").detail
    assert detail.startswith("chat 0, turn 2: it says 41")  # turns count from one, as in tables and misses


def test_more_than_was_ever_said_is_a_lie_where_the_answer_is_right() -> None:
    told = {"reported": 0}, {"reported": 60}
    found = _figures(Told(*told))
    assert _verdict(found, "reports-what-it-reused").outcome == "bad"
    assert _verdict(found, "restores-a-prefix").outcome == "ok"
    found = _figures(Told(*told, same=("same", "different")))
    assert _verdict(found, "restores-a-prefix").outcome == "bad"
    assert _verdict(found, "exact").outcome == "bad"


def test_more_than_the_prompt_has() -> None:
    found = _figures(Told({"reported": 41}, {"reported": 0}))
    assert "41 reused of a prompt of 40" in _verdict(found, "reports-what-it-reused").detail


def test_what_is_hidden_is_not_judged() -> None:
    hidden = {"prompt": None, "tokens": None, "total": None}
    found = _figures(Told(hidden, hidden, same=("unknown", "unknown")))
    assert {v.outcome for v in found.verdicts} == {"cannot tell"}
    assert (found.least, found.decoded, found.ratio) == (None, None, None)
    assert {(r.total, r.matched, r.cached, r.left, r.decoded) for r in found.requests} == {(None,) * 5}


def test_one_answer_that_cannot_be_checked_leaves_exactness_open_and_a_wrong_one_does_not() -> None:
    told = {"decoded": 41}, {"decoded": 22}
    assert _verdict(_figures(Told(*told, same=("same", "unknown"))), "exact").outcome == "cannot tell"
    assert _verdict(_figures(Told(*told, same=("different", "unknown"))), "exact").outcome == "bad"
    tied = _verdict(_figures(Told(*told, same=("tie", "same"))), "exact")
    assert (tied.outcome, tied.detail.endswith(", 1 tie")) == ("ok", True)


def test_of_several_at_once_the_whole_is_counted() -> None:
    found = _figures(Told({"reported": 0}, {"reported": 41}), total=63)
    assert (found.decoded, found.ratio) == (63, 1.0)
    assert {each.decoded for each in found.requests} == {None}


def test_one_that_was_sent_later_may_have_been_served_before() -> None:
    ask = Ask(2, HEAD)
    reply = Reply("", 5.0, prompt=HEAD, tokens=(7, 8), total=40, reported=30)
    other = Reply("", 1.0, prompt=HEAD[:30], tokens=(7, 8), total=30, reported=0)
    played = [Played("0", 0, 0, 1.0, ask, reply), Played("1", 0, 0, 2.0, Ask(2, HEAD[:30]), other)]
    session = Told()
    assert figures.requests(session, "w", played, [("same", "")] * 2)[0].matched == 0
    session.parallel = 2
    assert figures.requests(session, "w", played, [("same", "")] * 2)[0].matched == 30


def _salted(session: Session) -> WorkloadFigures:
    def asked(speech: Speech) -> Conversation:
        yield Request(2, HEAD)

    player = Player(session)
    for salt in ("a", "b"):
        player.ask(Ask(2, HEAD, salt=salt))
    return figures.workload_figures(session, Workload("salts", asked, measured_from=0), player.played, None)


def test_what_another_salt_said_has_to_be_decoded() -> None:
    session = Told({"decoded": 41, "reported": 0}, {"decoded": 41, "reported": 0})
    session.salts = True
    found = _salted(session)
    assert (found.least, found.ratio) == (82, 1.0)
    assert "another salt" in str(found.requests[1].miss)


def test_a_target_without_salts_may_share_all() -> None:
    session = Told({"decoded": 41, "reported": 0}, {"decoded": 1, "reported": 40})
    session.salts = False
    found = _salted(session)
    assert (found.least, found.ratio) == (42, 1.0)
    assert found.requests[1].miss is None
    assert _verdict(found, "reports-what-it-reused").outcome == "ok"
