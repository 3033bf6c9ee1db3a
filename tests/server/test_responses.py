"""OpenAI's Responses API, asked by OpenAI's client: the answers are those of chat completions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from llamahybrid.errors import Busy
from llamahybrid.server.responses.request import chat_messages
from tests.lab.gguf_edits import with_template
from tests.lab.serving import Held, Serving, serving

from .conftest import TinyModel

PATH = "/v1/responses"
QUESTION: Any = {"role": "user", "content": "What is the weather in Paris?"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOL: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
CALL = '{"name": "weather", "arguments": {"city": "Paris", "days": 3}}'
ASKED: dict[str, Any] = {"model": "any", "input": [QUESTION], "max_output_tokens": 12}
GREEDY: dict[str, Any] = {**ASKED, "temperature": 0.0}

STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}<|im_start|>assistant\\n"
)
"""Takes one system message, as Qwen's templates do."""

ENDLESS: dict[str, Any] = {"input": "Tell me a story", "logit_bias": {"256": -100, "258": -100}}
"""Without the tokens that end an answer."""


def written(text: str) -> dict[str, Any]:
    """Options that make the model answer with this text."""
    escaped = text.replace('"', '\\"').replace("\n", "\\n")
    return {"max_output_tokens": 400, "extra_body": {"grammar": f'root ::= "{escaped}"'}}


def final(got: Any, stream: bool) -> Any:
    """The response; of a stream, that of its last event."""
    return list(got)[-1].response if stream else got


# -- answers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_the_answer_of_a_chat(client: openai.OpenAI, http: httpx.Client, stream: bool) -> None:
    got = final(client.responses.create(instructions="You are brief.", stream=stream, **GREEDY), stream)
    asked = {"messages": [{"role": "system", "content": "You are brief."}, QUESTION], "max_tokens": 12}
    asked |= {"temperature": 0.0, "repeat_penalty": 1.0, "reasoning_format": "auto"}
    right = http.post("/v1/chat/completions", json=asked).raise_for_status().json()
    message = right["choices"][0]["message"]
    thoughts = [item.content[0].text for item in got.output if item.type == "reasoning"]
    assert "".join(thoughts) == message.get("reasoning_content", "")
    assert got.output_text == (message["content"] or "")
    assert (got.status, got.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert got.usage.input_tokens == right["usage"]["prompt_tokens"]
    assert (got.usage.output_tokens, got.usage.total_tokens) == (12, got.usage.input_tokens + 12)
    assert got.model.endswith(".gguf")


@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_a_text_and_a_call(client: openai.OpenAI, stream: bool) -> None:
    text = f"I look it up.\n</think>\n\nOne moment.\n<tool_call>{CALL}</tool_call>"
    got = client.responses.create(**{**ASKED, **written(text)}, tools=[TOOL], stream=stream)
    if stream:
        events = list(got)
        assert [each.sequence_number for each in events] == list(range(1, len(events) + 1))
        said = "".join(each.delta for each in events if each.type == "response.output_text.delta")
        thought = "".join(each.delta for each in events if each.type == "response.reasoning_text.delta")
        arguments = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
        assert (thought, said) == ("I look it up.", "One moment.")
        assert json.loads("".join(arguments)) == {"city": "Paris", "days": 3}
        kinds = [each.type.removeprefix("response.") for each in events]
        assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
        assert kinds.count("output_item.added") == kinds.count("output_item.done") == 3
        assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
        got = events[-1].response
    thought, message, call = got.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "I look it up.")
    assert (message.type, message.content[0].text) == ("message", "One moment.")
    assert (call.type, call.name) == ("function_call", "weather")
    assert json.loads(call.arguments) == {"city": "Paris", "days": 3}
    assert call.call_id
    assert {item.status for item in got.output} == {"completed"}
    assert got.status == "completed"


@pytest.mark.parametrize("stream", [False, True])
def test_a_chosen_tool_is_called(client: openai.OpenAI, stream: bool) -> None:
    choice: Any = {"type": "function", "name": "weather"}
    asked = {**GREEDY, "max_output_tokens": 100, "tools": [TOOL], "tool_choice": choice}
    (call,) = final(client.responses.create(stream=stream, **asked), stream).output
    assert (call.type, call.name) == ("function_call", "weather")


@pytest.mark.parametrize("stream", [False, True])
def test_a_freeform_tool_gets_text(client: openai.OpenAI, stream: bool) -> None:
    tool: Any = {"type": "custom", "name": "patch", "format": {"syntax": "lark", "definition": "start: A"}}
    call = '<tool_call>{"name": "patch", "arguments": {"input": "*** Begin"}}</tool_call>'
    asked = {**ASKED, **written(f"</think>\n\n{call}")}
    others: list[Any] = [{"type": "web_search"}, {"type": "code_interpreter", "container": {"type": "auto"}}]
    got = client.responses.create(**asked, tools=[tool, *others], stream=stream)
    events = list(got) if stream else []
    (item,) = (events[-1].response if stream else got).output  # type: ignore[union-attr]
    assert (item.type, item.name, item.input) == ("custom_tool_call", "patch", "*** Begin")
    deltas = [each.delta for each in events if each.type == "response.custom_tool_call_input.delta"]
    assert deltas == (["*** Begin"] if stream else [])


@pytest.mark.parametrize("stream", [False, True])
def test_an_unfinished_thought_has_no_text(client: openai.OpenAI, stream: bool) -> None:
    asked = {**ASKED, **written("I look it up. And then I think on.</think>"), "max_output_tokens": 13}
    got = final(client.responses.create(**asked, stream=stream), stream)
    (thought,) = got.output
    assert (got.status, got.output_text, thought.status) == ("incomplete", "", "incomplete")
    assert thought.content[0].text == "I look it up."


def test_log_probabilities(client: openai.OpenAI) -> None:
    got = client.responses.create(**{**ASKED, **written("</think>\n\nYes.")}, top_logprobs=2)
    (message,) = got.output
    assert message.type == "message"
    (part,) = message.content
    tokens = [each.token for each in part.logprobs or ()]  # type: ignore[union-attr]
    assert "".join(tokens).endswith("Yes.")


# -- how answers end -----------------------------------------------------------------------------------


def test_a_stream_that_fails_says_so(
    server: Serving, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, left = server.llm.create_chat_completion, [3]

    def failing(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for chunk in inner(*args, **kwargs):
            if not left[0]:
                raise Busy("later")
            left[0] -= 1
            yield chunk

    monkeypatch.setattr(server.llm, "create_chat_completion", failing, raising=False)
    with http.stream("POST", PATH, json={**ASKED, "stream": True}) as response:
        assert response.status_code == 200
        told = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    *begun, failed, error = told
    assert failed["type"] == "response.failed"
    assert failed["sequence_number"] == len(begun) + 1
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["message"] == error["error"]["message"]


def test_a_cancelled_response_is_incomplete(
    server: Serving, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch, after=60)
    with http.stream("POST", PATH, json={**ENDLESS, "stream": True}) as response:
        lines = (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {"))
        begun = [next(lines) for _ in range(8)]
        server.llm.cancel()
        held.go_on()
        *_, last = [*begun, *lines]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["usage"]["output_tokens"] < 100


# -- what agents send ----------------------------------------------------------------------------------


def test_items_of_a_turn_are_one_message() -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": "Mend it."},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I look."}], "content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** Begin"},
        {"type": "function_call", "call_id": "d", "name": "now", "arguments": ""},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
        {"type": "function_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "noon"}]},
    ]
    system, user, assistant, *results = chat_messages("You are Ada.", items)
    assert system == {"role": "system", "content": "You are Ada.\n\nBe brief."}
    assert user == {"role": "user", "content": "Mend it."}
    assert (assistant["reasoning_content"], assistant["content"]) == ("I look.", "Wait.")
    functions = [(each["id"], each["function"]) for each in assistant["tool_calls"]]
    patch = {"name": "patch", "arguments": '{"input": "*** Begin"}'}
    assert functions == [("c", patch), ("d", {"name": "now", "arguments": "{}"})]
    assert [each["content"] for each in results] == ["done", "noon"]


def test_later_system_messages_of_a_template_that_takes_one(tiny_model: TinyModel, tmp_path: Path) -> None:
    items = [QUESTION, {"role": "developer", "content": "Three."}]
    model = with_template(tiny_model("qwen35"), tmp_path / "strict.gguf", STRICT)
    with serving(model) as server, server.client() as client:
        asked = {"input": items, "instructions": "One.", "max_output_tokens": 2}
        told = client.post(PATH, json=asked).raise_for_status().json()
        same = [{"role": "system", "content": "One."}, QUESTION, {"role": "user", "content": "Three."}]
        right = client.post("/v1/chat/completions", json={"messages": same, "max_tokens": 2}).json()
    assert told["usage"]["input_tokens"] == right["usage"]["prompt_tokens"]


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "xhigh"])
def test_efforts_that_clients_name(http: httpx.Client, effort: str) -> None:
    asked = {"input": "Hello", "reasoning": {"effort": effort, "summary": "auto"}, "max_output_tokens": 3}
    made = http.post(PATH, json=asked).raise_for_status().json()
    assert ("reasoning" in [item["type"] for item in made["output"]]) is (effort != "none")


def test_the_request_comes_back_in_the_response(client: openai.OpenAI) -> None:
    got = client.responses.create(**GREEDY, tools=[TOOL], metadata={"a": "b"}, parallel_tool_calls=False)
    assert got.metadata == {"a": "b"}
    assert got.tools[0].name == "weather"  # type: ignore[union-attr]
    assert (got.temperature, got.max_output_tokens, got.parallel_tool_calls) == (0.0, 12, False)
    assert (got.object, got.tool_choice, got.error) == ("response", "auto", None)


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"truncation": "auto"}, "truncation"),
        ({"cache_prompt": False}, "cache_prompt"),
        ({"top_k_": 1}, "top_k_"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 99}, "top_logprobs"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"tools": [{"type": "computer", "name": "x"}]}, "tools.0"),
        ({"tools": [{"type": "function"}]}, "tools.0"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"input": [{"type": "computer_call"}]}, None),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, None),
        ({"input": [{"role": "system", "content": [{"type": "input_image", "image_url": "x"}]}]}, None),
        (
            {"input": [{"type": "function_call", "name": "f", "arguments": {}}]},
            "messages.0.assistant.tool_calls.0.id",
        ),
        ({"input": ["hello"]}, None),
        ({"input": [{"role": "robot", "content": "x"}]}, "messages.0"),
        ({"input": []}, "messages"),
        ({"input": "x " * 9000}, "messages"),
        ({"input": "x " * 9000, "stream": True}, "messages"),
    ],
)
def test_impossible_requests_are_refused(http: httpx.Client, said: Any, param: str | None) -> None:
    answer = http.post(PATH, json={"input": "x", **said})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_salts_hold(http: httpx.Client) -> None:
    cached = []
    for salt in ("a", "a", "b"):
        asked = {"input": "A long question " * 9, "max_output_tokens": 2, "cache_salt": salt}
        usage = http.post(PATH, json=asked).raise_for_status().json()["usage"]
        cached.append(usage["input_tokens_details"]["cached_tokens"] > 0)
    assert cached == [False, True, False]
