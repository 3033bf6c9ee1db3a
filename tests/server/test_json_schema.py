"""JSON schemas over HTTP: followed, or refused with 400 and the reason."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import jsonschema
import pytest

CHAT = [{"role": "user", "content": "go"}]
LETTERS = 'ab"\\/\n\t\r\b\f\x00\x1f\x7f é€😀\u2028\ud7ff<>{}[]:,'
PATTERNS = (
    *(r"^[a-f]{2,6}$", r"^\d{3}-\d{4}$", r"^(yes|no|maybe)$", r"^[^\"]{1,8}$", r"^\w+\s\w+$", r"^.{3,9}$"),
    *(r"^[\\/]{1,4}$", r"^\S{2,5}$", r"^[\u00e9\u20ac]{1,3}x$", r"^(a|\n|\t){1,5}$", r'^"[a-z]*"$', r"ab"),
)
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email", "hostname")
LOOP = {"$ref": "#/$defs/a~1b"}
REFUSED: list[dict[str, Any]] = [
    {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    {"type": "array", "contains": {"const": 3}},
    {"type": "object", "propertyNames": {"maxLength": 3}},
    {"not": {"type": "string"}},
    {"type": "string", "minLength": 5, "maxLength": 3},
    {"type": "string", "pattern": "^([0-9{3}$"},
    {"$ref": "https://example.com/schema.json"},
    {"$ref": "#/$defs/none"},
    {"$ref": "#"},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/a~1b"}}, "$defs": {"a/b": {"allOf": [LOOP]}}},
    {"type": "string", "minLength": "9"},
    {"type": "string", "format": "date", "const": "1900-02-29"},
    {"type": "string", "format": "date-time", "const": "2023-02-29T00:00:00Z"},
    {"type": "string", "format": "time", "const": "12:00:60Z"},
    {"enum": [1, (1 << 53) + 1]},
    {"const": -(1 << 63)},
    {"type": "integer", "minimum": 1 << 63},
    {"type": "array", "items": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}},
    {"type": "array", "items": {"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}},
    {"type": "string", "pattern": "^[a[b]c]$"},
    {"type": "object", "patternProperties": {"^[a-c--b]$": {"type": "integer"}}},
]

Draw = random.Random


def text(draw: Draw) -> str:
    return "".join(draw.choices(LETTERS, k=draw.randint(0, 8)))


def number(draw: Draw) -> dict[str, Any]:
    bounds = {"minimum": draw.randint(-9, 0), "exclusiveMaximum": draw.randint(20, 99)}
    return {"type": "integer", **bounds, **draw.choice([{}, {"multipleOf": 7}])}


def string(draw: Draw) -> dict[str, Any]:
    """A schema of a string."""
    least = draw.randint(0, 12)
    bounded = {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 30)}
    return draw.choice(
        [
            {"enum": [*{text(draw) for _ in range(draw.randint(1, 5))}, None, 1.5]},
            {"const": text(draw)},
            {"type": "string", "pattern": draw.choice(PATTERNS), "maxLength": 24},
            {"type": "string", "format": draw.choice(FORMATS)},
            bounded,
            {"anyOf": [{"const": text(draw)}, bounded]},
        ]
    )


def schema(draw: Draw) -> dict[str, Any]:
    """A schema of a value, of a list, or of an object, whose keys may be odd, too."""
    value, kind = draw.choice([string, number]), draw.randrange(4)
    if kind < 2:
        return value(draw)
    if kind == 2:
        items = {"allOf": [{"$ref": "#/$defs/one"}, {}]}
        bounds = {"minItems": draw.randint(0, 2), "maxItems": 3}
        return {"type": "array", "items": items, **bounds, "$defs": {"one": value(draw)}}
    properties = {key: value(draw) for key in sorted({text(draw) for _ in range(draw.randint(1, 3))})}
    return {"type": "object", "properties": properties, "required": list(properties)}


def post(http: httpx.Client, form: dict[str, Any]) -> httpx.Response:
    return http.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 700, **form})


def as_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def as_tool(schema: Any) -> dict[str, Any]:
    function = {"name": "f", "parameters": schema}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


Form = Callable[[Any], dict[str, Any]]


def said(answer: dict[str, Any], form: Form) -> str:
    message = answer["choices"][0]["message"]
    told: str = message["tool_calls"][0]["function"]["arguments"] if form is as_tool else message["content"]
    return told


@pytest.mark.parametrize(
    ("first", "count"), [(0, 40), pytest.param(1000, 1000, marks=pytest.mark.full)], ids=["some", "1000"]
)
def test_an_answer_follows_its_schema(http: httpx.Client, first: int, count: int) -> None:
    refused = cut = 0
    for seed in range(first, first + count):
        draw = random.Random(seed)
        form = schema(draw)
        asked = draw.choice((as_format, as_tool)) if form.get("type") == "object" else as_format
        more = {"temperature": draw.choice([0.0, 0.8, 2.0, 10.0]), "seed": seed}
        got = post(http, {**more, **asked(form)})
        if got.status_code == 400:
            refused += 1
            continue
        assert got.status_code == 200, (seed, form, got.text)
        if got.json()["choices"][0]["finish_reason"] == "length":
            cut += 1
            continue
        jsonschema.validate(json.loads(said(got.json(), asked)), form)
    assert max(refused, cut) <= count / 20


@pytest.mark.parametrize(("kind", "time"), [("date", "2024-02-29"), ("date-time", "2000-02-29T23:59:59.5Z")])
def test_the_last_day_of_february_follows_its_format(http: httpx.Client, kind: str, time: str) -> None:
    answer = post(http, as_format({"type": "string", "format": kind, "enum": [time, "2023-02-29"]})).json()
    assert json.loads(said(answer, as_format)) == time


@pytest.mark.parametrize("asked", [as_format, as_tool])
def test_combined_schemas_are_followed(http: httpx.Client, asked: Form) -> None:
    kinds = {"properties": {"kind": {"enum": ["a", "b"]}}, "required": ["kind"], "type": "object"}
    form = {**kinds, "additionalProperties": False, "anyOf": [{"properties": {"kind": {"const": "b"}}}]}
    answer = post(http, {**asked(form), "temperature": 1.5}).json()
    jsonschema.validate(json.loads(said(answer, asked)), form)


@pytest.mark.parametrize("schema", REFUSED, ids=json.dumps)
def test_a_schema_that_answers_could_break_is_refused(http: httpx.Client, schema: dict[str, Any]) -> None:
    for asked, where in ((as_format, "response_format"), (as_tool, "tools")):
        refused = post(http, asked(schema))
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == where


def test_schema_of_an_unchosen_tool_is_not_checked(http: httpx.Client) -> None:
    form = {**as_tool(REFUSED[0]), "tool_choice": "auto", "max_tokens": 3}
    assert post(http, form).status_code == 200
