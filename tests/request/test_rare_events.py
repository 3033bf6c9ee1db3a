"""What seldom happens to the decode loop: no thread, signals, cancels beside others, callbacks that block."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.request.asking import DEADLINE, WORDS, take

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
