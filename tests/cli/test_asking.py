"""Requests of the chat run in a thread and can be stopped at any moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from llamahybrid import ContextOverflow, Llama
from llamahybrid.cli.asking import Asking

QUESTION = [{"role": "user", "content": "Hello there"}]
Opener = Callable[..., Any]


@pytest.fixture
def llm(open_model: Opener) -> Llama:
    llm: Llama = open_model(n_ctx=4096)
    return llm


@pytest.fixture
def asking(llm: Llama) -> Iterator[Asking]:
    with closing(Asking(llm)) as asking:
        yield asking


def test_answer_streams_and_ends_with_a_report(llm: Llama, asking: Asking) -> None:
    pieces = [piece for piece in asking.answer(QUESTION, 8) if piece]
    assert len(pieces) > 1
    report = asking.outcome.report
    assert report is not None
    assert (report.generated, asking.outcome.finish, asking.outcome.error) == (8, "length", None)
    asking.prepare([*QUESTION, {"role": "assistant", "content": "".join(pieces)}])
    assert asking.outcome.report is not None
    assert asking.outcome.report.cached > 0


def test_stop_ends_a_running_answer(asking: Asking) -> None:
    got = 0
    for got, _ in enumerate(asking.answer(QUESTION, 4000)):
        if got == 3:
            asking.stop()
    assert asking.outcome.finish == "cancelled"
    assert 3 <= got < 3000


def test_stop_before_a_request_ends_that_one_only(asking: Asking) -> None:
    asking.stop()
    assert "".join(asking.answer(QUESTION, 8)) == ""
    assert asking.outcome.finish == "cancelled"
    asking.rearm()
    assert "".join(asking.answer(QUESTION, 8))
    assert asking.outcome.finish == "length"


def test_failed_request_has_an_error_and_no_report(asking: Asking) -> None:
    list(asking.answer(QUESTION, 1))
    list(asking.answer([{"role": "user", "content": "word " * 4000}], 1))
    assert isinstance(asking.outcome.error, ContextOverflow | ValueError)
    assert asking.outcome.report is None
    list(asking.answer(QUESTION, 1))
    assert asking.outcome.error is None


def test_close_cancels_an_unread_answer(llm: Llama) -> None:
    asking = Asking(llm)
    next(asking.answer(QUESTION, 4000))
    asking.close()
    report = llm.last_request
    assert report is not None
    assert report.cancelled
