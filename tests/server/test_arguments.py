"""From bodies to arguments."""

from __future__ import annotations

from typing import Any

import pytest

from llamahybrid.server.arguments import arguments
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


# -- forms of an answer ----------------------------------------------------------------------------------


def chat(**said: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest(messages=[{"role": "user", "content": "hi"}], **said)


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize(
    "choice", [{"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}}]
)
def test_unknown_tool_cannot_be_chosen(choice: Any) -> None:
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
