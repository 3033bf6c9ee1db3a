"""Answers to random JSON schemas of strings are JSON and follow them; none is anything else."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import jsonschema
import pytest

from .test_json_schema import as_format, as_tool

LETTERS = 'ab"\\/\n\t\r\b\f\x00\x1f\x7f é€😀\u2028\ud7ff<>{}[]:,'
PATTERNS = (
    *(r"^[a-f]{2,6}$", r"^\d{3}-\d{4}$", r"^(yes|no|maybe)$", r"^[^\"]{1,8}$", r"^\w+\s\w+$", r"^.{3,9}$"),
    *(r"^[\\/]{1,4}$", r"^\S{2,5}$", r"^[\u00e9\u20ac]{1,3}x$", r"^(a|\n|\t){1,5}$", r'^"[a-z]*"$', r"ab"),
)
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email", "hostname")


def text(rng: random.Random) -> str:
    return "".join(rng.choices(LETTERS, k=rng.randint(0, 8)))


def string(rng: random.Random) -> dict[str, Any]:
    """A schema of a string."""
    kind = rng.randrange(6)
    if kind == 0:
        return {"enum": list({text(rng) for _ in range(rng.randint(1, 5))})}
    if kind == 1:
        return {"const": text(rng)}
    if kind == 2:
        return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 24}
    if kind == 3:
        return {"type": "string", "format": rng.choice(FORMATS)}
    least = rng.randint(0, 12)
    bounds: dict[str, Any] = {"minLength": least, "maxLength": least + rng.randint(0, 30)}
    return (
        {"type": "string", **bounds} if kind == 4 else {"anyOf": [string(rng), {"type": "string", **bounds}]}
    )


def schema(rng: random.Random) -> dict[str, Any]:
    """A schema whose values are strings: one, a list of them, or an object, whose keys may be odd, too."""
    kind = rng.randrange(4)
    if kind < 2:
        return string(rng)
    if kind == 2:
        return {"type": "array", "items": string(rng), "minItems": rng.randint(0, 2), "maxItems": 3}
    keys = {text(rng) for _ in range(rng.randint(1, 3))}
    properties = {key: string(rng) for key in sorted(keys)}
    return {"type": "object", "properties": properties, "required": list(properties)}


@pytest.mark.parametrize(
    ("first", "count"), [(0, 40), pytest.param(1000, 1000, marks=pytest.mark.full)], ids=["some", "1000"]
)
def test_every_answer_to_a_schema_of_strings_is_json(http: httpx.Client, first: int, count: int) -> None:
    refused = cut = 0
    for seed in range(first, first + count):
        rng = random.Random(seed)
        form, asked = schema(rng), rng.choice((as_format, as_tool))
        messages = [{"role": "user", "content": f"go {seed % 7}"}]
        more = {"temperature": rng.choice([0.0, 0.8, 2.0, 10.0]), "seed": seed, "max_tokens": 700}
        if asked is as_tool and form.get("type") != "object":
            asked = as_format
        got = http.post("/v1/chat/completions", json={"messages": messages, **more, **asked(form)})
        if got.status_code == 400:
            refused += 1
            continue
        assert got.status_code == 200, (seed, got.text)
        (choice,) = got.json()["choices"]
        if choice["finish_reason"] == "length":
            cut += 1
            continue
        message = choice["message"]
        said = message["tool_calls"][0]["function"]["arguments"] if asked is as_tool else message["content"]
        try:
            value = json.loads(said)
        except ValueError:
            pytest.fail(f"seed {seed}: {said!r} is no JSON; {form}")
        jsonschema.validate(value, form)
    assert refused <= count / 20
    assert cut <= count / 20
