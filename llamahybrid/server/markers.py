"""Markers: how a model writes calls of tools and its thinking, as its chat template spells them.

Nothing is known of models by name. The template formats a chat with a call in it, and one without; the
difference is how a call is written. llama.cpp's common/chat-diff-analyzer.cpp does likewise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

from llamahybrid.client.chat_template import template_of
from llamahybrid.llama import Llama
from llamahybrid.server.rendering import rendered

Render = Callable[[list[Any], list[Any]], str]
"""The prompt of messages and tools."""

_NAME, _KEYS, _VALUES = "probe_name", ("probe_first", "probe_second"), ("probe_one", "probe_two")
_SAID, _THOUGHT = "probe_said", "probe_thought"
_USER = {"role": "user", "content": "probe_question"}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "probe",
        "parameters": {"type": "object", "properties": {key: {"type": "string"} for key in _KEYS}},
    },
}
_ARGUMENTS = re.compile(
    rf'\{{\s*"{_KEYS[0]}"\s*:\s*"{_VALUES[0]}"\s*,\s*"{_KEYS[1]}"\s*:\s*"{_VALUES[1]}"\s*\}}'
)

_TAG = re.compile(r"([<\[][^<>\[\]\s|]+[>\]])\s*\Z")


@dataclass(frozen=True)
class CallMarkers:
    """Markers of a call."""

    form: Literal["object", "named", "tagged"]
    """`{"name": N, "arguments": {...}}`; a name and the object of its arguments; or each argument in tags."""
    begin: str
    """Text before the JSON, or before the name; may be empty where the form is an object."""
    end: str
    after_name: str = ""
    before_key: str = ""
    after_key: str = ""
    after_value: str = ""


@dataclass(frozen=True)
class Markers:
    """Markers of a model's answers."""

    call: CallMarkers | None = None
    """None: calls stay content."""
    think: tuple[str, str] | None = None
    """Text before and after thinking; None: thinking stays content."""
    mapping: bool = False
    """The template takes the arguments of a call as a mapping, and no text."""


_known: WeakKeyDictionary[Llama, Markers] = WeakKeyDictionary()


def markers_of(llm: Llama) -> Markers:
    """The markers of an open model. None has a chat format that is no template: it reads its own answers."""
    if template_of(llm) is None:
        return Markers()
    found = _known.get(llm)
    if found is None:

        def render(messages: list[Any], tools: list[Any]) -> str:
            return rendered(llm, {}, messages=messages, tools=tools).text

        found = _known[llm] = probe(render, lambda text: _spelt(llm, text))
    return found


def begins_thinking(llm: Llama, template: Mapping[str, Any]) -> bool:
    """Prompts of a model end with what begins its thinking, with these variables of the template."""
    think = markers_of(llm).think
    return think is not None and rendered(llm, template, messages=[_USER]).text.rstrip().endswith(think[0])


def _spelt(llm: Llama, text: str) -> bool:
    """An answer that holds it has it in its text: control tokens are not spelt."""
    tokens = llm.tokenize(text.encode("utf-8"), add_bos=False, special=True)
    return text in llm.detokenize(tokens).decode("utf-8", "replace")


def probe(render: Render, spelt: Callable[[str], bool]) -> Markers:
    """The markers of what `render` formats; `spelt`: a text that is part of an answer can be seen there."""
    plain = _rendered(render, {"content": _SAID})
    if plain is None:
        return Markers()
    mapping, written = False, _call_text(render, plain, as_text=True)
    if written is None or not (_ARGUMENTS.search(written) or "{" not in written):
        mapping, written = True, _call_text(render, plain, as_text=False)
    call = None if written is None else _call(written)
    if call is not None and not (spelt(call.begin) and spelt(call.end)):
        call = None
    think = _think(render, plain)
    if think is not None and not all(map(spelt, think)):
        think = None
    return Markers(call, think, mapping and written is not None)


def _rendered(render: Render, said: dict[str, Any]) -> str | None:
    try:
        return render([_USER, {"role": "assistant", **said}], [_TOOL])
    except Exception:  # a template may raise anything at what it does not know
        return None


def _call_text(render: Render, plain: str, as_text: bool) -> str | None:
    """Return the text that a call of two arguments adds to an answer; None if it cannot be found."""
    pairs = dict(zip(_KEYS, _VALUES, strict=True))
    arguments: Any = "{" + ", ".join(f'"{key}": "{value}"' for key, value in pairs.items()) + "}"
    function = {"name": _NAME, "arguments": arguments if as_text else pairs}
    calls = [{"id": "probe12345", "type": "function", "function": function}]
    written = _rendered(render, {"content": _SAID, "tool_calls": calls})
    head, _, tail = plain.partition(_SAID)
    head = head.rstrip()
    if written is None or not tail or not (_SAID in written or written.startswith(head)):
        return None
    rest = written.partition(_SAID)[2] if _SAID in written else written[len(head) :]
    if not rest.endswith(tail) or any(text not in rest for text in (_NAME, *_VALUES)):
        return None
    return rest[: len(rest) - len(tail)]


def _call(written: str) -> CallMarkers | None:
    before, _, after = written.partition(_NAME)
    found = _ARGUMENTS.search(after)
    if found is None:
        return _tagged(before, after)
    end = after[found.end() :]
    if '"name"' in before:
        begin = before[: before.rindex("{")].strip().removesuffix("[").rstrip()
        return CallMarkers("object", begin, end.strip().lstrip("}]").strip())
    if not before.strip() or not end.strip():
        return None
    return CallMarkers("named", before.strip(), end.strip(), after_name=after[: found.start()])


def _tagged(before: str, after: str) -> CallMarkers | None:
    places = [after.find(text) for pair in zip(_KEYS, _VALUES, strict=True) for text in pair]
    if places != sorted(places) or places[0] < 0 or not before.strip():
        return None
    key, value, second, last = places
    named = after[:key]
    after_key = after[key + len(_KEYS[0]) : value]
    between = after[value + len(_VALUES[0]) : second]
    start = max(named.rfind("<"), named.rfind("["))
    before_key = named[start:]
    tail = after[last + len(_VALUES[1]) :]
    after_value = between.removesuffix(before_key)
    if start < 0 or after_value == between or not tail.startswith(after_value.rstrip()):
        return None
    end = tail[len(after_value.rstrip()) :].strip()
    if not (end and after_value.strip() and after_key.strip()):
        return None
    return CallMarkers("tagged", before.strip(), end, named[:start], before_key, after_key, after_value)


def _think(render: Render, plain: str) -> tuple[str, str] | None:
    written = _rendered(render, {"content": _SAID, "reasoning_content": _THOUGHT}) or ""
    before, found, after = written.partition(_THOUGHT)
    if found and _SAID in after:
        begin, end = _TAG.search(before), after.partition(_SAID)[0].strip()
        return (begin[1], end) if begin is not None and end else None
    begin = _TAG.search(plain)  # a template that begins the thinking, and leaves it out of what was said
    if begin is None or not re.fullmatch(r"<[\w:]*think[\w:]*>", begin[1]):
        return None
    return begin[1], begin[1].replace("<", "</", 1)
