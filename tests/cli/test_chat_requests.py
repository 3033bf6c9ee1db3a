"""Requests of the chat can be stopped at any moment."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from llamahybrid import ContextOverflow, Llama
from llamahybrid.cli.chat_requests import ChatRequests

QUESTION = [{"role": "user", "content": "Hello there"}]
Opener = Callable[..., Any]


@pytest.fixture
def llm(open_model: Opener) -> Llama:
    llm: Llama = open_model(n_ctx=4096)
    return llm


@pytest.fixture
def requests(llm: Llama) -> ChatRequests:
    return ChatRequests(llm, lambda progress: None)


def test_answer_streams_and_ends_with_a_report(llm: Llama, requests: ChatRequests) -> None:
    pieces = [piece for piece in requests.answer(QUESTION, 8) if piece]
    assert len(pieces) > 1
    report = requests.outcome.report
    assert report is not None
    assert (report.generated, requests.outcome.finish, requests.outcome.error) == (8, "length", None)
    requests.prepare([*QUESTION, {"role": "assistant", "content": "".join(pieces)}])
    assert requests.outcome.report is not None
    assert requests.outcome.report.cached > 0


def test_stop_ends_a_running_answer(requests: ChatRequests) -> None:
    got = 0
    for got, _ in enumerate(requests.answer(QUESTION, 4000)):
        if got == 3:
            requests.stop()
    assert requests.outcome.finish == "cancelled"
    assert 3 <= got < 3000


def test_stop_before_a_request_ends_that_one_only(requests: ChatRequests) -> None:
    requests.stop()
    assert "".join(requests.answer(QUESTION, 8)) == ""
    assert requests.outcome.finish == "cancelled"
    requests.rearm()
    assert "".join(requests.answer(QUESTION, 8))
    assert requests.outcome.finish == "length"


def test_failed_request_has_an_error_and_no_report(requests: ChatRequests) -> None:
    list(requests.answer(QUESTION, 1))
    list(requests.answer([{"role": "user", "content": "word " * 4000}], 1))
    assert isinstance(requests.outcome.error, ContextOverflow | ValueError)
    assert requests.outcome.report is None
    list(requests.answer(QUESTION, 1))
    assert requests.outcome.error is None


def test_closing_an_answer_ends_it(llm: Llama, requests: ChatRequests) -> None:
    with closing(requests.answer(QUESTION, 4000)) as answer:
        next(answer)
    report = llm.last_request
    assert report is not None
    assert report.generated < 3000
