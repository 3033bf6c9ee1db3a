"""JSON schemas: what their grammar would take, before upstream writes one out."""

from __future__ import annotations

import re
from typing import Any

MOST_REPEATS = 100_000
"""Upstream writes each repetition into the grammar (llama_cpp/llama_grammar.py, _build_repetition): a
`minLength` of a billion is gigabytes of text."""

_BOUNDS = ("minLength", "maxLength", "minItems", "maxItems")
_DATA = ("enum", "const", "default", "examples", "required")
"""Their values are no schemas."""
_BRACES = re.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}", re.ASCII)


def repeats(schema: Any) -> float:
    """How often parts of a schema, or of a list of what holds some, are repeated in all, at most."""
    n, left = 0.0, [schema]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            for name, value in part.items():
                if name in _BOUNDS and isinstance(value, (int, float)):
                    n += min(1e300, value)
                elif name == "pattern" and isinstance(value, str):
                    n += _in_pattern(value)
                elif name not in _DATA:
                    left.append(value)
    return n


def _in_pattern(pattern: str) -> float:
    """Groups that are repeated may stand in one another."""
    n = 1.0
    for bounds in _BRACES.findall(pattern):
        n *= max(1.0, *(float(each or 0) for each in bounds))
    return n
