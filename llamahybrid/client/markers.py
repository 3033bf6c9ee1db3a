"""Markers: how a model writes calls and its thinking, found once in prompts that its chat template makes.

Nothing is known of models by name. The template formats a chat with a call in it, and one without; the
difference is how a call is written. llama.cpp's common/chat-diff-analyzer.cpp does likewise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

import llama_cpp
from llama_cpp.llama_tokenizer import LlamaTokenizer

from llamahybrid.client.chat_template import chat_prompt, template_of
from llamahybrid.client.thought import ThoughtMarkers

CONTROL = re.compile(r"<\|[^<>|]+\|>|\[[A-Z_]+\]")
"""A control token, as templates spell them."""

PROBED_ID = "probe1234"
"""The id of a call that a template is probed with. Mistral's take nine letters and digits, and no other."""


@dataclass(frozen=True)
class CallMarkers:
    """Markers of a call."""

    form: Literal["object", "named", "tagged"]
    """`{"name": N, "arguments": {...}}`; a name and the object of its arguments; or each argument in tags."""
    begin: str
    """Text before the JSON, or before the name; may be empty where the form is an object."""
    end: str
    """Text behind a call; empty: the end of the answer, or the next call."""
    after_name: str = ""
    before_key: str = ""
    after_key: str = ""
    after_value: str = ""

    @property
    def opens(self) -> str:
        """The text that begins calls; "" if a call has no marker and is all of an answer."""
        control = CONTROL.match(self.begin)
        return control[0] if control else next(iter(self.begin.splitlines()), "")

    @property
    def closes(self) -> str:
        """The text that ends calls; "" if the end of the answer does."""
        control = list(CONTROL.finditer(self.end))
        if control and control[-1].end() == len(self.end):
            return control[-1][0]
        return self.end.splitlines()[-1] if self.end else ""

    @property
    def named(self) -> re.Pattern[str]:
        """Text between a name and its arguments, where ids and numbers of calls may stand."""
        text = re.escape(self.after_name.strip()).replace(PROBED_ID, r"[^<>\[\]{}\s]*")
        return re.compile(re.sub(r"\\?:0", r":\\d+", text, count=1) if self.after_name[:2] == ":0" else text)


@dataclass(frozen=True)
class Channels:
    """Markers of answers of several messages, each to a channel: OpenAI's harmony format."""

    start: str
    """Text before the header of each message but the first."""
    channel: str
    message: str
    """Text between a header and what is said."""
    end: str
    thought: str
    """The channel of thinking."""


@dataclass(frozen=True)
class Markers:
    """Markers of a model's answers."""

    call: CallMarkers | None = None
    """None: calls stay content."""
    think: ThoughtMarkers | None = None
    """None: thinking stays content."""
    mapping: bool = False
    """The template takes the arguments of a call as a mapping, and no text."""
    channels: Channels | None = None
    """None: an answer is one message."""
    taken: Literal["reasoning_content", "thinking", "parts"] = "reasoning_content"
    """The place of an earlier answer's thought in the messages that the template reads."""
    control: frozenset[int] = field(default_factory=frozenset)
    """Control tokens that markers are made of, which are spelt in an answer that is read."""


# -- found by probing --------------------------------------------------------------------------------------

Render = Callable[[list[Any], list[Any]], str]
"""The prompt of messages and tools."""

_NAME, _KEYS, _VALUES = "probe_name", ("probe_first", "probe_second"), ("probe_one", "probe_two")
_PAIRS = dict(zip(_KEYS, _VALUES, strict=True))
_TEXT = "{" + ", ".join(f'"{key}": "{value}"' for key, value in _PAIRS.items()) + "}"
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
_EMPTY = re.compile(rf"([<\[]\w*think\w*[>\]])(\s*)([<\[]/\w*think\w*[>\]]\s*){_SAID}", re.I)
"""An empty thought, as templates write it that leave thoughts out of an answer."""
_OBJECT_END = re.compile(r'\A(?:\s*,\s*"\w+"\s*:\s*"[^"]*")*\s*\}\s*\]?')
"""Behind the arguments of a call that is an object: further fields, an id say, and its end."""

_known: WeakKeyDictionary[Any, Markers] = WeakKeyDictionary()


def markers_of(llm: Any) -> Markers:
    """The markers of an open model. None has a chat format that is no template: it reads its own answers."""
    if template_of(llm) is None:
        return Markers()
    found = _known.get(llm)
    if found is None:

        def render(messages: list[Any], tools: list[Any]) -> str:
            return chat_prompt(llm, {}, messages=messages, tools=tools).text

        found = _known[llm] = probe(render, lambda text: _spelt(llm, text), lambda text: _control(llm, text))
    return found


def begins_thinking(llm: Any, template: Mapping[str, Any]) -> bool:
    """Prompts of a model end with what begins its thinking, with these variables of the template."""
    think = markers_of(llm).think
    if think is None:
        return False
    prompt = chat_prompt(llm, template, messages=[{"role": "user", "content": "Hi"}])
    return prompt.text.rstrip().endswith(think.begin)


def _spelt(llm: Any, text: str) -> bool:
    """An answer that holds it has it in its text, where control tokens are spelt if that can be."""
    tokens = llm.tokenize(text.encode("utf-8"), add_bos=False, special=True)
    own = type(llm.tokenizer_) is LlamaTokenizer
    return text in llm.detokenize(tokens, special=own).decode("utf-8", "replace")


def _control(llm: Any, text: str) -> frozenset[int]:
    """The control tokens of a text, which `detokenize` leaves out."""
    vocab, tokens = llm._model.vocab, llm.tokenize(text.encode("utf-8"), add_bos=False, special=True)
    control = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL
    return frozenset(each for each in tokens if llama_cpp.llama_vocab_get_attr(vocab, each) & control)


# -- calls -----------------------------------------------------------------------------------------------


def probe(
    render: Render,
    spelt: Callable[[str], bool],
    control: Callable[[str], frozenset[int]] = lambda text: frozenset(),
) -> Markers:
    """The markers of what `render` formats.

    `spelt`: a text that is part of an answer can be seen there. `control`: the control tokens of a text.
    """
    plain = _rendered(render, {"content": _SAID})
    if plain is None:
        return Markers()
    channels = _channels(render, plain)
    think, taken = _think(render, plain, channels)
    if think is not None and not (spelt(think.begin) and spelt(think.end)):
        think = None
    if channels is not None:
        texts = (channels.start, channels.channel, channels.message, channels.end)
        mapping = _escapes_text(render)
        return Markers(None, think, mapping, channels, taken, control("".join(texts)))
    mapping, written = False, _call_text(render, plain, as_text=True)
    if written is None or not (_ARGUMENTS.search(written) or "{" not in written):
        mapping, written = True, _call_text(render, plain, as_text=False)
    call = None if written is None else _call(written)
    if call is not None and not (spelt(call.begin) and spelt(call.end)):
        call = None
    spelling = [] if call is None else [call.begin, call.after_name, call.end]
    spelling += [] if think is None else [think.begin, think.end]
    return Markers(call, think, mapping and written is not None, None, taken, control(" ".join(spelling)))


def _rendered(render: Render, said: dict[str, Any]) -> str | None:
    try:
        return render([_USER, {"role": "assistant", **said}], [_TOOL])
    except Exception:  # a template may raise anything at what it does not know
        return None


def _calls(arguments: Any, call_id: str = PROBED_ID) -> list[Any]:
    function = {"name": _NAME, "arguments": arguments}
    return [{"id": call_id, "type": "function", "function": function}]


def _call_text(render: Render, plain: str, as_text: bool) -> str | None:
    """Return the text that a call of two arguments adds to an answer; None if it cannot be found."""
    for call_id in (PROBED_ID, f"functions.{_NAME}:0"):  # Kimi K2's templates have the name in the id alone
        calls = _calls(_TEXT if as_text else _PAIRS, call_id)
        written = _rendered(render, {"content": _SAID, "tool_calls": calls})
        head, _, tail = plain.partition(_SAID)
        head = head.rstrip()
        if written is None or not tail or not (_SAID in written or written.startswith(head)):
            return None
        rest = written.partition(_SAID)[2] if _SAID in written else written[len(head) :]
        if rest.endswith(tail) and all(text in rest for text in (_NAME, *_VALUES)):
            return rest[: len(rest) - len(tail)]
    return None


def _call(written: str) -> CallMarkers | None:
    before, _, after = written.partition(_NAME)
    found = _ARGUMENTS.search(after)
    if found is None:
        return _tagged(before, after)
    end = after[found.end() :]
    if '"name"' in before:
        begin = before[: before.rindex("{")].strip().removesuffix("[").rstrip()
        return CallMarkers("object", begin, _OBJECT_END.sub("", end, count=1).strip().lstrip("}]").strip())
    if not before.strip() or not (end.strip() or CONTROL.match(before.strip())):
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


# -- thinking ------------------------------------------------------------------------------------------


def _thoughts(render: Render) -> Iterator[tuple[str, Literal["reasoning_content", "parts"]]]:
    """Prompts with an answer that has a thought, and how the template was given it.

    Some templates keep the thought of an answer alone that calls a tool.
    """
    thought = {"content": _SAID, "reasoning_content": _THOUGHT}
    parts = [{"type": "thinking", "thinking": _THOUGHT}, {"type": "text", "text": _SAID}]
    yield _rendered(render, thought) or "", "reasoning_content"
    yield _rendered(render, {**thought, "tool_calls": _calls(_TEXT)}) or "", "reasoning_content"
    yield _rendered(render, {"content": parts}) or "", "parts"


def _think(
    render: Render, plain: str, channels: Channels | None
) -> tuple[ThoughtMarkers | None, Literal["reasoning_content", "thinking", "parts"]]:
    if channels is not None:
        begin = f"{channels.channel}{channels.thought}{channels.message}"
        bare = plain.partition(_SAID)[0].rpartition(channels.start)[2]
        close = f"{channels.end}{channels.start}{bare}"
        return ThoughtMarkers(begin, channels.end, close=close, again=True, bare=bare), "thinking"
    for written, taken in _thoughts(render):
        before, found, after = written.partition(_THOUGHT)
        begun, close = _TAG.search(before), after.partition(_SAID)[0]
        if found and _SAID in after and begun is not None and close.strip():
            return ThoughtMarkers(begun[1], close.strip(), before[begun.end(1) :], close), taken
    if (empty := _EMPTY.search(plain)) is not None:
        begin, lead, close = empty.groups()
        return ThoughtMarkers(begin, close.strip(), lead, close), "reasoning_content"
    begun = _TAG.search(plain)  # a template that begins the thinking, and leaves it out of what was said
    if begun is None or not re.fullmatch(r"<[\w:]*think[\w:]*>", begun[1]):
        return None, "reasoning_content"
    end, lead = begun[1].replace("<", "</", 1), plain[begun.end(1) :]
    return ThoughtMarkers(begun[1], end, lead, f"{lead}{end}{lead * 2}"), "reasoning_content"


def _channels(render: Render, plain: str) -> Channels | None:
    token = r"<\|[^<>|]+\|>"
    said = re.search(rf"({token}\w+)({token})\w+({token}){_SAID}", plain)
    said_thinking = _rendered(render, {"content": "", "thinking": _THOUGHT, "tool_calls": _calls(_PAIRS)})
    if said is None or said_thinking is None:
        return None
    thought = re.search(rf"{re.escape(said[2])}(\w+){re.escape(said[3])}{_THOUGHT}({token})", said_thinking)
    if thought is None:
        return None
    return Channels(said[1], said[2], said[3], thought[2], thought[1])


def _escapes_text(render: Render) -> bool:
    """Arguments that are a text are written as a JSON string of it."""
    written = _rendered(render, {"content": "", "tool_calls": _calls(_TEXT)}) or ""
    return _ARGUMENTS.search(written) is None
