"""What seldom happens to the decode loop: no thread, signals, cancels beside others, callbacks that block."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from tests.request.asking import DEADLINE, WORDS, begin, take, until

Opened = Callable[..., Any]


def test_a_loop_that_gets_no_thread_says_so(
    opened: Opened, stock: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, right, start, raised = opened(), stock(), threading.Thread.start, list[BaseException]()

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "llamahybrid-decode":
            raise RuntimeError("can't start new thread")  # as under a limit of processes
        start(thread)

    def ask() -> None:
        try:
            take(llm, WORDS[:40])
        except RuntimeError as error:
            raised.append(error)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(DEADLINE)
    assert "can't start" in str(raised[0])
    assert take(llm, WORDS[:40]) == right(WORDS[:40])


def test_cancel_reaches_a_request_whose_message_is_not_read_yet(opened: Opened) -> None:
    llm, held, go_on = opened(), threading.Event(), threading.Event()
    finished: dict[str, str] = {}

    def hold(progress: Any) -> None:
        held.set()
        assert go_on.wait(DEADLINE)

    def ask(name: str, **request: Any) -> None:
        with llm.request(**request) as handle:
            handles[name] = handle
            made = llm.create_completion(WORDS[:40], max_tokens=4, temperature=0.0)
        finished[name] = made["choices"][0]["finish_reason"]

    handles: dict[str, Any] = {}
    first = threading.Thread(target=ask, args=("first",), kwargs={"on_progress": hold}, daemon=True)
    first.start()
    assert held.wait(DEADLINE)  # the loop is in a callback, as it may be in a long batch
    second = threading.Thread(target=ask, args=("second",), daemon=True)
    second.start()
    until(lambda: "second" in handles and waits_for_reply(second))
    llm.cancel()
    go_on.set()
    first.join(DEADLINE)
    second.join(DEADLINE)
    assert finished == {"first": "cancelled", "second": "cancelled"}


def waits_for_reply(thread: threading.Thread) -> bool:
    """The thread has sent its message: it is in `Reply.get`."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code.co_name == "get" and "llamahybrid" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def test_tokens_sent_into_a_stream_after_another_took_its_slot(opened: Opened) -> None:
    """Those sent before are lost with the slot (`RequestSuperseded`), later ones are not."""
    said = []
    for preempted in (False, True):
        llm = opened(logits_all=True)
        stream, _ = begin(llm, WORDS[:40], 2)
        if preempted:
            take(llm, WORDS[100:140], 3)
        said.append([stream.send([3, 4]), *islice(stream, 4)])
    assert said[0] == said[1]
