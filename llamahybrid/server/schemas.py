"""Bounds on JSON schemas, checked before upstream converts one to a grammar."""

from __future__ import annotations

import json
import re
from typing import Any

MOST_REPEATS = 100_000
"""Upstream writes each repetition into the grammar (llama_cpp/llama_grammar.py, _build_repetition): a
`minLength` of a billion is gigabytes of text."""

MOST_LETTERS = 128 << 10
"""Most letters of a schema or a grammar. The time for a token grows with the square of a rule's alternatives,
in one native call that cannot be interrupted: 300,000 of them kept a slot for minutes."""

_BOUNDS = ("minLength", "maxLength", "minItems", "maxItems")
_DATA = ("enum", "const", "default", "examples", "required")
"""Keywords whose values are no schemas."""
_BRACES = re.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}", re.ASCII)


def excess(schema: Any) -> str | None:
    """Return the exceeded bound of a schema, or of a list of objects with schemas; None: none."""
    if repeats(schema) > MOST_REPEATS:
        return f"lengths in a schema add up to more than {MOST_REPEATS:,}"
    each = schema if isinstance(schema, list) else [schema]
    if any(len(json.dumps(part, default=str)) > MOST_LETTERS for part in each):
        return f"a schema has more than {MOST_LETTERS:,} letters"
    return None


def repeats(schema: Any) -> float:
    """Return the most repetitions in a schema, or in a list of objects with schemas."""
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
    """Return the most repetitions in a pattern, whose groups may be nested."""
    n = 1.0
    for bounds in _BRACES.findall(pattern):
        n *= max(1.0, *(float(each or 0) for each in bounds))
    return n
