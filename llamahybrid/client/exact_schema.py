"""JSON schemas that llguidance takes, and whose answers may break them: refused, or written another way."""

from __future__ import annotations

import json
import re
from graphlib import CycleError, TopologicalSorter
from typing import Any
from urllib.parse import unquote

_CLASS = re.compile(r"\\.|\[\^?\]?((?:\\.|[^\]\\])*)\]", re.DOTALL)
_OPERATOR = re.compile(r"\[|&&|--|~~")

_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = f"([0-9]{{4}}-(0[13-9]|1[0-2]|02-[01]|02-2[0-8])|{_LEAP_YEAR}-02-29)"
_PATTERNS = {
    "date": f"^{_DATE}",
    "date-time": f"^{_DATE}.{{0,3}}[Tt][0-9:]{{6}}[0-5]",
    "time": "^[0-9:]{6}[0-5]",
}
"""By format: llguidance has 29 February in each year, and a 61st second in each minute."""

BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose values are schemas by name."""

_VALUES = ("const", "enum", "default", "examples")
"""Keywords whose values are no schemas."""


def exact(schema: Any) -> str:
    """Return a schema as the text that llguidance follows. Raises ValueError where it would not."""
    text = json.dumps(_with_patterns(schema))
    references = set[str]()

    def look(part: dict[str, Any]) -> dict[str, Any]:
        if isinstance(part.get("$ref"), str):
            references.add(unquote(part["$ref"]))
        return _require_followed(part)

    json.loads(text, parse_int=_require_exact, object_hook=look)
    _require_values(schema, references)
    return text


def _require_exact(digits: str) -> int:
    """Raise ValueError for an integer that llguidance would change: it reads floats, and has 64 bits.

    The constant -2^63 ends the process (SIGSEGV).
    """
    number, most = int(digits), (1 << 63) - 1
    if abs(number) > most or min(int(float(number)), most) != number:
        raise ValueError(f"the integer {digits} is too large to be exact")
    return number


def _require_followed(part: dict[str, Any]) -> dict[str, Any]:
    """Raise ValueError for a schema that llguidance takes, and whose answers may break it.

    llguidance lets a whole number through as an exclusive bound if the other bound is less than 1 away, and
    reads classes of regular expressions with the operators of Rust.
    """
    for near, far, sign in (("Minimum", "Maximum", 1), ("Maximum", "Minimum", -1)):
        found: list[Any] = [part.get(f"exclusive{near}"), part.get(far.lower()), part.get(f"exclusive{far}")]
        bound, *others = found
        whole = isinstance(bound, (int, float)) and bound % 1 == 0 and sign * bound >= 0
        if whole and any(isinstance(each, (int, float)) and sign * (each - bound) < 1 for each in others):
            raise ValueError(f"exclusive{near} is a whole number, and the other bound less than 1 away")
    named = part.get("patternProperties")
    for pattern in (part.get("pattern"), *(named if isinstance(named, dict) else ())):
        classes = _CLASS.finditer(pattern) if isinstance(pattern, str) else ()
        if any(_OPERATOR.search(re.sub(r"\\.", "", found[1] or "")) for found in classes):
            raise ValueError(f"a class in {pattern!r} holds [, &&, -- or ~~; escape them")
    return part


def _require_values(schema: Any, references: set[str]) -> None:
    """Raise ValueError for a reference that leads to itself: no value follows it, and no token is left."""
    leads = dict[str, set[str]]()
    for reference in references:
        part = _at(schema, reference)
        if isinstance(part, dict):
            same = [part, *(part["allOf"] if isinstance(part.get("allOf"), list) else ())]
            found = [each.get("$ref") for each in same if isinstance(each, dict)]
            leads[reference] = {unquote(each) for each in found if isinstance(each, str)}
    try:
        TopologicalSorter(leads).prepare()
    except CycleError as error:
        raise ValueError(f"the reference {error.args[1][0]!r} leads to itself") from None


def _at(schema: Any, reference: str) -> Any:
    """The part of a schema that a reference names by its pointer (RFC 6901); None where there is none."""
    for name in reference.split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list):
            schema = schema[int(key)] if key.isdecimal() and int(key) < len(schema) else None
        else:
            schema = schema.get(key) if isinstance(schema, dict) else None
    return schema


def _with_patterns(part: Any) -> Any:
    """Return a schema with the `_PATTERNS` of its formats."""
    if isinstance(part, list):
        return [_with_patterns(each) for each in part]
    if not isinstance(part, dict):
        return part
    made = dict(part)
    for name, value in part.items():
        if name in BY_NAME and isinstance(value, dict):
            made[name] = {key: _with_patterns(each) for key, each in value.items()}
        elif name not in _VALUES:
            made[name] = _with_patterns(value)
    pattern = _PATTERNS.get(part["format"]) if isinstance(part.get("format"), str) else None
    if pattern is not None and isinstance(made.get("allOf", []), list):
        made["allOf"] = [*made.get("allOf", ()), {"pattern": pattern}]
    return made
