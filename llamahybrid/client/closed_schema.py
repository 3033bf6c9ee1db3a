"""Closed JSON schemas: objects without properties that their schema does not name.

JSON schema allows further properties unless it says `additionalProperties: false`. A model seldom adds useful
ones: llama.cpp's converters and OpenAI's strict mode forbid them, and so does `closed`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_SAYS_OTHERWISE = {
    *("additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties"),
    *("$ref", "allOf", "anyOf", "oneOf"),
}
_COMBINATIONS = ("allOf", "anyOf", "oneOf")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_NOTES = {"title", "description", "default", "examples", "discriminator", "$defs", "definitions", "$schema"}
"""Keywords that constrain nothing."""


def closed(schema: Any) -> Any:
    """Return the schema with `additionalProperties: false` in each object that does not say otherwise.

    Schemas that are combined with others stay open: a closed one would contradict the rest.
    """
    return _closed(schema, "#", frozenset(_combined_references(schema, False)))


def _closed(part: Any, pointer: str, combined: frozenset[str]) -> Any:
    """`part`, which lies at `pointer` (RFC 6901) and is combined with nothing else."""
    if not isinstance(part, dict) or pointer in combined:
        return part
    result = dict(part)
    for name, value in part.items():
        below = f"{pointer}/{name}"
        if name in _BY_NAME and isinstance(value, dict):
            result[name] = {key: _closed(each, f"{below}/{key}", combined) for key, each in value.items()}
        elif name in ("items", "additionalProperties"):
            result[name] = _closed(value, below, combined)
        elif isinstance(value, list) and (
            name == "prefixItems" or (name in _COMBINATIONS and _stands_alone(part, name))
        ):
            result[name] = [_closed(each, f"{below}/{i}", combined) for i, each in enumerate(value)]
    if _names_all_it_needs(part) and not part.keys() & _SAYS_OTHERWISE:
        result["additionalProperties"] = False
    return result


def _names_all_it_needs(part: dict[str, Any]) -> bool:
    """A schema names properties, among them all required ones."""
    names, required = part.get("properties"), part.get("required", [])
    if not isinstance(names, dict) or not isinstance(required, list):
        return False
    return all(str(name) in names for name in required)


def _stands_alone(part: dict[str, Any], name: str) -> bool:
    """A list of schemas constrains its value alone, and no schema in it another one."""
    return part.keys() <= {name, *_NOTES} and (name != "allOf" or len(part[name]) == 1)


def _combined_references(part: Any, combined: bool) -> Iterator[str]:
    """The references to schemas that are combined with others."""
    if isinstance(part, list):
        for each in part:
            yield from _combined_references(each, combined)
    elif isinstance(part, dict):
        reference = part.get("$ref")
        if isinstance(reference, str) and (combined or not part.keys() <= {"$ref", *_NOTES}):
            yield reference
        for name, value in part.items():
            lists = name in _COMBINATIONS and isinstance(value, list)
            yield from _combined_references(value, combined or (lists and not _stands_alone(part, name)))
