"""Validation of requests."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from llamahybrid.server.bodies import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
)
from llamahybrid.server.errors import Refusal

HELLO = [{"role": "user", "content": "hi"}]


def chat(**said: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest(messages=HELLO, **said)


def test_options_of_a_stream_are_for_streams() -> None:
    asked = chat(stream_options={"include_usage": True})
    asked.require_understood(stream=True)
    with pytest.raises(Refusal, match="stream"):
        asked.require_understood(stream=False)


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
    assert CompletionRequest(prompt="a", best_of=3).refused(16, 20)
    assert CompletionRequest(prompt="a", n=3, best_of=3).refused(16, 20) is None
    assert CompletionRequest(prompt=[1], echo=True).refused(16, 20) is None
    assert CompletionRequest(prompt="a", echo=True, stream=True).refused(16, 20)
    for n, fine in ((None, True), (1, True), (16, True), (17, False), (0, False), (-1, False)):
        assert (CompletionRequest(prompt="a", n=n).refused(16, 20) is None) is fine
    assert CompletionRequest(prompt=["a"] * 1000).refused(16, 20) is None
    assert CompletionRequest(prompt=["a"] * 1001).refused(16, 20)
    assert chat().refused(16, 20) is None
    assert ChatCompletionRequest(messages=[]).refused(16, 20)
    assert CompletionRequest(prompt="a", logprobs=20).refused(16, 20) is None
    assert CompletionRequest(prompt="a", logprobs=21).refused(16, 20)
    assert chat(logprobs=True, top_logprobs=20).refused(16, 20) is None
    assert chat(logprobs=True, top_logprobs=10**9).refused(16, 20)


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
    told = chat(grammar='root ::= "a"', **form).refused(16, 20)
    assert told is not None
    assert (told.status, told.param) == (400, "grammar")
    assert chat(**form).refused(16, 20) is None


@pytest.mark.parametrize("form", [{"response_format": {"type": "text"}}, {"tools": [TOOL]}, {}])
def test_grammar_with_a_text_format_is_followed(form: dict[str, Any]) -> None:
    assert chat(grammar='root ::= "a"', **form).refused(16, 20) is None


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


@pytest.mark.parametrize(
    "said", [{"input": ""}, {"input": []}, {"input": ["a", ""]}, {"input": "a", "dimensions": 3}]
)
def test_impossible_embeddings_are_refused(said: Any) -> None:
    with pytest.raises(Refusal):
        EmbeddingRequest(**said).require_understood()
    EmbeddingRequest(input=["a"], encoding_format="base64").require_understood()
