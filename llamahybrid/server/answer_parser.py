"""A parser of answers: thinking, content and tool calls, while the text arrives.

A call is returned once it is complete. Text that only begins like a call stays content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from uuid import uuid4

from llamahybrid.client.markers import CallMarkers, Markers

Delta = dict[str, Any]

Schemas = Mapping[str, Mapping[str, Any]]
"""The parameters of each tool, by its name."""


class AnswerParser:
    """Parses one answer."""

    def __init__(
        self, markers: Markers, tools: Schemas, think: bool, thinking: bool = False, goes_on: bool = False
    ) -> None:
        """`think`: thinking becomes `reasoning_content`. `thinking`: the prompt ends inside a thought.

        `goes_on`: the prompt ends with the beginning of the answer.
        """
        self._tools = tools
        self._call = markers.call if tools else None
        self._think = markers.think if think and (thinking or not goes_on) else None
        self._thinking = thinking and self._think is not None
        self._text = ""
        """Text that is not returned yet."""
        self._inside = False
        """`_text` begins with a call."""
        self._begun = False
        """Content was returned."""
        self._lead = self._thinking and not goes_on
        """Line breaks at this position belong to a marker."""
        self.calls = 0

    def feed(self, text: str) -> Iterator[Delta]:
        """Add a piece of text; return the deltas that are certain now."""
        self._text += text
        while (delta := self._next()) is not None:
            if delta:
                yield delta

    def end(self) -> Iterator[Delta]:
        """Return the deltas of the rest, at the end of the answer."""
        text, self._text = self._text.lstrip("\n") if self._lead else self._text, ""
        if self._thinking:
            if text:
                yield {"reasoning_content": text}
            return
        if self._inside and self._call is not None:
            calls = parse_calls(text, self._call, self._tools)
            if calls is not None:
                yield self._calls(calls)
                return
        if text and (text.strip() or not self.calls):
            yield {"content": text}

    def _next(self) -> Delta | None:
        """Return the next delta, which may be empty; None if more text is needed."""
        if self._lead:
            self._text = self._text.lstrip("\n")
            self._lead = not self._text
        if self._lead:
            return None
        if self._thinking:
            return self._next_thought()
        if not self._begun and self._think is not None and not self._inside:
            begin = self._think.begin
            lead = self._text.lstrip()
            if lead.startswith(begin):
                self._text, self._thinking, self._lead = lead[len(begin) :], True, True
                return {}
            if begin.startswith(lead):
                return None
        if self._call is None:
            return self._content(len(self._text))
        return self._next_call(self._call) if self._inside else self._next_content(self._call)

    def _next_thought(self) -> Delta | None:
        assert self._think is not None
        end = self._think.end
        at = self._text.find(end)
        if at < 0:
            kept = len(self._text[: marker_start(self._text, end)].rstrip())
            thought, self._text = self._text[:kept], self._text[kept:]
            return {"reasoning_content": thought} if thought else None
        thought, self._text = self._text[:at].rstrip("\n"), self._text[at + len(end) :]
        self._thinking, self._think, self._lead = False, None, True
        return {"reasoning_content": thought} if thought else {}

    def _next_content(self, call: CallMarkers) -> Delta | None:
        opens = call.opens
        if not opens:  # a call is all of an answer
            lead = self._text.lstrip()
            self._inside = not self._begun and lead.startswith("{")
            return {} if self._inside else self._content(len(self._text)) if lead else None
        at = self._text.find(opens)
        if at < 0:
            return self._content(len(self._text[: marker_start(self._text, opens)].rstrip()))
        self._inside = True
        before, self._text = self._text[:at].rstrip(), self._text[at:]
        self._begun |= bool(before)
        return {"content": before} if before else {}

    def _next_call(self, call: CallMarkers) -> Delta | None:
        closes = call.closes
        at = self._text.find(closes) if closes else -1
        if at < 0:
            return None
        text, self._text = self._text[: at + len(closes)], self._text[at + len(closes) :]
        self._inside = False
        calls = parse_calls(text, call, self._tools)
        if calls is not None:
            return self._calls(calls)
        self._begun = True
        return {"content": text}

    def _content(self, end: int) -> Delta | None:
        text, self._text = self._text[:end], self._text[end:]
        self._begun |= bool(text.strip())
        return {"content": text} if text else None

    def _calls(self, calls: list[tuple[str, str]]) -> Delta:
        first, self.calls = self.calls, self.calls + len(calls)
        return {"tool_calls": [tool_call(first + number, *each) for number, each in enumerate(calls)]}


def tool_call(index: int, name: str, arguments: str) -> Delta:
    """Return a call of a tool in OpenAI's form."""
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"call_{uuid4().hex}", "type": "function", "function": function}


def marker_start(text: str, marker: str) -> int:
    """Return the position from which a text may grow into the marker; its length if there is none."""
    for at in range(max(0, len(text) - len(marker) + 1), len(text)):
        if marker.startswith(text[at:]):
            return at
    return len(text)


def parse_calls(text: str, call: CallMarkers, tools: Schemas) -> list[tuple[str, str]] | None:
    """Return the names and JSON arguments of the calls in a text; None if the text is no call."""
    inner = text.strip().removeprefix(call.opens).strip()
    if closes := call.closes:
        inner = inner.removesuffix(closes).strip()
    try:
        found = _objects(inner) if call.form == "object" else _tagged_calls(inner, call, tools)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    names = {name for name, _ in found}
    fine = bool(names) and all(isinstance(name, str) and name for name in names)
    return found if fine and (call.begin or names <= tools.keys()) else None


def _objects(inner: str) -> list[tuple[str, str]]:
    said, found, decoder = list[Any](), [], json.JSONDecoder()
    while inner:
        value, end = decoder.raw_decode(inner)
        said += value if isinstance(value, list) else [value]
        inner = inner[end:].lstrip()
    for each in said:
        arguments = each["arguments"] if "arguments" in each else each.get("parameters", {})
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        if not isinstance(json.loads(text), dict):
            raise ValueError("arguments are an object")
        found.append((each["name"], text))
    return found


def _tagged_calls(inner: str, call: CallMarkers, tools: Schemas) -> list[tuple[str, str]]:
    """Return the calls between tags. Several calls share the outer tags and repeat the inner ones."""
    if call.form == "named" and not call.closes:
        return list(_in_a_row(inner, call))
    lead = call.begin.removeprefix(call.opens).strip()
    tail = call.end.removesuffix(call.closes).strip()
    inner = inner.removeprefix(lead).removesuffix(tail)
    between = rf"{re.escape(tail)}\s*{re.escape(lead)}"
    each = re.split(between, inner) if lead and tail else [inner]
    return [_one(text.strip(), call, tools) for text in each]


def _in_a_row(inner: str, call: CallMarkers) -> Iterator[tuple[str, str]]:
    """Yield the calls of a format without end tags: a call ends with its arguments."""
    decoder = json.JSONDecoder()
    while True:
        found = call.named.search(inner)
        if found is None:
            raise ValueError("nothing stands between name and arguments")
        rest = inner[found.end() :].lstrip()
        arguments, end = decoder.raw_decode(rest)
        if not isinstance(arguments, dict):
            raise ValueError("arguments are an object")
        yield inner[: found.start()].strip(), rest[:end]
        inner = rest[end:].lstrip()
        if not inner:
            return
        if not inner.startswith(call.opens):
            raise ValueError("text stands behind a call")
        inner = inner.removeprefix(call.opens)


def _one(inner: str, call: CallMarkers, tools: Schemas) -> tuple[str, str]:
    if call.form == "named":
        found = call.named.search(inner)
        if found is None:
            raise ValueError("nothing stands between name and arguments")
        arguments = inner[found.end() :].strip()
        if not isinstance(json.loads(arguments), dict):
            raise ValueError("arguments are an object")
        return inner[: found.start()].strip(), arguments
    name, pairs = _tagged(inner, call)
    properties: Any = tools.get(name, {}).get("properties") or {}
    given = {key: _value(text, properties.get(key)) for key, text in pairs}
    return name, json.dumps(given, ensure_ascii=False)


def _tagged(inner: str, call: CallMarkers) -> tuple[str, list[tuple[str, str]]]:
    """Return the name, and the keys and texts of the arguments."""
    before, middle, after = (each.strip() for each in (call.before_key, call.after_key, call.after_value))
    first = inner.find(before)
    head = inner if first < 0 else inner[:first]
    name = head.strip().removesuffix(call.after_name.strip()).strip()
    pairs, rest = [], "" if first < 0 else inner[first:]
    while rest.strip():
        rest = rest.lstrip()
        if not rest.startswith(before):
            raise ValueError("an argument begins otherwise")
        key, found, rest = rest[len(before) :].partition(middle)
        text, ended, rest = rest.partition(after)
        if not (found and ended):
            raise ValueError("an argument is cut off")
        if call.after_key.endswith("\n"):
            text = text.removeprefix("\n")
        if call.after_value.startswith("\n"):
            text = text.removesuffix("\n")
        pairs.append((key.strip(), text))
    return name, pairs


def _value(text: str, schema: Any) -> Any:
    """Return an argument between tags: a text, or the JSON value if the tool takes no text."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string" or (isinstance(kind, list) and "string" in kind):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
