"""GBNF, checked before llama.cpp reads it.

llama.cpp writes a grammar that it cannot parse to stderr, raw and in full, and writes repetitions out:
`"a"{5,2}` until memory is full (src/llama-grammar.cpp, llama_grammar_parser).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from llama_cpp import llama_cpp

MOST_REPETITIONS = 2000
"""llama.cpp's MAX_REPETITION_THRESHOLD."""

MOST_ELEMENTS = 1_000_000
"""Most bytes of texts, and references, of all rules, repetitions written out; 8 bytes each."""

MOST_BYTES = 4 * MOST_ELEMENTS
"""Most bytes of a grammar: to match a literal takes 137 bytes for each of its letters."""

DEEPEST_GROUP = 200

MOST_RULES = 4_000
"""Most rules, and most groups. The library reads a grammar recursively: 20,000 groups, or a chain of 100,000
rules, end the process."""

_SPACE = rb"(?:[ \t]|#[^\r\n]*(?![^\r\n]))*"
_LINES = rb"(?:[ \t\r\n]|#[^\r\n]*(?![^\r\n]))*"
_NAME = rb"[a-zA-Z0-9-]+"
_INT = rb"[0-9]{1,18}(?![0-9])"
_ESCAPE = rb"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[trn\\\"\[\]-])"


def _items(space: bytes) -> re.Pattern[bytes]:
    """Return the pattern of one item of a rule, in which `space` may stand; the name of a group says which.

    Nothing can be matched in two ways, so that no grammar makes it slow.
    """
    return re.compile(
        rb'"(?P<text>(?:' + _ESCAPE + rb'|[^\\"])*)"'
        rb"|\[\^?(?P<set>(?:" + _ESCAPE + rb"|[^\\\]])*)\]"
        rb"|(?P<token>!?<(?:\[[0-9]{1,9}\]|[^>]*)>)"
        rb"|(?P<name>" + _NAME + rb")|(?P<any>\.)|(?P<close>\))"
        rb"|(?P<open>\()" + _LINES + rb"|(?P<or>\|)" + _LINES + rb"|(?P<repeat>[*+?]"
        rb"|\{%b(?P<least>%b)%b(?:(?P<comma>,)%b(?:(?P<most>%b)%b)?)?\})"
        % (space, _INT, space, space, _INT, space)
    )


_RULE = re.compile(b"(" + _NAME + rb")[ \t]*::=" + _LINES)
_BETWEEN = re.compile(_LINES)
_IN_LINE = re.compile(_SPACE), _items(_SPACE)
_IN_GROUP = _BETWEEN, _items(_LINES)
"""Space before an item, and the item: a group goes on in the next line."""

_UNREAD = {
    **dict.fromkeys((b'"', b"["), "it has no end, or an escape that is none"),
    b"{": "a number of repetitions is missing",
    **dict.fromkeys((b"<", b"!"), "a token is <name> or <[id]>"),
}
"""The fault of an item that cannot be read, by its first byte."""
_OPEN = "a ) is missing"

TokenCount = Callable[[bytes], int]
"""Counts the tokens of a text, with control tokens recognized."""


def require_grammar(vocab: Any, grammar: Any) -> None:
    """Raise ValueError for a `LlamaGrammar` that the library cannot read, or that is too large written out.

    The message quotes nothing of the grammar but the name of a rule.

    The library returns NULL then, which upstream adds to its chain, and the next sample ends the process
    (src/llama-sampler.cpp, llama_sampler_init_grammar; llama_cpp/_internals.py, LlamaSampler.add_grammar).
    """
    _Parser(grammar._grammar.encode("utf-8", "surrogatepass"), partial(_count, vocab)).parse()
    text, root = grammar._grammar.encode("utf-8"), grammar._root.encode("utf-8")
    sampler = llama_cpp.llama_sampler_init_grammar(vocab, text, root)
    if not sampler:
        raise ValueError("the grammar cannot be used: a rule begins with itself")
    llama_cpp.llama_sampler_free(sampler)


def _count(vocab: Any, text: bytes) -> int:
    """Count the tokens of a text, with control tokens recognized."""
    return abs(int(llama_cpp.llama_tokenize(vocab, text, len(text), None, 0, False, True)))


class _Parser:
    """llama_grammar_parser, which keeps of each rule no more than its size."""

    def __init__(self, text: bytes, tokens: TokenCount) -> None:
        self._text = text
        self._tokens = tokens
        self._elements = 0
        self._rules = self._groups = 0
        self._names: set[bytes] = set()
        self._generated = 0
        """Rules without a name of their own."""

    def parse(self) -> None:
        """Raise ValueError for a fault."""
        text, defined = self._text, set[bytes]()
        self._limited(len(text), MOST_BYTES, "bytes", 0)
        if b"\0" in text:
            raise self._fault("there is a NUL character", text.index(b"\0"))
        at = _end(_BETWEEN, text, 0)
        while at < len(text):
            rule = _RULE.match(text, at)
            if rule is None:
                raise self._fault("a rule begins with its name and ::=", at)
            defined.add(rule[1])
            self._names.add(rule[1])
            self._rules = self._limited(self._rules + 1, MOST_RULES, "rules", at)
            at = _end(_BETWEEN, text, self._body(rule.end()))
        if missing := {b"root", *self._names} - defined:
            raise ValueError(f"the grammar has no rule named {min(missing).decode()[:100]}")

    def _body(self, at: int) -> int:
        """Read the items of a rule from `at` on; return the end of its line."""
        text, opened = self._text, list[int]()  # for each open group the number of rules before it
        size, rules = 0, 1  # elements of the last item, which may be repeated, and rules that it is made of
        while True:
            space, items = _IN_GROUP if opened else _IN_LINE
            at = _end(space, text, at)
            item = items.match(text, at)
            if item is None:
                break
            match item.lastgroup:
                case "or":
                    size, rules = 0, 1
                case "open":
                    opened.append(len(self._names) + self._generated)
                    self._groups = self._limited(self._groups + 1, MOST_RULES, "groups", at)
                    self._limited(len(opened), DEEPEST_GROUP, "groups in each other", at)
                    self._generated += 1
                    size, rules = 0, 1
                case "close" if not opened:
                    break
                case "repeat":
                    size, rules = self._repeated(item, size, rules)
                case kind:
                    size = len(item[kind]) if kind in ("text", "set") else 1
                    rules = 1
                    if kind == "close":
                        rules = max(1, len(self._names) + self._generated - opened.pop())
                    elif kind == "name":
                        self._names.add(item[0])
                    elif kind == "token":
                        self._require_token(item[0], at)
                    self._add(size, at)
            at = item.end()
        if opened or text[at : at + 1] not in b"\r\n":
            sign = text[at : at + 1]
            raise self._fault(_UNREAD.get(sign, _OPEN if opened else "a rule ends with its line"), at)
        return at

    def _repeated(self, item: re.Match[bytes], size: int, rules: int) -> tuple[int, int]:
        """Return elements and rules of an item of that many, after its repetition."""
        if item["least"] is None:
            least, most = {b"*": (0, None), b"+": (1, None), b"?": (0, 1)}[item[0]]
        else:
            least = int(item["least"])
            most = least if item["comma"] is None else None if item["most"] is None else int(item["most"])
        if most is not None and most < least:
            raise self._fault(f"{least} to {most} repetitions are none", item.start())
        if not size:
            raise self._fault("there is nothing to repeat", item.start())
        if most is not None and least <= MOST_REPETITIONS < most:
            most = None
        times = most or least or 1
        self._limited(max(least, rules * times), MOST_REPETITIONS, "repetitions", item.start())
        optional = 1 if most is None else most - least
        self._add(size * (max(0, least - 1) + optional), item.start())
        self._generated += optional
        return size * least + (optional > 0), rules * times

    def _require_token(self, name: bytes, at: int) -> None:
        text = name.removeprefix(b"!")
        if not re.fullmatch(rb"<\[[0-9]{1,9}\]>", text) and self._tokens(text) != 1:
            raise self._fault("a name between < and > is no token", at)

    def _add(self, elements: int, at: int) -> None:
        self._elements = self._limited(self._elements + elements, MOST_ELEMENTS, "elements", at)

    def _limited(self, number: int, most: int, of: str, at: int) -> int:
        if number > most:
            raise self._fault(f"there are more than {most:,} {of}", at)
        return number

    def _fault(self, why: str, at: int) -> ValueError:
        before = self._text[:at]
        line, column = before.count(b"\n") + 1, len(before) - before.rfind(b"\n")
        return ValueError(f"the grammar cannot be read: line {line}, column {column}: {why}")


def _end(pattern: re.Pattern[bytes], text: bytes, at: int) -> int:
    """Return the end of a pattern that matches nothing, too."""
    found = pattern.match(text, at)
    assert found is not None, "it matches nothing, too"
    return found.end()
