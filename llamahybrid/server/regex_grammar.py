"""Regular expressions and choices of texts as grammars of llama.cpp (GBNF)."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any

if sys.version_info >= (3, 11):
    from re import _parser as sre  # type: ignore[attr-defined]
else:
    import sre_parse as sre

MOST_REPEATS = 1000
"""llama.cpp reads no larger repetitions (src/llama-grammar.cpp, MAX_REPETITION_THRESHOLD is 2000)."""

_CATEGORIES = {
    "CATEGORY_DIGIT": "0-9",
    "CATEGORY_WORD": "a-zA-Z0-9_",
    "CATEGORY_SPACE": r" \t\n\r\x0b\x0c",
}
_ENDLESS = int(sre.MAXREPEAT)


def grammar_of_choice(choices: Iterable[str]) -> str:
    """Return a grammar with exactly these texts as sentences."""
    return "root ::= " + " | ".join(_literal(choice) for choice in choices)


def grammar_of_regex(pattern: str) -> str:
    """Return a grammar of the texts that a regular expression matches as a whole.

    `\\d`, `\\w` and `\\s` are ASCII. Raises ValueError for look-around, references to groups, and anchors
    inside the pattern, which no grammar can express.
    """
    try:
        parsed: list[Any] = list(sre.parse(pattern, re.ASCII).data)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"the regular expression cannot be read: {error}") from error
    while parsed and _is(parsed[0], "AT", "AT_BEGINNING", "AT_BEGINNING_STRING"):
        parsed = parsed[1:]
    while parsed and _is(parsed[-1], "AT", "AT_END", "AT_END_STRING"):
        parsed = parsed[:-1]
    return "root ::= " + _sequence(parsed)


def _is(node: Any, kind: str, *values: str) -> bool:
    return str(node[0]) == kind and str(node[1]) in values


def _sequence(nodes: Iterable[Any]) -> str:
    return " ".join(map(_node, nodes)) or '""'


def _node(node: Any) -> str:
    kind, value = str(node[0]), node[1]
    if kind == "LITERAL":
        return _literal(chr(value))
    if kind == "NOT_LITERAL":
        return f"[^{_escaped(value)}]"
    if kind == "ANY":
        return r"[^\n]"
    if kind == "IN":
        return _class(value)
    if kind == "BRANCH":
        return "(" + " | ".join(_sequence(each) for each in value[1]) + ")"
    if kind == "SUBPATTERN" and not (value[1] or value[2]):
        return f"({_sequence(value[3])})"
    if kind in ("MAX_REPEAT", "MIN_REPEAT"):  # of a whole match, greed is no matter
        return _repeated(*value)
    raise ValueError(f"the regular expression uses {kind.lower()}, which a grammar cannot follow")


def _repeated(least: int, most: Any, nodes: Any) -> str:
    endless = int(most) == _ENDLESS
    if least > MOST_REPEATS or not (endless or int(most) <= MOST_REPEATS):
        raise ValueError(f"the regular expression repeats something more than {MOST_REPEATS:,} times")
    return f"({_sequence(nodes)}){{{least},{'' if endless else int(most)}}}"


def _class(items: Iterable[Any]) -> str:
    said, negated = "", ""
    for item in items:
        kind, value = str(item[0]), item[1]
        if kind == "NEGATE":
            negated = "^"
        elif kind == "LITERAL":
            said += _escaped(value)
        elif kind == "RANGE":
            said += f"{_escaped(value[0])}-{_escaped(value[1])}"
        elif kind == "CATEGORY" and str(value) in _CATEGORIES:
            said += _CATEGORIES[str(value)]
        elif kind == "CATEGORY" and not said and not negated and len(list(items)) == 1:
            return f"[^{_CATEGORIES[str(value).replace('NOT_', '')]}]"
        else:
            raise ValueError("the regular expression has a class that a grammar cannot follow")
    return f"[{negated}{said}]"


def _escaped(code: int) -> str:
    if code < 0x80:
        return chr(code) if chr(code).isalnum() or code == 0x20 else f"\\x{code:02x}"
    if 0xD800 <= code < 0xE000:
        raise ValueError("a regular expression or choice has half of a surrogate pair")
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _literal(text: str) -> str:
    return '"' + "".join(_escaped(ord(char)) for char in text) + '"'
