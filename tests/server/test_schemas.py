"""A JSON schema or grammar that would take too long, or too much memory, is refused."""

from __future__ import annotations

from typing import Any

import pytest

from llamahybrid.server.bodies import ChatCompletionRequest, CompletionRequest
from llamahybrid.server.schemas import MOST_LETTERS, MOST_REPEATS

HELLO: list[Any] = [{"role": "user", "content": "hi"}]
HALF = {"enum": ["x" * (MOST_LETTERS // 2)]}


def ways(schema: Any) -> list[dict[str, Any]]:
    """Requests that say a schema."""
    function = {"name": "f", "parameters": schema}
    return [
        {"response_format": {"type": "json_object", "schema": schema}},
        {"guided_json": schema},
        {"tools": [{"type": "function", "function": function}]},
        {"functions": [function]},
    ]


def refused(**said: Any) -> bool:
    return ChatCompletionRequest(messages=HELLO, **said).refused(16, 20) is not None


@pytest.mark.parametrize(
    ("schema", "fine"),
    [
        ({}, True),
        ({"type": "string", "minLength": 7, "maxLength": 500}, True),
        ({"minLength": MOST_REPEATS}, True),
        ({"minLength": MOST_REPEATS + 1}, False),
        ({"properties": {"a": {"maxItems": MOST_REPEATS, "items": {"maxLength": 3}}}}, False),
        ({"anyOf": [{"minItems": MOST_REPEATS}, {"minItems": 3}]}, False),
        ({"pattern": "^(a{300}b){300}$"}, True),
        ({"pattern": "^(a{9000}){9000}$"}, False),
        ({"pattern": "x{1000000000}"}, False),
        ({"enum": [{"minLength": 10**9}], "default": {"maxItems": 10**9}}, True),
        ({"properties": {"minLength": {"maxLength": 4}}}, True),
        ({"minLength": "many"}, True),
        (HALF, True),
        ({"anyOf": [HALF, HALF]}, False),
        ({"enum": list(range(MOST_LETTERS // 3))}, False),
    ],
)
def test_schemas_are_bounded_in_every_field(schema: Any, fine: bool) -> None:
    assert [refused(**way) for way in ways(schema)] == [not fine] * 4
    form = CompletionRequest(prompt="a", json_schema=schema)
    assert (form.refused(16, 20) is None) is fine


def test_each_tool_may_have_a_large_schema() -> None:
    function = {"name": "f", "parameters": HALF}
    assert not refused(tools=[{"type": "function", "function": function}] * 2)


@pytest.mark.parametrize(("letters", "fine"), [(MOST_LETTERS, True), (MOST_LETTERS + 1, False)])
def test_a_grammar_is_bounded(letters: int, fine: bool) -> None:
    assert refused(grammar="x" * letters) is not fine
    assert (CompletionRequest(prompt="a", grammar="x" * letters).refused(16, 20) is None) is fine
