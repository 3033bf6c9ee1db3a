"""Thinking, calls and texts are told apart, whole and streamed; what the schema does not take stays text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.server.upstream_api.conftest import CALL, CHAT, SCHEMA, TOOL

Says = Callable[..., None]


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_and_tool_calls_are_told_apart(client: openai.OpenAI, says: Says, stream: bool) -> None:
    says(CALL)
    got = client.chat.completions.create(model="any", messages=CHAT, tools=[TOOL], stream=stream)
    if not stream:
        message = got.choices[0].message
        said = (message.model_extra or {})["reasoning_content"], message.content
        (call,) = message.tool_calls
        name, arguments = call.function.name, call.function.arguments
        assert got.choices[0].finish_reason == "tool_calls"
    else:
        deltas = [choice for chunk in got for choice in chunk.choices]
        extra = [choice.delta.model_extra or {} for choice in deltas]
        thought = "".join(each.get("reasoning_content") or "" for each in extra)
        said = thought, "".join(choice.delta.content or "" for choice in deltas)
        parts = [call for choice in deltas for call in choice.delta.tool_calls or ()]
        name = "".join(part.function.name or "" for part in parts)
        arguments = "".join(part.function.arguments or "" for part in parts)
        assert parts[0].id
        assert deltas[-1].finish_reason == "tool_calls"
        assert len(deltas) > 20, "it comes as it is made"
    assert (said[0].strip(), (said[1] or "").strip()) == ("I look it up.", "One moment.")
    assert name == "weather"
    assert json.loads(arguments) == {"city": "Paris", "days": 3}


@pytest.mark.parametrize("end", ["<|im_end|>", ""], ids=["it ends", "max_tokens"])
@pytest.mark.parametrize("stream", [False, True])
def test_thinking_that_does_not_come_to_its_end_stays_thinking(
    client: openai.OpenAI, says: Says, stream: bool, end: str
) -> None:
    """Whole, upstream tells it as the answer, with the prompt's <think>."""
    says("I look it up.", end=end)
    got = client.chat.completions.create(model="any", messages=CHAT, stream=stream, max_tokens=13 + bool(end))
    choices = [choice for chunk in got for choice in chunk.choices] if stream else got.choices
    told = [choice.delta if stream else choice.message for choice in choices]
    assert (
        "".join((each.model_extra or {}).get("reasoning_content") or "" for each in told) == "I look it up."
    )
    assert "".join(each.content or "" for each in told) == ""
    assert choices[-1].finish_reason == ("stop" if end else "length")


def test_a_response_of_unfinished_thinking_has_no_text(client: openai.OpenAI, says: Says) -> None:
    says("I look it up.", end="")
    got = client.responses.create(model="any", input="The weather?", max_output_tokens=13)
    assert got.status == "incomplete"
    assert got.output_text == ""
    (thought,) = [item.content[0].text for item in got.output if item.type == "reasoning"]
    assert thought == "I look it up."


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_with_thinking_and_a_tool_call(client: openai.OpenAI, says: Says, stream: bool) -> None:
    says(CALL)
    tool: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
    got = client.responses.create(model="any", input="The weather?", tools=[tool], stream=stream)
    if stream:
        events = list(got)
        assert [each.sequence_number for each in events] == list(range(1, len(events) + 1))
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        arguments = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
        assert text.strip() == "One moment."
        assert json.loads(arguments) == {"city": "Paris", "days": 3}
        got = events[-1].response
        assert events[-1].type == "response.completed"
    kinds = [item.type for item in got.output]
    assert sorted(kinds) == ["function_call", "message", "reasoning"]
    call = got.output[kinds.index("function_call")]
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris", "days": 3})
    assert got.output[kinds.index("reasoning")].content[0].text.strip() == "I look it up."
    assert got.status == "completed"
    assert got.usage.output_tokens > 50


def test_a_freeform_tool(client: openai.OpenAI, says: Says) -> None:
    says(
        "</think>\n\n<tool_call>\n<function=apply_patch>\n<parameter=input>\n*** Begin\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    tool: Any = {"type": "custom", "name": "apply_patch"}
    got = client.responses.create(model="any", input="Mend it.", tools=[tool])
    (call,) = [item for item in got.output if item.type == "custom_tool_call"]
    assert (call.name, call.input) == ("apply_patch", "*** Begin")


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_the_schema_does_not_take_is_told_as_text(
    client: openai.OpenAI, says: Says, stream: bool
) -> None:
    """`days` is no integer: upstream's parser raises, and its server answers 500."""
    wrong = CALL.replace("\n3\n", "\nthree\n")
    says(wrong)
    got = client.chat.completions.create(model="any", messages=CHAT, tools=[TOOL], stream=stream)
    if stream:
        chunks = list(got)
        assert chunks[-1].choices[0].finish_reason in ("stop", "tool_calls")
        assert any((c.choices[0].delta.model_extra or {}).get("reasoning_content") for c in chunks)
    else:
        assert got.choices[0].message.content == wrong
        assert got.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_tool(client: openai.OpenAI, says: Says, stream: bool) -> None:
    """The template begins the call; the model goes on inside it."""
    says("<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>")
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    got = client.chat.completions.create(
        model="any", messages=CHAT, tools=[TOOL], tool_choice=choice, stream=stream
    )
    if stream:
        calls = [c for chunk in got for each in chunk.choices for c in each.delta.tool_calls or ()]
        arguments = "".join(call.function.arguments or "" for call in calls)
    else:
        (call,) = got.choices[0].message.tool_calls
        arguments = call.function.arguments
    assert json.loads(arguments) == {"city": "Rome"}
