"""LiteLLM as a client of our server: chats, streams, tools, what was cached."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import TinyModel
from tests.integrations.sides import SYSTEM, needed

litellm = needed("litellm", "litellm_client")

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a river up.",
        "parameters": {
            "type": "object",
            "properties": {"long": {"type": "boolean"}},
            "required": ["long"],
        },
    },
}


@pytest.fixture(scope="module")
def asked(tiny_model: TinyModel) -> Iterator[dict[str, Any]]:
    """Arguments of all requests: our server's address and key."""
    from tests.lab.serving import serving

    with serving(tiny_model("qwen35"), api_key="secret", model={"chat_format": "chatml"}) as server:
        where = {"api_base": f"{server.url}/v1", "api_key": "secret"}
        yield {"model": "openai/tiny", "max_tokens": 8, "temperature": 0.0, **where}


def messages(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def test_a_chat_and_its_cached_tokens(asked: dict[str, Any]) -> None:
    first = litellm.completion(messages=messages("Which rivers flow through Vienna?"), **asked)
    talk = messages("Which rivers flow through Vienna?")
    talk += [{"role": "assistant", "content": first.choices[0].message.content}]
    talk += [{"role": "user", "content": "And through Graz?"}]
    second = litellm.completion(messages=talk, **asked)
    assert second.usage.prompt_tokens_details.cached_tokens > len(SYSTEM)
    assert second.usage.prompt_tokens > second.usage.prompt_tokens_details.cached_tokens


def test_a_stream_says_the_same(asked: dict[str, Any]) -> None:
    whole = litellm.completion(messages=messages("Name one."), **asked)
    chunks = list(
        litellm.completion(
            messages=messages("Name one."), stream=True, stream_options={"include_usage": True}, **asked
        )
    )
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].message.content
    (usage,) = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_is_chosen(asked: dict[str, Any], stream: bool) -> None:
    choice = {"type": "function", "function": {"name": "look_up"}}
    made = litellm.completion(
        messages=messages("Which river is it?"),
        tools=[TOOL],
        tool_choice=choice,
        stream=stream,
        **{**asked, "max_tokens": 60},
    )
    if stream:
        made = litellm.stream_chunk_builder(list(made))
    (call,) = made.choices[0].message.tool_calls
    assert call.function.name == "look_up"
    assert isinstance(json.loads(call.function.arguments)["long"], bool)


def test_errors_are_told_apart(asked: dict[str, Any]) -> None:
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(messages=messages("x"), **{**asked, "api_key": "wrong"})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=messages("x" * 5000), **asked)
