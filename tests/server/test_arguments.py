"""From bodies to arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llamahybrid.server.arguments import AtLeast, arguments, biases
from llamahybrid.server.bodies import ChatCompletionRequest, CompletionRequest
from llamahybrid.server.errors import Refusal


class Vocabulary:
    """A model of 100 tokens, one for each letter."""

    chat_handler = None

    def n_vocab(self) -> int:
        return 100

    def tokenize(self, text: bytes, **_: Any) -> list[int]:
        return [letter - 64 for letter in text]


LLM: Any = Vocabulary()


def test_what_is_no_argument_is_left_out() -> None:
    body = CompletionRequest(prompt=["a"], cache_salt="", stream=True, presence_penalty=None, n=2, user="me")
    told = arguments(LLM, body, "alias")
    assert told["prompt"] == "a"
    assert told["model"] == "alias"
    assert (told["n"], told["stream"], told["presence_penalty"]) == (2, True, 0.0)
    assert not {"best_of", "user", "cache_salt", "stream_options", "id_slot", "min_tokens"} & set(told)
    chat = ChatCompletionRequest(messages=[{"role": "user", "content": "hi"}], grammar="root ::= []")
    assert arguments(LLM, chat, "alias")["grammar"]._grammar == "root ::= []"


def bias(said: dict[str, float], kind: Any = None) -> dict[int, float]:
    return biases(LLM, CompletionRequest(prompt="a", logit_bias=said, logit_bias_type=kind))


def test_biases() -> None:
    assert bias({"5": 1.5, "99": -100}) == {5: 1.5, 99: -100}
    assert bias({"AB": 2}, "tokens") == {1: 2, 2: 2}


@pytest.mark.parametrize("name", ["100", "-1", "x", "", "1.5", "9" * 30, "\uff15", "+5"])
def test_a_bias_is_of_a_token_that_there_is(name: str) -> None:
    with pytest.raises(Refusal) as refused:
        bias({name: 1})
    assert refused.value.param == "logit_bias"


def test_a_bias_stays_a_number() -> None:
    with pytest.raises(Refusal):
        bias({"5": 1e38})


def test_an_answer_does_not_end_before_it_has_its_tokens_and_nothing_becomes_infinite() -> None:
    least, scores = AtLeast(2, [3, 5]), np.ones(10, np.single)
    ids = np.arange(50, dtype=np.intc)
    for n, ends in (
        (5, False),
        (6, False),
        (7, True),
        (5, False),
        (6, False),
        (7, True),
        (4, False),
        (6, True),
    ):
        told = least(ids[:n], scores)
        assert (told[3] > 0) == (told[5] > 0) == ends, n
        assert told[4] == 1
        assert np.isfinite(told).all()
        assert (scores == 1).all()


# -- forms of an answer ----------------------------------------------------------------------------------


def chat(**said: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest(messages=[{"role": "user", "content": "hi"}], **said)


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


UNCONVERTIBLE = [
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}, "required": ["a"]},
    {"$ref": "https://example.com/schema.json"},
    {"type": "string", "pattern": "^([0-9{3}$"},
    {"type": "text"},
    {"type": "string", "minLength": "9"},
]


@pytest.mark.parametrize("schema", UNCONVERTIBLE)
def test_a_schema_that_cannot_be_followed_is_refused(schema: Any) -> None:
    with pytest.raises(Refusal) as refused:
        arguments(LLM, chat(response_format={"type": "json_object", "schema": schema}), "")
    assert refused.value.param == "response_format"
    named = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(Refusal) as refused:
        arguments(LLM, chat(tools=[tool("f", schema)], tool_choice=named), "")
    assert refused.value.param == "tools"
    arguments(LLM, chat(tools=[tool("f", schema)], tool_choice="auto"), "")  # no grammar is made of it


def test_a_schema_that_can_be_followed_is_not() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for form in ({"type": "json_object", "schema": schema}, {"type": "json_object"}, {"type": "text"}, None):
        assert arguments(LLM, chat(response_format=form), "")["response_format"] == form


@pytest.mark.parametrize(
    "choice", [{"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}}]
)
def test_a_tool_that_there_is_not_cannot_be_chosen(choice: Any) -> None:
    for tools in ({}, {"tools": []}):
        with pytest.raises(Refusal) as refused:
            arguments(LLM, chat(**choice, **tools), "")
        assert refused.value.param == "tool_choice"
    arguments(LLM, chat(**choice, tools=[tool("f", {"type": "object", "properties": {}})]), "")


def test_required_is_the_only_tool_and_not_one_of_several() -> None:
    tools: list[Any] = [tool(name, {"type": "object", "properties": {}}) for name in "fg"]
    told = arguments(LLM, chat(tool_choice="required", tools=tools[:1]), "")
    assert told["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    with pytest.raises(Refusal) as refused:
        arguments(LLM, chat(tool_choice="required", tools=tools), "")
    assert refused.value.param == "tool_choice"


def test_logprobs_of_a_chat_are_given_where_their_number_is_not_said() -> None:
    assert arguments(LLM, chat(logprobs=True), "")["top_logprobs"] == 0
    assert arguments(LLM, chat(logprobs=True, top_logprobs=3), "")["top_logprobs"] == 3
    assert arguments(LLM, chat(), "")["top_logprobs"] is None


@pytest.mark.parametrize(("said", "told"), [("", []), (["", "x"], ["x"]), ("x", ["x"]), (None, [])])
def test_an_empty_stop_string_ends_nothing(said: Any, told: list[str]) -> None:
    assert arguments(LLM, chat(stop=said), "")["stop"] == told
    assert arguments(LLM, CompletionRequest(prompt="a", stop=said), "")["stop"] == told


@pytest.mark.parametrize("name", ["functionary", "functionary-v1", "functionary-v2"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tools", [False, True])
def test_a_format_that_does_not_stream_calls_says_so(name: str, stream: bool, tools: bool) -> None:
    class Functionary(Vocabulary):
        chat_format = name

    functions = [{"name": "f", "parameters": {"type": "object", "properties": {}}}] if tools else None
    body = ChatCompletionRequest(
        messages=[{"role": "user", "content": "hi"}], stream=stream, functions=functions
    )
    llm: Any = Functionary()
    if not (stream and tools) or name == "functionary-v2":
        assert arguments(llm, body, "alias")["stream"] is stream
        return
    with pytest.raises(Refusal, match="does not stream") as refused:
        arguments(llm, body, "alias")
    assert (refused.value.status, refused.value.param) == (400, "stream")


@pytest.mark.parametrize("choice", [{"tool_choice": "none"}, {"function_call": "none"}])
@pytest.mark.parametrize("name", ["functionary", "functionary-v1"])
def test_a_format_that_streams_where_no_tool_is_called_is_let(name: str, choice: Any) -> None:
    class Functionary(Vocabulary):
        chat_format = name

    functions = [{"name": "f", "parameters": {"type": "object", "properties": {}}}]
    messages = [{"role": "user", "content": "hi"}]
    body = ChatCompletionRequest(messages=messages, stream=True, functions=functions, **choice)
    llm: Any = Functionary()
    if name == "functionary-v1":
        assert arguments(llm, body, "alias")["stream"]
        return
    with pytest.raises(Refusal, match="does not stream"):
        arguments(llm, body, "alias")
