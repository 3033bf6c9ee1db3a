"""Requests of several threads take turns, and an interrupt at any line of a turn leaves the model usable."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest

from llamahybrid.client import completion, requests
from llamahybrid.core import admission, loop, messages

pytestmark = [
    pytest.mark.xdist_group("serial"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
PROMPT = [(7 * i + 1) % 200 for i in range(20)]
TURNS = {module.__file__ for module in (completion, requests, loop, admission, messages)}


def ask(llm: Any, more: tuple[int, ...] = ()) -> str:
    text: str = llm.create_completion([*PROMPT, *more], max_tokens=2, temperature=0.0)["choices"][0]["text"]
    return text


def test_request_that_is_over_keeps_no_other_thread_out(
    open_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "PATIENCE", 600.0)
    llm = open_model(wait=False)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, llm).result()
    assert ask(llm) == first


class Interrupt:
    """Raises KeyboardInterrupt at one of the lines of a turn; counts them."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.lines = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> Interrupt | None:
        if frame.f_code.co_filename not in TURNS:
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                raise KeyboardInterrupt
        return self


def traced(interrupt: Interrupt, work: Callable[[], object]) -> None:
    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        with suppress(KeyboardInterrupt):
            work()
    finally:
        sys.settrace(before)


def test_interrupt_at_any_line_of_a_turn_leaves_the_model_usable(open_model: Callable[..., Any]) -> None:
    llm = open_model()
    wanted = ask(llm, (5,))
    whole = Interrupt(0)
    traced(whole, lambda: ask(llm))
    assert whole.lines > 50
    for line in range(1, whole.lines + 1):
        traced(Interrupt(line), lambda: ask(llm))
        assert ask(llm, (5,)) == wanted, f"after an interrupt at line {line} of {whole.lines}"
