"""Answers in OpenAI's harmony format: channels are thinking, content and calls."""

from __future__ import annotations

from typing import Any

import pytest

from llamahybrid.client.markers import probe
from llamahybrid.server.harmony_parser import HarmonyParser

HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.thinking and m.content and m.tool_calls %}{{ raise_exception('both') }}{% endif %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}<|start|>assistant to=functions.{{ c.name }}"
    "<|channel|>commentary json<|message|>{{ c.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""The parts of gpt-oss's template with the markers of answers."""

THOUGHT = "<|channel|>analysis<|message|>Hm.\n<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Yes."
CALL = "<|channel|>commentary to=functions.edit <|constrain|>json<|message|>"


def markers(template: str = HARMONY) -> Any:
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    formatter = Jinja2ChatFormatter(template, "<eos>", "<bos>")
    return probe(lambda messages, tools: formatter(messages=messages, tools=tools).prompt, lambda text: True)


def read(text: str, size: int, tools: bool = True, think: bool = True) -> tuple[str, str, list[Any]]:
    reader = HarmonyParser(markers().channels, tools, think)
    deltas = [each for at in range(0, len(text), size) for each in reader.feed(text[at : at + size])]
    deltas += reader.end()
    calls = [call["function"] for each in deltas for call in each.get("tool_calls", ())]
    told = ["".join(each.get(name, "") for each in deltas) for name in ("reasoning_content", "content")]
    return told[0], told[1], [(call["name"], call["arguments"]) for call in calls]


def test_markers_of_channels_come_from_the_template() -> None:
    found = markers()
    channels = found.channels
    assert (channels.start, channels.end, channels.thought) == ("<|start|>assistant", "<|end|>", "analysis")
    assert found.think.begin == "<|channel|>analysis<|message|>"
    assert found.think.close == "<|end|><|start|>assistant<|channel|>final<|message|>"
    assert found.think.bare == "<|channel|>final<|message|>"
    assert (found.taken, found.mapping, found.call) == ("thinking", True, None)


@pytest.mark.parametrize("size", [1, 5, 10**6])
def test_channels_are_separated(size: int) -> None:
    assert read(THOUGHT + FINAL, size) == ("Hm.\n", "Yes.", [])
    assert read(FINAL + "<|end|>", size) == ("", "Yes.", [])
    assert read("<|channel|>analysis<|message|>Hm", size) == ("Hm", "", [])
    assert read(THOUGHT + CALL + '{"path": "x"}', size) == ("Hm.\n", "", [("edit", '{"path": "x"}')])
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    assert read(preamble + CALL + "{}", size) == ("", "I look.", [("edit", "{}")])
    in_role = " to=functions.edit<|channel|>commentary json<|message|>{}"
    assert read(in_role, size) == ("", "", [("edit", "{}")])
    assert read("No header", size) == ("", "No header", [])


@pytest.mark.parametrize("size", [1, 5, 10**6])
def test_unrequested_thoughts_and_malformed_calls_are_content(size: int) -> None:
    assert read(THOUGHT + FINAL, size, think=False)[1] == THOUGHT.removesuffix("<|start|>assistant") + "Yes."
    assert read(CALL + "{broken", size) == ("", CALL + "{broken", [])
    assert read(CALL + "{}", size, tools=False) == ("", "{}", [])
