"""What is asked survives a way through JSON, and what was reused is told by the best witness there is."""

from __future__ import annotations

import json

import pytest

from llamahybrid.evaluate.conversation import Request
from llamahybrid.evaluate.targets.base import Ask, Reply


def test_what_is_asked_is_the_same_after_a_way_through_json() -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    ask = Ask(8, (1, 2), ({"role": "user", "content": "Hello."},), (tool,), "text", 3, "mine")
    assert Ask.from_json(json.loads(json.dumps(ask.as_json()))) == ask


def test_a_workloads_request_is_asked_with_all_that_it_says() -> None:
    messages = [{"role": "user", "content": "Hello."}]
    ask = Ask.of(Request(max_tokens=8, tokens=(1, 2), messages=messages, tools=[{"a": 1}], seed=3))
    assert ask == Ask(8, (1, 2), tuple(messages), ({"a": 1},), seed=3)


@pytest.mark.parametrize(
    ("told", "reused", "cached"),
    [
        ({}, None, None),
        ({"total": 10}, None, None),
        ({"total": 10, "worked": 4}, 6, 6),
        ({"total": 10, "worked": 4, "decoded": 5, "tokens": (1, 2, 3)}, 7, 7),  # the third was never decoded
        ({"total": 10, "decoded": 10, "tokens": (1,)}, 0, 0),
        ({"total": 10, "decoded": 0, "tokens": ()}, None, None),  # no answer, so nothing had to be decoded
        ({"total": 10, "decoded": 5}, None, None),  # prompt or answer?
        ({"total": 10, "worked": 4, "reported": 0}, 6, 0),  # what it says, true or not
        ({"reported": 3}, None, 3),
    ],
)
def test_what_was_reused(told: dict[str, object], reused: int | None, cached: int | None) -> None:
    reply = Reply("", 0.0, **told)
    assert (reply.reused, reply.cached) == (reused, cached)
