"""The last requests."""

from __future__ import annotations

from llamahybrid.request.report import RequestReport
from llamahybrid.server.history import MOST_REQUESTS, History
from llamahybrid.server.job import Done


def report(total: int, cached: int, generated: int) -> RequestReport:
    return RequestReport(total, cached, cached, "ram", "with a 'token'", generated, first_token_seconds=0.5)


def test_the_newest_come_first_and_old_ones_go() -> None:
    history = History()
    for n in range(MOST_REQUESTS + 5):
        history.add("", Done((report(n, 0, 1),)), 0.0, "done")
    assert [past.prompt for past in history][:2] == [MOST_REQUESTS + 4, MOST_REQUESTS + 3]
    assert len(list(history)) == MOST_REQUESTS


def test_answers_to_one_prompt_are_one_request_and_its_reason_names_no_token() -> None:
    history = History()
    history.add("tag", Done((report(10, 4, 3), report(10, 10, 5)), ("why", "repeated")), 0.25, "done")
    (past,) = history
    assert (past.prompt, past.cached, past.generated, past.reason) == (10, 4, 8, "why")
    assert (past.tag, past.waited, past.first_token_seconds) == ("tag", 0.25, 0.5)


def test_what_failed_is_told_too() -> None:
    history = History()
    history.add("", None, 1.0, "failed")
    history.add("", Done(()), 1.0, "cancelled")
    assert [(past.end, past.prompt) for past in history] == [("cancelled", 0), ("failed", 0)]
