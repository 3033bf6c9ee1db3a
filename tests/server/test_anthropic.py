"""Anthropic's Messages API, asked by Anthropic's client: the answers are those of chat completions."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import anthropic
import httpx
import pytest

from llamahybrid.errors import Busy
from llamahybrid.server.anthropic.request import MessagesRequest
from tests.lab.gguf_edits import with_template
from tests.lab.serving import Serving, parts, serving

from .conftest import TinyModel

PATH = "/v1/messages"
SYSTEM = "You are brief."
QUESTION: Any = {"role": "user", "content": "What is the weather in Paris?"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"in": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["in"],
}
TOOL: Any = {"name": "weather", "description": "Tells the weather.", "input_schema": SCHEMA}
CHOICE: Any = {"type": "tool", "name": "weather"}
GREEDY: dict[str, Any] = {"model": "any", "max_tokens": 12, "extra_body": {"temperature": 0.0}}
ASKED: dict[str, Any] = {"model": "any", "max_tokens": 8, "messages": [QUESTION], "temperature": 0.0}
CALLED: list[Any] = [
    QUESTION,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}]},
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "Rain."}]},
            {"type": "text", "text": "Say it in a sentence."},
        ],
    },
]
IMAGE: Any = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
}
PICTURED: list[Any] = [
    CALLED[1],
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [IMAGE]}]},
]


def chat(http: httpx.Client, messages: list[Any], **more: Any) -> Any:
    """The chat completion of messages."""
    asked = {"messages": messages, "temperature": 0.0, "repeat_penalty": 1.0, "max_tokens": 12, **more}
    asked["reasoning_format"] = "auto"
    return http.post("/v1/chat/completions", json=asked).raise_for_status().json()


def blocks(said: Any) -> list[dict[str, str]]:
    """The message of a chat completion as blocks."""
    message = said["choices"][0]["message"]
    thought, text = message.get("reasoning_content"), message.get("content")
    found = [{"type": "thinking", "thinking": thought, "signature": ""}] if thought else []
    return [*found, {"type": "text", "text": text}] if text else found


def dumped(got: anthropic.types.Message) -> list[dict[str, Any]]:
    return [block.model_dump(exclude_none=True) for block in got.content]


def spelt(got: anthropic.types.Message) -> str:
    """All that it says, thinking included."""
    texts = [getattr(block, "text", getattr(block, "thinking", "")) for block in got.content]
    return "".join(texts)


# -- answers -------------------------------------------------------------------------------------------


def test_a_message_is_the_answer_of_a_chat(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    got = claude.messages.create(messages=[QUESTION], system=SYSTEM, **GREEDY)
    right = chat(http, [{"role": "system", "content": SYSTEM}, QUESTION])
    assert (got.type, got.role) == ("message", "assistant")
    assert dumped(got) == blocks(right) != []
    assert (got.stop_reason, got.stop_sequence) == ("max_tokens", None)
    assert got.model.endswith(".gguf")
    usage = got.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == right["usage"]["prompt_tokens"]
    assert (usage.output_tokens, usage.cache_creation_input_tokens) == (12, 0)


def test_events_of_a_stream(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(messages=[QUESTION], **GREEDY)
    with claude.messages.stream(messages=[QUESTION], **GREEDY) as stream:
        parts = ("text", "thinking", "signature")  # the client's own events
        kinds = [event.type for event in stream if event.type not in parts]
        got = stream.get_final_message()
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert {"content_block_delta"} <= set(kinds[2:-3]) <= set(kinds[1:-2])
    assert dumped(got) == dumped(whole)
    assert got.stop_reason == whole.stop_reason
    assert got.usage.output_tokens == 12
    assert got.usage.cache_read_input_tokens == whole.usage.input_tokens + (
        whole.usage.cache_read_input_tokens or 0
    )


def test_system_blocks_tools_and_results_are_a_chat(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    hint: Any = {"type": "ephemeral", "ttl": "1h"}
    system: Any = [
        {"type": "text", "text": "You are"},
        {"type": "text", "text": "brief.", "cache_control": hint},
    ]
    got = claude.messages.create(messages=CALLED, system=system, tools=[TOOL], cache_control=hint, **GREEDY)
    function = {"name": "weather", "description": TOOL["description"], "parameters": SCHEMA}
    call = {"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "You are\nbrief."},
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "Rain."},
        {"role": "user", "content": "Say it in a sentence."},
    ]
    right = chat(http, messages, tools=[{"type": "function", "function": function}])
    assert dumped(got) == blocks(right)
    read = got.usage.cache_read_input_tokens or 0
    assert got.usage.input_tokens + read == right["usage"]["prompt_tokens"]
    assert right["usage"]["prompt_tokens_details"]["cached_tokens"] == right["usage"]["prompt_tokens"]


@pytest.mark.parametrize("choice", [CHOICE, {"type": "any", "disable_parallel_tool_use": True}])
def test_a_tool_is_used(claude: anthropic.Anthropic, choice: Any) -> None:
    options: dict[str, Any] = {**GREEDY, "max_tokens": 60, "tools": [TOOL], "tool_choice": choice}
    whole = claude.messages.create(messages=[QUESTION], **options)
    with claude.messages.stream(messages=[QUESTION], **options) as stream:
        streamed = stream.get_final_message()
    for got in (whole, streamed):
        (block,) = got.content
        assert block.type == "tool_use"
        assert block.name == "weather"
        assert block.input["in"] in ("Paris", "Rome")
        assert got.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": whole.content[0].id, "content": "Rain."}  # type: ignore[union-attr]
    answered: Any = {"role": "user", "content": [result]}
    assert claude.messages.create(messages=[QUESTION, whole.to_param(), answered], **GREEDY).content


WRITTEN = (
    'Hm.\\n</think>\\n\\nLook.\\n<tool_call>{"name": "weather", "arguments": {"in": "Rome"}}</tool_call>'
)
ANSWER = WRITTEN.replace('"', '\\"')


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_text_and_calls_of_the_model_s_own(claude: anthropic.Anthropic, stream: bool) -> None:
    options: dict[str, Any] = {"model": "any", "max_tokens": 300, "tools": [TOOL]}
    options["extra_body"] = {"grammar": f'root ::= "{ANSWER}{ANSWER.partition("Look.")[2]}"'}
    if stream:
        with claude.messages.stream(messages=[QUESTION], **options) as events:
            raw = [event for event in events if event.type.startswith("content_block_")]
            got = events.get_final_message()
        kinds = [event.delta.type for event in raw if event.type == "content_block_delta"]
        assert list(dict.fromkeys(kinds)) == [
            *("thinking_delta", "signature_delta", "text_delta", "input_json_delta")
        ]
        for ends in ("content_block_start", "content_block_stop"):
            assert [event.index for event in raw if event.type == ends] == [0, 1, 2, 3]
    else:
        got = claude.messages.create(messages=[QUESTION], **options)
    thought, text, *uses = dumped(got)
    assert thought == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert text == {"type": "text", "text": "Look."}
    assert [(use["name"], use["input"]) for use in uses] == [("weather", {"in": "Rome"})] * 2
    assert got.stop_reason == "tool_use"


def test_the_client_s_own_tool_runner(claude: anthropic.Anthropic) -> None:
    """The runner asks the server to hold the conversation, and sends all of it where that is refused."""

    @anthropic.beta_tool
    def weather(place: str) -> str:
        """Tells the weather.

        Args:
            place: Where.
        """
        return f"Rain in {place}."

    answer = ANSWER.replace('\\"in\\"', '\\"place\\"')
    messages: list[Any] = [QUESTION]
    runner = claude.beta.messages.tool_runner(
        **{"model": "any", "max_tokens": 200, "messages": messages, "tools": [weather], "max_iterations": 2},
        extra_body={"grammar": f'root ::= "{answer}"'},
    )
    first, second = runner
    assert first.stop_reason == second.stop_reason == "tool_use"
    held = (first.usage.cache_read_input_tokens or 0) + first.usage.input_tokens
    assert (second.usage.cache_read_input_tokens or 0) >= held - 8


@pytest.mark.parametrize("stream", [False, True])
def test_calls_and_thinking_of_a_chat(http: httpx.Client, stream: bool) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    asked = {
        "messages": [QUESTION],
        "max_tokens": 200,
        "grammar": f'root ::= "{ANSWER}"',
        "temperature": 0,
        "return_tokens": True,
    }

    def said(**more: Any) -> tuple[str, str, list[Any], str]:
        got = http.post("/v1/chat/completions", json={**asked, **more, "stream": stream})
        choices = [each["choices"][0] for each in parts(got)]
        messages = [each["delta"] if stream else each["message"] for each in choices]
        calls = [call["function"] for each in messages for call in each.get("tool_calls") or ()]
        told = [
            "".join(each.get(name) or "" for each in messages) for name in ("reasoning_content", "content")
        ]
        tokens = [token for each in choices for token in each.get("tokens", ())]
        assert http.post("/extras/detokenize", json={"tokens": tokens}).json()["text"] == whole
        return told[0], told[1], calls, choices[-1]["finish_reason"]

    call = {"name": "weather", "arguments": '{"in": "Rome"}'}
    whole = WRITTEN.replace("\\n", "\n")
    text = whole.partition("\n<tool")[0]
    assert said() == ("", whole, [], "stop")
    assert said(tools=[tool]) == ("", text, [call], "tool_calls")
    assert said(tools=[tool], parse_tool_calls=False) == ("", whole, [], "stop")
    assert said(tools=[tool], reasoning_format="auto") == ("Hm.", "Look.", [call], "tool_calls")
    assert said(reasoning_format="deepseek")[:3] == ("Hm.", whole.partition("</think>\n\n")[2], [])


def test_truncated_call_is_no_call(claude: anthropic.Anthropic) -> None:
    options: dict[str, Any] = {**GREEDY, "max_tokens": 2, "tools": [TOOL], "tool_choice": CHOICE}
    assert claude.messages.create(messages=[QUESTION], **options).stop_reason == "max_tokens"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_reasons(claude: anthropic.Anthropic, stream: bool) -> None:
    def ends(**more: Any) -> tuple[Any, Any, str]:
        options: dict[str, Any] = {**GREEDY, "max_tokens": 200, **more}
        if stream:
            with claude.messages.stream(messages=[QUESTION], **options) as events:
                got = events.get_final_message()
        else:
            got = claude.messages.create(messages=[QUESTION], timeout=60, **options)
        return got.stop_reason, got.stop_sequence, spelt(got)

    form: Any = {"format": {"type": "json_schema", "schema": {"const": "yes"}}}
    assert ends(output_config=form) == ("end_turn", None, '"yes"')
    said = ends(max_tokens=12)[2]
    assert ends(max_tokens=12, stop_sequences=["\0", said[5:8]]) == ("stop_sequence", said[5:8], said[:5])
    assert ends(max_tokens=10**6)[0] in ("model_context_window_exceeded", "end_turn")


def test_no_tokens_warm_the_cache(claude: anthropic.Anthropic) -> None:
    asked: list[Any] = [{"role": "user", "content": "Something that nobody has asked before."}]
    warmed = claude.messages.create(messages=asked, **{**GREEDY, "max_tokens": 0})
    assert (warmed.content, warmed.usage.output_tokens, warmed.stop_reason) == ([], 0, "max_tokens")
    got = claude.messages.create(messages=asked, **GREEDY)
    prompt = warmed.usage.input_tokens + (warmed.usage.cache_read_input_tokens or 0)
    assert (got.usage.input_tokens, got.usage.cache_read_input_tokens) == (0, prompt)


def test_a_line_that_changes_for_anthropic_alone_is_left_out() -> None:
    def told(first: str) -> Any:
        system = [{"type": "text", "text": first}, {"type": "text", "text": "You are brief."}]
        asked = MessagesRequest.model_validate({**ASKED, "system": system})
        return asked.completion().model_dump()["messages"][0]["content"]

    assert told("x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=a5145;") == SYSTEM
    assert told("x-anthropic-billing-header: cch=a5145; Be kind.") == f"Be kind.\n{SYSTEM}"
    assert told("Be kind.") == f"Be kind.\n{SYSTEM}"


UNION: dict[str, Any] = dict.fromkeys(
    ("text", "source", "thinking", "id", "name", "input", "tool_use_id", "content")
)
"""The fields of all blocks, as clients send them that have one type for all."""


@pytest.mark.parametrize(
    "other",
    [UNION, {"source": {"type": "url", "url": "http://x"}}, {"thinking": "zz"}, {"content": 5, "id": 5}],
)
def test_fields_of_other_blocks_are_ignored(other: dict[str, Any]) -> None:
    thought = {"type": "thinking", "thinking": "hm"}

    def chat_of(more: dict[str, Any]) -> Any:
        turns = [
            {"role": "user", "content": [{**more, "type": "text", "text": "the question"}]},
            {"role": "assistant", "content": [{**more, "type": "text", "text": "So"}, {**more, **thought}]},
            {"role": "user", "content": [{**more, **IMAGE}]},
            {"role": "user", "content": [{**more, **CALLED[2]["content"][0]}]},
        ]
        return (
            MessagesRequest.model_validate({**ASKED, "messages": turns}).completion().model_dump()["messages"]
        )

    found = chat_of(other)
    assert found == chat_of({})
    assert found[0]["content"] == "the question"
    assert found[1]["reasoning_content"] == "hm"


@pytest.mark.parametrize(
    "source",
    [
        {**IMAGE["source"], "url": None},
        {"type": "url", "url": "http://x", "data": None, "media_type": None},
    ],
)
def test_fields_of_other_sources_are_ignored(source: dict[str, Any]) -> None:
    turns = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    asked = MessagesRequest.model_validate({**ASKED, "messages": turns}).completion()
    (part,) = asked.model_dump()["messages"][0]["content"]
    assert part["type"] == "image_url"


BROKEN = anthropic.APIStatusError


def chunk(**delta: Any) -> dict[str, Any]:
    """A chunk of a chat."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    named = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": "any"}
    return {**named, "choices": [choice]}


def test_an_error_in_a_stream_is_an_event(
    server: Serving, claude: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(**_: Any) -> Iterator[Any]:
        yield chunk(role="assistant")
        yield chunk(content="So")
        raise Busy("another one")

    monkeypatch.setattr(server.llm, "create_chat_completion", fails, raising=False)
    heard = list[str]()
    with claude.messages.stream(messages=[QUESTION], **GREEDY) as stream, pytest.raises(BROKEN) as told:
        heard.extend(event.type for event in stream)
    error = {"type": "overloaded_error", "message": "the model is busy; ask again later"}
    assert told.value.body == {"type": "error", "error": error}
    assert heard[:2] == ["message_start", "content_block_start"]


def test_a_silent_stream_has_pings(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = threading.Event()

    def waits(**_: Any) -> Iterator[Any]:
        assert heard.wait(60)
        yield chunk(role="assistant")

    with serving(tiny_model("qwen35"), ping_seconds=0.05) as server, server.client() as client:
        monkeypatch.setattr(server.llm, "create_chat_completion", waits, raising=False)
        with client.stream("POST", PATH, json={**ASKED, "stream": True}) as response:
            lines = response.iter_lines()
            assert [next(lines), next(lines)] == ["event: ping", 'data: {"type": "ping"}']
            heard.set()
            assert "event: message_stop" in list(lines)


# -- counts --------------------------------------------------------------------------------------------


def tokens_decoded(server: Serving) -> list[str]:
    counters = ("llamacpp:prompt_tokens_total", "llamacpp:tokens_predicted_total")
    return [line for line in server.metrics().splitlines() if line.startswith(counters)]


def test_tokens_are_counted_as_they_are_used(server: Serving, claude: anthropic.Anthropic) -> None:
    more: dict[str, Any] = {"messages": CALLED, "system": SYSTEM, "tools": [TOOL]}
    decoded = tokens_decoded(server)
    counted = claude.messages.count_tokens(model="any", **more)
    assert tokens_decoded(server) == decoded, "nothing is decoded"
    usage = claude.messages.create(**more, **GREEDY).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


# -- thinking ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def switched(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A model whose template has a switch for thinking."""
    model = with_template(tiny_model("qwen35"), tmp_path_factory.mktemp("claude") / "switch.gguf")
    with serving(model) as server:
        yield server


def test_thinking_is_switched_where_the_template_can(
    switched: Serving, claude: anthropic.Anthropic, http: httpx.Client
) -> None:
    with switched.client() as client:

        def count(**more: Any) -> int:
            asked = {"model": "any", "messages": [QUESTION], **more}
            found: int = (
                client.post(f"{PATH}/count_tokens", json=asked).raise_for_status().json()["input_tokens"]
            )
            return found

        plain, off = count(), count(thinking={"type": "disabled"})
        assert off > plain == count(thinking={"type": "enabled", "budget_tokens": 2000})
        assert plain == count(thinking={"type": "adaptive"}, output_config={"effort": "max"})
        assert off == count(chat_template_kwargs={"enable_thinking": False})
        for kind, end, block in (
            ("enabled", "</think>", "thinking"),
            ("enabled", "", "text"),
            ("disabled", "", "text"),
        ):
            asked = {
                **ASKED,
                "max_tokens": 20,
                "thinking": {"type": kind},
                "grammar": f'root ::= "Yes.{end}"',
            }
            (said,) = client.post(PATH, json=asked).raise_for_status().json()["content"]
            assert (said["type"], said[block]) == (block, "Yes.")
    for thinking in ({"type": "disabled"}, {"type": "adaptive"}):
        asked = {**ASKED, "thinking": thinking, "output_config": {"effort": "low"}}
        assert http.post(PATH, json=asked).status_code == 200, "no switch, no error"


OPT_IN = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{{ reasoning_effort or '' }}<think>"
    "{% if not enable_thinking %}</think>{% endif %}"
)
"""Thinks where `enable_thinking` is true, and has the effort in the prompt."""


def test_thinking_that_a_template_leaves_out_by_itself(tiny_model: TinyModel, tmp_path: Path) -> None:
    with serving(with_template(tiny_model("qwen35"), tmp_path / "in.gguf", OPT_IN)) as server:

        def count(**more: Any) -> int:
            with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
                counted = claude.messages.count_tokens(model="any", messages=[QUESTION], extra_body=more)
            return counted.input_tokens

        plain, enabled = count(), {"type": "enabled", "budget_tokens": 2000}
        assert count(thinking=enabled) == count(thinking={"type": "adaptive"}) < plain
        assert count(thinking=enabled, chat_template_kwargs={"enable_thinking": False}) == plain
        low = {"output_config": {"effort": "low"}}
        assert count(**low) == plain + len("low")
        given = {"chat_template_kwargs": {"reasoning_effort": "medium"}}
        assert count(**given) == count(**given, **low) == plain + len("medium")


# -- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "image_url"),
        *[
            ({"messages": [{"role": "user", "content": [block]}]}, f"type {kind!r} is not supported")
            for kind in ("document", "search_result")
            for block in (
                {"type": kind},
                {"type": kind, "source": {"type": "text", "data": "a"}, "content": 5},
            )
        ],
        *[
            ({"messages": [{"role": "user", "content": [{"type": kind, name: None}]}]}, f"{name} is missing")
            for kind, name in (("text", "text"), ("image", "source"), ("tool_result", "tool_use_id"))
        ],
        ({"messages": []}, "messages"),
        ({"messages": [QUESTION, CALLED[1]]}, "continue_final_message"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tool"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "content": [1] * 900}] * 900}
                ]
            },
            "parts",
        ),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "other"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "disable_parallel_tool_use"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"temperature": -1}, "temperature"),
        ({"messages": [QUESTION, *PICTURED]}, "images in the result of a tool"),
        ({"stop_sequnces": ["x"]}, "'stop_sequences'"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_use_anthropic_format(
    http: httpx.Client, wrong: dict[str, Any], named: str, stream: bool
) -> None:
    asked = {name: value for name, value in {**ASKED, **wrong, "stream": stream}.items() if value is not None}
    got = http.post(PATH, json=asked)
    assert got.status_code == 400
    told = got.json()
    assert told["type"] == "error"
    assert told["error"]["type"] == "invalid_request_error"
    assert named in told["error"]["message"]


def test_errors_are_the_client_s_own(claude: anthropic.Anthropic, tiny_model: TinyModel) -> None:
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        claude.messages.create(messages=[{"role": "user", "content": "x" * 3000}], **GREEDY)
    options: dict[str, Any] = {"api_key": "secret", "max_body_bytes": 2000, "max_queue": 0}
    with serving(tiny_model("qwen35"), **options) as server:
        ask: Any = anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError):
            ask.messages.create(messages=[QUESTION], **GREEDY)
        for given in ({"api_key": "secret"}, {"auth_token": "secret", "api_key": None}):
            ask = anthropic.Anthropic(base_url=server.url, max_retries=0, **given)  # type: ignore[arg-type]
            assert ask.messages.create(messages=[QUESTION], **GREEDY).content
        with pytest.raises(anthropic.APIStatusError) as large:
            ask.messages.create(messages=[{"role": "user", "content": "x" * 3000}], **GREEDY)
        assert large.value.status_code == 413
        assert large.value.body == {
            "type": "error",
            "error": {
                "type": "request_too_large",
                "message": "the request's body is larger than 2,000 bytes",
            },
        }


# -- fields --------------------------------------------------------------------------------------------


def test_types_are_those_of_the_package() -> None:
    """Each type of thinking and of tool choice in the package is known here."""
    unions = {"Thinking": anthropic.types.ThinkingConfigParam, "ToolChoice": anthropic.types.ToolChoiceParam}
    for name, union in unions.items():
        known = MessagesRequest.model_json_schema()["$defs"][name]["properties"]["type"]["enum"]
        kinds = [get_type_hints(each)["type"] for each in get_args(union)]
        assert sorted(known) == sorted(kind for each in kinds for kind in get_args(each))
