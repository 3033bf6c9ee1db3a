"""From bodies to arguments."""

from __future__ import annotations

from typing import Any

import pytest
from llama_cpp.llama_chat_format import format_chatml

from llamahybrid.server.arguments import arguments
from llamahybrid.server.bodies import ChatCompletionRequest, CompletionRequest
from llamahybrid.server.errors import Refusal


class Vocabulary:
    """A model of 100 tokens, one for each letter."""

    chat_handler = None
    chat_format = "chatml"

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


CHOSEN: Any = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("choice", ["required", CHOSEN])
def test_only_a_known_tool_is_chosen_and_required_means_the_only_one(choice: Any) -> None:
    f, g = (tool(name, {"type": "object", "properties": {}}) for name in "fg")
    assert arguments(LLM, chat(tool_choice=choice, tools=[f]), "")["tool_choice"] == CHOSEN
    for tools in (None, [], [g, f] if choice == "required" else [g]):
        with pytest.raises(Refusal) as refused:
            arguments(LLM, chat(tool_choice=choice, tools=tools), "")
        assert refused.value.param == "tool_choice"


@pytest.mark.parametrize(("said", "told"), [("", []), (["", "x"], ["x"]), ("x", ["x"]), (None, [])])
def test_an_empty_stop_string_ends_nothing(said: Any, told: list[str]) -> None:
    assert arguments(LLM, chat(stop=said), "")["stop"] == told
    assert arguments(LLM, CompletionRequest(prompt="a", stop=said), "")["stop"] == told


def test_formats_of_upstream_take_a_call_without_content() -> None:
    function = {"name": "f", "arguments": "{}"}
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    asked = {"role": "user", "content": "hi"}
    body = ChatCompletionRequest(
        messages=[asked, call, {"role": "tool", "tool_call_id": "1", "content": "x"}]
    )
    prompt = format_chatml(messages=arguments(LLM, body, "")["messages"]).prompt
    assert prompt == format_chatml(messages=[asked, call]).prompt

    class WithHandler(Vocabulary):
        chat_handler = object()  # of pictures, say: those templates show what is None

    handled: Any = WithHandler()
    assert "content" not in arguments(handled, body, "")["messages"][1]


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
