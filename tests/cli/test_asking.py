"""Requests of the chat: in a thread, stopped at any moment."""

from __future__ import annotations

import threading
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


def test_an_answer_comes_in_pieces_and_then_its_report(llm: Llama, asking: Asking) -> None:
    pieces = [piece for piece in asking.answer(QUESTION, 8) if piece]
    assert len(pieces) > 1
    report = asking.outcome.report
    assert report is not None
    assert (report.generated, asking.outcome.finish, asking.outcome.error) == (8, "length", None)
    asking.prepare([*QUESTION, {"role": "assistant", "content": "".join(pieces)}])
    assert asking.outcome.report is not None
    assert asking.outcome.report.cached > 0


def test_it_is_asked_in_another_thread(llm: Llama, asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[threading.Thread] = []
    create = llm.create_chat_completion

    def created(*args: Any, **options: Any) -> Any:
        asked.append(threading.current_thread())
        return create(*args, **options)

    monkeypatch.setattr(llm, "create_chat_completion", created)
    for _ in range(2):
        list(asking.answer(QUESTION, 1))
    assert asked[0] is asked[1] is not threading.main_thread(), "Python hears Ctrl-C in the main thread only"


def test_an_answer_is_stopped_in_the_middle(asking: Asking) -> None:
    got = 0
    for got, _ in enumerate(asking.answer(QUESTION, 4000)):
        if got == 3:
            asking.stop()
    assert asking.outcome.finish == "cancelled"
    assert 3 <= got < 3000


def test_a_stop_before_the_request_began_stops_it_and_no_later_one(asking: Asking) -> None:
    asking.stop()
    assert "".join(asking.answer(QUESTION, 8)) == ""
    assert asking.outcome.finish == "cancelled"
    asking.rearm()
    assert "".join(asking.answer(QUESTION, 8))
    assert asking.outcome.finish == "length"


def test_a_failure_is_told_without_an_older_report(asking: Asking) -> None:
    list(asking.answer(QUESTION, 1))
    list(asking.answer([{"role": "user", "content": "word " * 4000}], 1))
    assert isinstance(asking.outcome.error, ContextOverflow | ValueError)
    assert asking.outcome.report is None
    list(asking.answer(QUESTION, 1))
    assert asking.outcome.error is None


def test_closing_ends_an_answer_that_nobody_reads(llm: Llama) -> None:
    asking = Asking(llm)
    next(asking.answer(QUESTION, 4000))
    asking.close()
    report = llm.last_request
    assert report is not None
    assert report.cancelled
