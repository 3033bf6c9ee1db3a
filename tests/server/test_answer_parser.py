"""Calls and thinking are read out of answers as the model's own chat template writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from llamahybrid.client.chat_template import TemplateFormatter
from llamahybrid.client.markers import Markers, probe
from llamahybrid.client.thought import ThoughtMarkers
from llamahybrid.engine.sdist import member
from llamahybrid.server.answer_parser import AnswerParser
from llamahybrid.tiny.vocab import CHAT_TEMPLATE

TOOLS: dict[str, Any] = {
    "edit": {
        "properties": {"path": {"type": "string"}, "text": {"type": "string"}, "line": {"type": "integer"}}
    },
    "list": {},
}

TURN = "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
CALLS = "{% for c in m.tool_calls or [] %}"
END = "{% endfor %}[end]{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
JSON = (
    TURN + CALLS + "\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>' + END
)
NAMED = TURN + CALLS + "<function={{ c.function.name }}>{{ c.function.arguments }}</function>" + END
TAGGED = (
    TURN + CALLS + "\n\n<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments|items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>" + END
)
INVOKED = (
    TURN + "{% if m.tool_calls %}<calls>\n" + CALLS + '<invoke name="{{ c.function.name }}">\n'
    '{% for k, v in c.function.arguments|items %}<parameter name="{{ k }}">{{ v }}</parameter>\n{% endfor %}'
    "</invoke>\n{% endfor %}</calls>{% endif %}[end]{% endfor %}[assistant]"
)
BARE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}"
    '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}[end]{% endfor %}[assistant]"
)
NONE = TURN + "[end]{% endfor %}[assistant]"
THINKS = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}[end]{% endfor %}[assistant]"
)


def markers(template: str) -> Markers:
    formatter = TemplateFormatter(template, "<eos>", "<bos>")
    return probe(lambda messages, tools: formatter(messages=messages, tools=tools).prompt, lambda text: True)


def read(
    found: Markers, text: str, size: int = 10**6, think: bool = True, thinking: bool = False
) -> tuple[str, str, list[Any]]:
    """The thinking, the content and the calls of an answer that comes in pieces of that size."""
    reader = AnswerParser(found, TOOLS, think, thinking)
    deltas = [delta for at in range(0, len(text), size) for delta in reader.feed(text[at : at + size])]
    deltas += reader.end()
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    assert len({call["id"] for call in calls}) == len(calls)
    told = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    thoughts = "".join(delta.get("reasoning_content", "") for delta in deltas)
    return thoughts, "".join(delta.get("content", "") for delta in deltas), told


EDIT = {"path": "a b.py", "text": "if a < b:\n    return 1\n", "line": 3}
TEMPLATES = {"JSON": JSON, "NAMED": NAMED, "TAGGED": TAGGED, "INVOKED": INVOKED, "BARE": BARE}


def written(form: str, said: str = "Look.") -> str:
    """Return an answer with a call, as the template writes it."""
    mapping = markers(TEMPLATES[form]).mapping
    function = {"name": "edit", "arguments": EDIT if mapping else json.dumps(EDIT)}
    message: Any = {"role": "assistant", "content": said, "tool_calls": [{"id": "1", "function": function}]}
    prompt = Jinja2ChatFormatter(TEMPLATES[form], "", "")(messages=[message]).prompt
    return prompt.partition("[assistant]")[2].partition("[end]")[0]


@pytest.mark.parametrize("size", [1, 7, 10**6])
@pytest.mark.parametrize("form", TEMPLATES)
def test_a_call_is_read_as_the_template_writes_it(form: str, size: int) -> None:
    said = "" if form == "BARE" else "Look."  # there a call is all of an answer
    assert read(markers(TEMPLATES[form]), written(form, said), size) == ("", said, [("edit", EDIT)])


def test_several_calls() -> None:
    two = f'{written("JSON")}\n<tool_call>\n{{"name": "list", "arguments": {{}}}}\n</tool_call>\n'
    assert read(markers(JSON), two, 5) == ("", "Look.", [("edit", EDIT), ("list", {})])
    two = written("INVOKED").replace("</calls>", '<invoke name="list">\n</invoke>\n</calls>')
    assert read(markers(INVOKED), two, 5) == ("", "Look.", [("edit", EDIT), ("list", {})])
    listed = '<tool_call>\n[{"name": "list", "arguments": {}}, {"name": "list"}]</tool_call>'
    assert read(markers(JSON), listed)[2] == [("list", {}), ("list", {})]
    lines = listed.replace("[", "").replace("]", "").replace("}}, {", "}}\n{")
    assert read(markers(JSON), lines)[2] == [("list", {}), ("list", {})]


def template_of(name: str) -> str:
    return member(f"vendor/llama.cpp/models/templates/{name}.jinja").read_text(encoding="utf-8")


OF_MODELS = (
    *("mistralai-Ministral-3-14B-Reasoning-2512", "Mistral-Small-3.2-24B-Instruct-2506"),
    *("mistralai-Mistral-Nemo-Instruct-2407", "moonshotai-Kimi-K2", "Kimi-K2-Thinking", "Kimi-K2-Instruct"),
    *("Qwen3-Coder", "Qwen-Qwen3-0.6B", "Qwen-Qwen2.5-7B-Instruct", "GLM-4.6", "MiniMax-M2"),
    *("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
    *("ibm-granite-granite-4.0", "meta-llama-Llama-3.1-8B-Instruct", "ByteDance-Seed-OSS"),
)


@pytest.mark.parametrize(
    "name", ["Qwen3.5-4B", *(pytest.param(name, marks=pytest.mark.full) for name in OF_MODELS)]
)
def test_calls_are_read_as_templates_of_models_write_them(name: str) -> None:
    template = template_of(name)
    found = markers(template)
    formatter = TemplateFormatter(template, "<eos>", "<bos>")
    arguments = {"path": "a b.py", "text": "if a < b:\n    return 1\n"}
    function = {"name": "edit", "arguments": arguments if found.mapping else json.dumps(arguments)}
    tool = {"type": "function", "function": {"name": "edit", "description": "", "parameters": TOOLS["edit"]}}

    def prompt(**said: Any) -> str:
        messages: Any = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Said.", **said}]
        tools: Any = [tool]
        return formatter(messages=messages, tools=tools).prompt

    head, _, tail = prompt().partition("Said.")
    call_id = "functions.edit:0" if "Kimi-K2" in name else "call12345"
    whole = prompt(tool_calls=[{"id": call_id, "type": "function", "function": function}])
    answer = whole.partition("Said.")[2] or whole.removeprefix(head.rstrip())
    assert read(found, answer.removesuffix(tail), 7) == ("", "", [("edit", arguments)])


@pytest.mark.parametrize("size", [1, 10**6])
@pytest.mark.parametrize(
    "text",
    [
        "No call at all, though <tool_ca is near.\n",
        "<tool_call>\nno JSON\n</tool_call> and on",
        '<tool_call>\n{"name": "edit", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "edit", "argum',
        "Less <",
        "",
    ],
)
def test_text_that_only_resembles_a_call_stays_text(text: str, size: int) -> None:
    assert read(markers(JSON), text, size) == ("", text, [])


def test_a_call_without_marks_is_all_of_an_answer() -> None:
    found = markers(BARE)
    call = '{"name": "list", "parameters": {}}'
    assert read(found, f"\n{call}", 3) == ("", "", [("list", {})])
    for text in (f"Say {call}", '{"name": "other", "parameters": {}}', '{"a": 1}'):
        assert read(found, text, 3) == ("", text, [])


def test_a_call_that_the_answer_s_end_cuts_off_after_its_object() -> None:
    text = '<tool_call>\n{"name": "list", "arguments": {}}\n'
    assert read(markers(JSON), text, 4) == ("", "", [("list", {})])


@pytest.mark.parametrize("size", [1, 3, 10**6])
def test_thinking_is_separated(size: int) -> None:
    found = markers(THINKS)
    assert found.think == ThoughtMarkers("<think>", "</think>", "\n", "\n</think>\n\n")
    assert read(found, "<think>\nHm.\nSo\n</think>\n\nYes.", size) == ("Hm.\nSo", "Yes.", [])
    assert read(found, "Hm.\n</think>\n\nYes.", size, thinking=True) == ("Hm.", "Yes.", [])
    assert read(found, "Hm, and", size, thinking=True) == ("Hm, and", "", [])
    assert read(found, "Yes, <think> is a tag.", size) == ("", "Yes, <think> is a tag.", [])
    assert read(found, "<think>\nHm.</think>Yes", size, think=False)[0] == ""


def test_markers_of_templates() -> None:
    tiny = markers(CHAT_TEMPLATE)
    assert tiny.call is not None
    assert (tiny.call.form, tiny.call.begin, tiny.call.end) == ("object", "<tool_call>", "</tool_call>")
    assert tiny.think is not None
    assert (tiny.think.begin, tiny.think.end, tiny.mapping) == ("<think>", "</think>", False)
    assert tiny.think.close == "\n</think>\n\n"
    assert markers(NONE) == Markers()
    assert markers("{{ raise_exception('no') }}") == Markers()
    assert [markers(template).mapping for template in (JSON, NAMED, TAGGED)] == [True, False, True]


def test_markers_that_answers_do_not_spell_are_none() -> None:
    for template in (JSON, THINKS):
        formatter = Jinja2ChatFormatter(template, "<eos>", "<bos>")
        found = probe(
            lambda messages, tools, made=formatter: made(messages=messages, tools=tools).prompt,
            lambda text: False,
        )
        assert (found.call, found.think) == (None, None)


CONTROL_TOKENS = {
    "mistralai-Ministral-3-14B-Reasoning-2512": ("[THINK]", "[/THINK]", "parts"),
    "Kimi-K2-Thinking": ("<think>", "</think>", "reasoning_content"),
    "openai-gpt-oss-120b": ("<|channel|>analysis<|message|>", "<|end|>", "thinking"),
    "Qwen-Qwen3-0.6B": ("<think>", "</think>", "reasoning_content"),
    "GLM-4.6": ("<think>", "</think>", "reasoning_content"),
    "ByteDance-Seed-OSS": ("<seed:think>", "</seed:think>", "reasoning_content"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", CONTROL_TOKENS)
def test_thoughts_are_read_as_templates_of_models_write_them(name: str) -> None:
    found = markers(template_of(name))
    assert found.think is not None
    begin, end, taken = CONTROL_TOKENS[name]
    assert (found.think.begin, found.think.end, found.taken) == (begin, end, taken)
    assert end in found.think.closing


@pytest.mark.full
def test_several_calls_of_mistral_and_kimi() -> None:
    calls = [("edit", {"path": "x", "text": "[TOOL_CALLS]"}), ("list", {})]
    for name, written in {
        "mistralai-Ministral-3-14B-Reasoning-2512": "[TOOL_CALLS]{0[0]}[ARGS]{0[1]}"
        "[TOOL_CALLS]{1[0]}[ARGS]{1[1]}",
        "Mistral-Small-3.2-24B-Instruct-2506": "[TOOL_CALLS]{0[0]}[CALL_ID]a8Bc0d123[ARGS]{0[1]}[TOOL_CALLS]"
        "{1[0]}[CALL_ID]123456789[ARGS]{1[1]}",
        "moonshotai-Kimi-K2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.{0[0]}:3"
        "<|tool_call_argument_begin|>{0[1]}<|tool_call_end|><|tool_call_begin|>functions.{1[0]}:4"
        "<|tool_call_argument_begin|>{1[1]}<|tool_call_end|><|tool_calls_section_end|>",
        "mistralai-Mistral-Nemo-Instruct-2407": '[TOOL_CALLS][{{"name": "{0[0]}", "arguments": {0[1]}, "id": '
        '"abc"}}, {{"name": "{1[0]}", "arguments": {1[1]}, "id": "abd"}}]',
    }.items():
        spelt = [(call, json.dumps(arguments)) for call, arguments in calls]
        answer = "Look." + written.format(*spelt)
        assert read(markers(template_of(name)), answer, 5) == ("", "Look.", calls), name
