"""JSON schemas over HTTP: followed, or refused with 400 and the reason."""

import json

import jsonschema
import pytest

CHAT = [{"role": "user", "content": "go"}]

FOLLOWED = {
    "bounds": {"type": "integer", "minimum": -3, "exclusiveMaximum": 45},
    "multiples": {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 99},
    "lengths": {"type": "string", "minLength": 3, "maxLength": 20},
    "a pattern": {"type": "string", "pattern": "^[a-f]{2}-\\d+$", "maxLength": 9},
    "a date": {"type": "string", "format": "date"},
    "values": {"enum": ["a\nb", "c\td", "\\", 'say "x"', "\U0001f600", None, 1.5]},
    "a key beyond the BMP": {
        "type": "object",
        "properties": {"\U0001f600\n": {"const": 1}},
        "required": ["\U0001f600\n"],
        "additionalProperties": False,
    },
    "references": {
        "type": "array",
        "items": {"allOf": [{"$ref": "#/$defs/one"}, {"maximum": 5}]},
        "minItems": 1,
        "maxItems": 3,
        "$defs": {"one": {"type": "integer", "minimum": 4}},
    },
    "alternatives": {
        "properties": {"kind": {"enum": ["a", "b"]}},
        "required": ["kind"],
        "additionalProperties": False,
        "type": "object",
        "anyOf": [{"properties": {"kind": {"const": "b"}}}],
    },
}
REFUSED = [
    {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    {"type": "array", "contains": {"const": 3}},
    {"type": "object", "propertyNames": {"maxLength": 3}},
    {"not": {"type": "string"}},
    {"type": "string", "minLength": 5, "maxLength": 3},
    {"type": "string", "pattern": "^([0-9{3}$"},
    {"$ref": "https://example.com/schema.json"},
    {"$ref": "#/$defs/none"},
    {"type": "string", "minLength": "9"},
]


def post(http, form):
    return http.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 300, **form})


def as_format(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def as_tool(schema):
    function = {"name": "f", "parameters": schema}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


@pytest.mark.parametrize("schema", FOLLOWED.values(), ids=FOLLOWED)
@pytest.mark.parametrize("asked", [as_format, as_tool])
def test_an_answer_follows_its_schema(http, schema, asked):
    for seed in range(3):
        answer = post(http, {**asked(schema), "temperature": 1.5, "seed": seed}).json()["choices"][0]
        message = answer["message"]
        text = message["tool_calls"][0]["function"]["arguments"] if asked is as_tool else message["content"]
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("schema", REFUSED, ids=json.dumps)
def test_a_schema_that_answers_could_break_is_refused(http, schema):
    for asked, where in ((as_format, "response_format"), (as_tool, "tools")):
        refused = post(http, asked(schema))
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == where


def test_schema_of_an_unchosen_tool_is_not_checked(http):
    form = {**as_tool(REFUSED[0]), "tool_choice": "auto", "max_tokens": 3}
    assert post(http, form).status_code == 200
