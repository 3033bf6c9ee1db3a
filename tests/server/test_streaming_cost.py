"""What a token of a stream costs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamahybrid.server.answer import Answer
from llamahybrid.server.job import Item, Job
from tests.lab.real_costs import REAL, decide_by
from tests.lab.serving import serving

TinyModel = Callable[..., Path]


EARLY, LATE = 20, 2000
TOKENS = 20
"""So many are watched from each of them on."""


class Lines:
    """Lines of Python that ran in the threads that ask for it, by which of the windows it was."""

    def __init__(self) -> None:
        self.ran = {EARLY: 0, LATE: 0}

    def forget(self) -> None:
        """Begin anew."""
        self.ran = dict.fromkeys(self.ran, 0)

    def watch(self, token: int) -> None:
        """Called in a thread at each token: watch what it does until the next one, where that matters."""
        window = next((start for start in self.ran if start <= token < start + TOKENS), None)

        def trace(frame: Any, event: str, arg: Any) -> Any:
            assert window is not None
            self.ran[window] += event == "line"
            return trace

        sys.settrace(None if window is None else trace)


def test_a_token_takes_as_much_after_2000_of_them_as_after_20(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, not timed: lines that run in the request's thread, and for an event in the server's.

    How many tokens come in one write is a matter of time, and with it what else the server's thread does.
    """
    made, sent, counts = Lines(), Lines(), [0, 0]
    put, events = Job._put, Answer._events

    def watched_put(job: Job, item: Item) -> None:
        counts[0] += 1
        made.watch(counts[0])
        put(job, item)

    def watched_events(*args: Any) -> Any:
        counts[1] += 1
        sent.watch(counts[1])
        try:
            return events(*args)
        finally:
            sys.settrace(None)

    monkeypatch.setattr(Job, "_put", watched_put)
    monkeypatch.setattr(Answer, "_events", watched_events)
    asked = {"prompt": "x", "max_tokens": 2050, "temperature": 0.0, "stream": True, "repeat_penalty": 1.0}
    with serving(tiny_model("qwen35"), model={"n_ctx": 4096, "n_parallel": 2}) as server:
        decide_by(server.llm)  # else what is measured chooses how many checkpoints each window has
        with server.client() as client:
            first = {**asked, "prompt": "y" * 500, "max_tokens": 2}
            assert client.post("/v1/completions", json=first).status_code == 200
            costs = server.llm.slots.all[0].evaluation.runner.meter.costs()
            assert costs.token_seconds == REAL.token_seconds, "it was measured, so these count"
            counts[:] = 0, 0
            made.forget()
            sent.forget()
            assert client.post("/v1/completions", json=asked).text.endswith("data: [DONE]\n\n")
        server.await_settled()
    for lines in (made, sent):
        assert lines.ran[EARLY] > TOKENS, "they were counted"
        assert lines.ran[LATE] <= 1.2 * lines.ran[EARLY] + 100, lines.ran
