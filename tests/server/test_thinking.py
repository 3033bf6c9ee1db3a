"""Thinking over HTTP: budgets by each name, counts, and answers that go on from the assistant's message."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from llamahybrid.server.bodies import BUDGETS
from tests.lab.gguf_edits import with_control_marks, with_template
from tests.lab.serving import Serving, parts, serving
from tests.request.test_thinking import CLOSE, HELLO, OPENED

from .conftest import TinyModel
from .test_harmony_parser import HARMONY

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
ASKED: dict[str, Any] = {"messages": HELLO, "temperature": 0.0, "repeat_penalty": 1.0, "max_tokens": 40}
TOLD = {**ASKED, "reasoning_format": "auto"}
QUESTION = HELLO[0]


@pytest.fixture(scope="module")
def thinker(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server of a model whose prompts open a thought."""
    model = with_template(tiny_model("qwen35"), tmp_path_factory.mktemp("think") / "think.gguf", OPENED)
    with serving(model) as server:
        yield server


@pytest.fixture
def http(thinker: Serving) -> Iterator[httpx.Client]:
    with thinker.client() as client:
        yield client


def ask(http: httpx.Client, path: str = CHAT, **asked: Any) -> Any:
    """The answer; of a stream, its parts as one message, with the last usage."""
    got = http.post(path, json=asked)
    assert got.status_code == 200, got.text
    if not asked.get("stream"):
        return got.json()
    chunks = parts(got)
    deltas = [each["choices"][0]["delta"] for each in chunks if each["choices"]]
    names = ("reasoning_content", "content")
    message = {name: "".join(each.get(name) or "" for each in deltas) for name in names}
    calls = [call for each in deltas for call in each.get("tool_calls") or ()]
    usage = next((each["usage"] for each in chunks if each.get("usage")), None)
    return {"choices": [{"message": {**message, "tool_calls": calls}}], "usage": usage}


def message(made: Any) -> tuple[str, str]:
    told = made["choices"][0]["message"]
    return told.get("reasoning_content") or "", told["content"] or ""


@pytest.mark.parametrize("stream", [False, True])
def test_each_name_of_the_budget_bounds_the_thought(http: httpx.Client, stream: bool) -> None:
    more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    whole = message(ask(http, **ASKED, thinking_budget=5))[1]
    thought, _, answer = whole.partition(CLOSE)
    assert len(thought) == 5
    for name in BUDGETS:
        got = ask(http, **TOLD, **more, **{name: 5})
        assert message(got) == (thought, answer), name
        assert got["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}
        assert got["usage"]["completion_tokens"] == 40
    assert message(ask(http, **TOLD, **more, thinking_budget=0))[0] == ""
    assert message(ask(http, **TOLD, **more, thinking_budget=-1)) == message(ask(http, **TOLD, **more))
    said = message(ask(http, **TOLD, **more, thinking_budget=5, reasoning_budget_message=" Enough."))
    assert said[0] == thought + " Enough."


def test_budgets_of_plain_completions(http: httpx.Client) -> None:
    prompt = http.post("/apply-template", json={"messages": HELLO}).json()["prompt"]
    asked = {name: value for name, value in ASKED.items() if name != "messages"}
    right = message(ask(http, **ASKED, thinking_budget=4))[1]
    for path, name in (
        ("/v1/completions", "thinking_token_budget"),
        ("/completion", "reasoning_budget_tokens"),
    ):
        got = ask(http, path, prompt=prompt, **asked, **{name: 4})
        assert (got["choices"][0]["text"] if path == "/v1/completions" else got["content"]) == right
    got = ask(http, "/v1/completions", prompt="No thought", **asked, thinking_token_budget=0)
    assert CLOSE not in got["choices"][0]["text"]


def test_budgets_that_contradict_are_refused(http: httpx.Client) -> None:
    got = http.post(CHAT, json={**ASKED, "thinking_budget": 1, "reasoning_budget": 2})
    assert got.status_code == 400
    assert "reasoning_budget" in got.text
    assert http.post(CHAT, json={**ASKED, "reasoning_effort": "low"}).status_code == 400, "no switch"


def test_a_template_may_tell_the_model_its_budget(tiny_model: TinyModel, tmp_path: Path) -> None:
    """As Seed-OSS's does."""
    told = OPENED + "{% if thinking_budget is defined %}{{ '[' ~ thinking_budget ~ ']' }}{% endif %}"
    model = with_template(tiny_model("qwen35"), tmp_path / "told.gguf", told)
    with serving(model) as server, server.client() as http:

        def prompt(**more: Any) -> str:
            got = http.post("/apply-template", json={"messages": HELLO, **more})
            return str(got.raise_for_status().json()["prompt"])

        assert prompt(reasoning_budget=5) == prompt() + "[5]"
        assert prompt(thinking_budget=-1) == prompt()
        given = {"chat_template_kwargs": {"thinking_budget": 3}}
        assert prompt(thinking_budget=5, **given) == prompt() + "[3]"


def test_a_budget_is_refused_where_no_thinking_is_known(tiny_model: TinyModel, tmp_path: Path) -> None:
    plain = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    model = with_template(tiny_model("qwen35"), tmp_path / "plain.gguf", plain)
    with serving(model) as server, server.client() as http:
        for path, asked in ((CHAT, {"messages": HELLO}), ("/v1/completions", {"prompt": "Hi"})):
            for name in BUDGETS:
                got = http.post(path, json={**asked, "max_tokens": 2, name: 3})
                assert (got.status_code, got.json()["error"]["param"]) == (400, name)
            assert http.post(path, json={**asked, "max_tokens": 2, "thinking_budget": -1}).is_success


def test_anthropic_s_budget(thinker: Serving, http: httpx.Client) -> None:
    with anthropic.Anthropic(base_url=thinker.url, api_key="none", max_retries=0) as claude:
        options: dict[str, Any] = {"model": "any", "max_tokens": 40, "messages": HELLO}
        options |= {"extra_body": {"temperature": 0.0}}
        for budget in (0, 5):
            right = [text for text in message(ask(http, **TOLD, thinking_budget=budget)) if text]
            thinking: Any = {"type": "enabled", "budget_tokens": budget}
            got = claude.messages.create(thinking=thinking, **options)
            assert [getattr(each, "thinking", getattr(each, "text", None)) for each in got.content] == right
            with claude.messages.stream(thinking=thinking, **options) as stream:
                told = stream.get_final_message().content
            assert [each.model_dump(exclude={"parsed_output"}) for each in told] == [
                each.model_dump() for each in got.content
            ]
        off = claude.messages.create(thinking={"type": "disabled"}, **options)
        assert [each.type for each in off.content] == ["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_without_a_budget_a_form_holds_from_the_first_token(http: httpx.Client, stream: bool) -> None:
    forms: list[dict[str, Any]] = [{"guided_regex": "yes"}, {"guided_choice": ["yes"]}]
    forms += [{"json_schema": {"const": "yes"}}, {"grammar": 'root ::= "yes"'}]
    more: dict[str, Any] = {"stream": stream, "stream_options": {"include_usage": True}} if stream else {}
    for form in forms:
        made = ask(http, **TOLD, **form, **more)
        thought, answer = message(made)
        assert (thought, answer.strip('"')) == ("", "yes")
        assert made["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


OFF: list[dict[str, Any]] = [{"reasoning_effort": "none"}, {"enable_thinking": False}, {"thinking_budget": 0}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("told", [ASKED, TOLD], ids=["none", "auto"])
def test_content_has_no_end_of_a_thought_that_is_off(
    http: httpx.Client, told: dict[str, Any], stream: bool
) -> None:
    right = message(ask(http, **TOLD, **OFF[-1]))
    assert right[0] == ""
    for off in OFF:
        assert message(ask(http, **told, **off, stream=stream)) == right
        made = message(ask(http, **told, **off, stream=stream, json_schema={"const": "yes"}))
        assert made == ("", '"yes"')
    thought, answer = message(ask(http, **told, thinking_budget=3, stream=stream, json_schema={"const": 1}))
    assert (len(thought), answer) == (3, "1")


# -- prefill -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_goes_on_from_the_assistant_s_message(http: httpx.Client, stream: bool) -> None:
    thought, _, answer = message(ask(http, **ASKED, thinking_budget=4))[1].partition(CLOSE)
    begun = {"role": "assistant", "reasoning_content": thought, "content": answer[:6]}
    asked = {**TOLD, "messages": [QUESTION, begun], "max_tokens": len(answer) - 6, "stream": stream}
    none, rest = message(ask(http, **asked))
    assert (none, rest[: len(answer) - 6]) == ("", answer[6:])
    vllm = {"continue_final_message": True, "add_generation_prompt": False}
    assert message(ask(http, **asked, **vllm))[1] == rest
    new = message(ask(http, **asked, continue_final_message=False, thinking_budget=0))[1]
    assert new != rest
    assert message(ask(http, **asked, add_generation_prompt=True, thinking_budget=0))[1] == new
    assert message(ask(http, **asked, add_generation_prompt=False))[1] == rest
    tag = {"grammar": 'root ::= "<think>a"', "max_tokens": 8}
    assert message(ask(http, **{**asked, **tag})) == ("", "<think>a")
    begun = {"role": "assistant", "reasoning": thought[:2], "reasoning_content": None}
    got = message(ask(http, **{**asked, "messages": [QUESTION, begun]}, thinking_budget=2))
    assert got[0] == thought[2:]
    assert got[1][:5] == answer.lstrip("\n")[:5]


def test_messages_go_on_from_the_assistant_s(thinker: Serving, http: httpx.Client) -> None:
    begun: Any = {"role": "assistant", "content": "It needs"}
    right = message(ask(http, **{**TOLD, "messages": [QUESTION, begun]}))[1]
    with anthropic.Anthropic(base_url=thinker.url, api_key="none", max_retries=0) as claude:
        options: dict[str, Any] = {"model": "any", "messages": [QUESTION, begun]}
        got = claude.messages.create(**options, max_tokens=40, extra_body={"temperature": 0.0})
        assert [(each.type, getattr(each, "text", "")) for each in got.content] == [("text", right)]
        counted = claude.messages.count_tokens(**options).input_tokens
    assert counted == got.usage.input_tokens + (got.usage.cache_read_input_tokens or 0)


def test_impossible_continuations_are_refused(http: httpx.Client) -> None:
    for more in ({"continue_final_message": True}, {"add_generation_prompt": False}):
        got = http.post(CHAT, json={**ASKED, **more})
        assert got.status_code == 400
        assert got.json()["error"]["param"] == next(iter(more))
    begun = [QUESTION, {"role": "assistant", "content": "It needs"}]
    for both in (True, False):
        more = {"continue_final_message": both, "add_generation_prompt": both}
        got = http.post(CHAT, json={**ASKED, "messages": begun, **more})
        assert got.status_code == 400
        assert "add_generation_prompt" in got.json()["error"]["message"]


PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'thinking' %}[THINK]{{ p.thinking }}[/THINK]{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}[end]{% endfor %}"
)
"""Mistral's way: the thought of an answer is a part of its content."""


def test_thoughts_are_parts_of_content_where_the_template_takes_them_so(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    model = with_template(tiny_model("qwen35"), tmp_path / "parts.gguf", PARTS)
    with serving(model) as server, server.client() as http:
        for content in ("Yes.", ""):
            said = {"role": "assistant", "reasoning_content": "Hm.", "content": content}
            got = http.post("/apply-template", json={"messages": [QUESTION, said, QUESTION]})
            asked = f"{QUESTION['content']}[end]"
            assert got.json()["prompt"] == f"{asked}[THINK]Hm.[/THINK]{content}[end]{asked}"


# -- marks that are control tokens -----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_control_tokens_are_read(tiny_model: TinyModel, tmp_path: Any, stream: bool) -> None:
    """As Mistral's and Kimi's: no text of an answer has them unless it is read."""
    model = with_template(
        with_control_marks(tiny_model("qwen35"), tmp_path / "marks.gguf"), tmp_path / "m.gguf", OPENED
    )
    with serving(model) as server, server.client() as http:
        plain = message(ask(http, **ASKED, thinking_budget=5, stream=stream))
        thought, answer = message(ask(http, **TOLD, thinking_budget=5, stream=stream))
        assert "</think>" not in plain[1]
        assert len(thought) == 5
        assert plain[1] == thought + CLOSE.replace("</think>", "") + answer


# -- channels --------------------------------------------------------------------------------------------

SPOKEN = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."


@pytest.fixture(scope="module")
def harmony(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server of a model with a template like gpt-oss's."""
    model = with_template(tiny_model("qwen35"), tmp_path_factory.mktemp("harmony") / "h.gguf", HARMONY)
    with serving(model) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_channels_are_thinking_content_and_calls(harmony: Serving, stream: bool) -> None:
    function = {"name": "edit", "parameters": {"type": "object", "properties": {}}}
    with harmony.client() as http:
        asked = {**TOLD, "max_tokens": 200, "stream": stream}
        assert message(ask(http, **asked, grammar=f'root ::= "{SPOKEN}"')) == ("Hm.", "Yes.")
        spoken = SPOKEN.replace("final<", "commentary to=functions.edit<").replace("Yes.", "{}")
        got = ask(
            http, **asked, tools=[{"type": "function", "function": function}], grammar=f'root ::= "{spoken}"'
        )
        (call,) = got["choices"][0]["message"]["tool_calls"]
        assert (call["function"], message(got)[0]) == ({"name": "edit", "arguments": "{}"}, "Hm.")


def test_a_budget_ends_the_channel_of_thinking(harmony: Serving) -> None:
    with harmony.client() as http:
        form = 'root ::= "<|channel|>analysis<|message|>" "Yes."'
        got = ask(http, **{**TOLD, "max_tokens": 200}, grammar=form, thinking_budget=4)
        thought, answer = message(got)
        assert (len(thought), answer) == (4, "Yes.")
        assert got["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


def test_history_and_prefill_of_channels(harmony: Serving) -> None:
    def prompt(http: httpx.Client, **last: Any) -> str:
        messages = [QUESTION, {"role": "assistant", **last}]
        text: str = http.post("/apply-template", json={"messages": messages}).json()["prompt"]
        return text.partition("<|start|>assistant")[2]

    call = {"id": "1", "type": "function", "function": {"name": "edit", "arguments": '{"a": 1}'}}
    thinks = "<|channel|>analysis<|message|>Hm."
    with harmony.client() as http:
        assert prompt(http, content="Yes") == "<|channel|>final<|message|>Yes"
        assert prompt(http, reasoning_content="Hm.") == thinks
        whole = f"{thinks}<|end|><|start|>assistant<|channel|>final<|message|>Yes"
        assert prompt(http, reasoning_content="Hm.", content="Yes") == whole
        told = prompt(http, reasoning_content="Hm.", content="I look.", tool_calls=[call])
        assert told.startswith(f"{thinks}<|end|><|start|>assistant to=functions.edit")
        begun = [QUESTION, {"role": "assistant", "content": "Yes"}]
        got = ask(http, **{**TOLD, "messages": begun}, grammar='root ::= ", it is."')
        assert message(got) == ("", ", it is.")
        begun = [QUESTION, {"role": "assistant", "reasoning_content": "Hm"}]
        got = ask(http, **{**TOLD, "messages": begun}, grammar='root ::= "."', thinking_budget=3)
        assert len(message(got)[0]) == 3
