"""Validation of requests."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from llamahybrid.server.bodies import ChatCompletionRequest, CompletionRequest
from llamahybrid.server.embeddings import EmbeddingRequest
from llamahybrid.server.errors import Refusal
from llamahybrid.server.schemas import MOST_LETTERS, MOST_REPEATS
from llamahybrid.server.tokens import DetokenizeRequest

HELLO = [{"role": "user", "content": "hi"}]


def chat(**said: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest(messages=HELLO, **said)


def supported(body: Any) -> bool:
    try:
        body.require_supported(max_n=16, max_logprobs=20)
    except Refusal:
        return False
    return True


@pytest.mark.parametrize("name", ["guided_regex", "grammar"])
def test_the_refusal_of_a_form_beside_a_chosen_tool_names_the_field_that_was_sent(name: str) -> None:
    with pytest.raises(Refusal) as refused:
        chat(**{name: "a"}, tool_choice="required").require_supported(max_n=16, max_logprobs=20)
    assert refused.value.param == name
    assert name in refused.value.message


def test_options_of_a_stream_are_for_streams() -> None:
    assert supported(chat(stream_options={"include_usage": True}, stream=True))
    assert not supported(chat(stream_options={"include_usage": True}))


@pytest.mark.parametrize(
    ("prompt", "taken"),
    [
        *[("a", ["a"]), (["a"], ["a"]), ([1, 2], [[1, 2]]), ([[1, 2]], [[1, 2]]), ([], [""]), ("", [""])],
        *[(["a", ""], ["a", ""]), ([[1], [2, 3]], [[1], [2, 3]])],
    ],
)
def test_prompts_are_texts_or_lists_of_tokens(prompt: Any, taken: Any) -> None:
    assert CompletionRequest(prompt=prompt).prompts() == taken


def test_impossible_requests_are_refused() -> None:
    assert not supported(CompletionRequest(prompt="a", best_of=3))
    assert supported(CompletionRequest(prompt="a", n=3, best_of=3))
    assert supported(CompletionRequest(prompt=[1], echo=True))
    assert not supported(CompletionRequest(prompt="a", echo=True, stream=True))
    for n, fine in ((None, True), (1, True), (16, True), (17, False), (0, False), (-1, False)):
        assert supported(CompletionRequest(prompt="a", n=n)) is fine
    assert supported(CompletionRequest(prompt=["a"] * 1000))
    assert not supported(CompletionRequest(prompt=["a"] * 1001))
    assert supported(chat())
    assert not supported(ChatCompletionRequest(messages=[]))
    for prompt, stream, fine in (("a", True, True), ("a", False, False), (["a", "b"], True, False)):
        body = CompletionRequest(prompt=prompt, stream=stream, return_progress=True)
        assert supported(body) is fine
    assert supported(CompletionRequest(prompt="a", logprobs=20))
    assert not supported(CompletionRequest(prompt="a", logprobs=21))
    assert supported(chat(logprobs=True, top_logprobs=20))
    assert not supported(chat(logprobs=True, top_logprobs=10**9))


FORM = {"response_format": {"type": "json_object"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    "form",
    [
        FORM,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tools": [TOOL], "tool_choice": "required"},
        {"functions": [TOOL["function"]], "function_call": {"name": "f"}},
    ],
)
def test_an_answer_does_not_follow_two_forms(form: dict[str, Any]) -> None:
    with pytest.raises(Refusal) as told:
        chat(grammar='root ::= "a"', **form).require_supported(16, 20)
    assert (told.value.status, told.value.param) == (400, "grammar")
    assert supported(chat(**form))


@pytest.mark.parametrize("form", [{"response_format": {"type": "text"}}, {"tools": [TOOL]}, {}])
def test_grammar_with_a_text_format_is_followed(form: dict[str, Any]) -> None:
    assert supported(chat(grammar='root ::= "a"', **form))


def test_newer_names() -> None:
    assert chat(max_completion_tokens=7).max_tokens == 7
    with pytest.raises(ValidationError, match="same field"):
        chat(max_tokens=5, max_completion_tokens=7)
    schema = {"type": "object"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert chat(response_format=form).response_format == {"type": "json_object", "schema": schema}
    for wrong in ({"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": "no"}}):
        with pytest.raises(ValidationError):
            chat(response_format=wrong)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_are_numbers(value: float) -> None:
    with pytest.raises(ValidationError):
        chat(temperature=value)
    with pytest.raises(ValidationError):
        chat(logit_bias={"5": value})
    with pytest.raises(ValidationError):
        CompletionRequest(prompt="a", presence_penalty=value)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (CompletionRequest, {"prompt": [1.5] * 5000}),
        (CompletionRequest, {"prompt": [["a"]] * 5000}),
        (CompletionRequest, {"prompt": [["a"] * 5000]}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * 5000}),
        (CompletionRequest, {"prompt": "a", "logit_bias": {str(i): "x" for i in range(200_001)}}),
        (ChatCompletionRequest, {"messages": [{"role": 1}] * 5000}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": [{}] * 5000}]}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": "a"}], "stop": [1] * 5000}),
        (ChatCompletionRequest, {"tools": [{}] * 5000}),
        (ChatCompletionRequest, {"functions": [{}] * 5000}),
        (ChatCompletionRequest, {"messages": HELLO, "tools": [TOOL] * 1001}),
        (ChatCompletionRequest, {"messages": HELLO, "functions": [TOOL["function"]] * 1001}),
        (ChatCompletionRequest, {"messages": HELLO, "stop": ["x"] * 1001}),
        (CompletionRequest, {"prompt": "a", "stop": ["x"] * 1001}),
        (CompletionRequest, {"prompt": "a", "stop": ["x" * 1001] * 2}),
        (CompletionRequest, {"prompt": "a", "guided_choice": ["x"] * 10_001}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": ["x"] * 5000}),
        (EmbeddingRequest, {"input": [None] * 5000}),
        (DetokenizeRequest, {"tokens": ["a"] * 5000}),
    ],
)
def test_only_the_first_of_many_faults_is_reported(body: type[BaseModel], said: dict[str, Any]) -> None:
    """A report of all faults fills memory and blocks the event loop."""
    with pytest.raises(ValidationError) as refused:
        body(**said)
    assert refused.value.error_count() < 50


# -- what OpenAI's clients send ----------------------------------------------------------------------------


def test_tool_call_may_be_sent_back_unchanged() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = [
        {"role": "developer", "content": "be short"},
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
    ]
    developer, _, assistant, _ = ChatCompletionRequest(messages=said).messages
    assert developer["role"] == "system"
    assert "content" not in assistant
    assert assistant["tool_calls"] == [call]


def test_a_tool_may_take_nothing() -> None:
    nothing = {"type": "object", "properties": {}}
    (tool,) = chat(tools=[{"type": "function", "function": {"name": "f"}}]).tools or []
    assert tool["function"]["parameters"] == nothing
    (function,) = chat(functions=[{"name": "f", "parameters": None}]).functions or []
    assert function["parameters"] == nothing


def test_faults_of_a_message_name_its_role() -> None:
    with pytest.raises(ValidationError) as wrong:
        ChatCompletionRequest(messages=[{"role": "tool", "content": "4"}])
    (error,) = wrong.value.errors()
    assert error["loc"] == ("messages", 0, "tool", "tool_call_id")
    with pytest.raises(ValidationError, match="role"):
        ChatCompletionRequest(messages=[{"role": "someone", "content": "4"}])


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
    assert [supported(chat(**way)) for way in ways(schema)] == [fine] * 4
    assert supported(CompletionRequest(prompt="a", json_schema=schema)) is fine


def test_each_tool_may_have_a_large_schema() -> None:
    function = {"name": "f", "parameters": HALF}
    assert supported(chat(tools=[{"type": "function", "function": function}] * 2))


@pytest.mark.parametrize(("letters", "fine"), [(MOST_LETTERS, True), (MOST_LETTERS + 1, False)])
def test_a_grammar_is_bounded(letters: int, fine: bool) -> None:
    assert supported(chat(grammar="x" * letters)) is fine
    assert supported(CompletionRequest(prompt="a", grammar="x" * letters)) is fine
