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
"""Characters and references of all rules, repetitions written out; 8 bytes each."""

DEEPEST_GROUP = 200

MOST_RULES = 4_000
"""Most rules, and most groups. The library reads a grammar recursively: 20,000 groups, or a chain of 100,000
rules, end the process."""

_SPACE = re.compile(rb"(?:[ \t]|#[^\r\n]*)*")
_SPACE_OR_LINES = re.compile(rb"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(rb"[a-zA-Z0-9-]+")
_INT = re.compile(rb"[0-9]{1,18}(?![0-9])")
_CHAR = re.compile(
    rb"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[trn\\\"\[\]-])"
    rb"|[\x01-\x5b\x5d-\x7f]|[\x80-\xff][\x80-\xbf]*"
)
_TOKEN = re.compile(rb"!?<(?:\[([0-9]{1,9})\]|[^>]*)>")

TokenCount = Callable[[bytes], int]
"""Counts the tokens of a text, with control tokens recognized."""


def require_grammar(vocab: Any, grammar: Any) -> None:
    """Raise ValueError for a `LlamaGrammar` that the library cannot read.

    The library returns NULL then, which upstream adds to its chain, and the next sample ends the process
    (src/llama-sampler.cpp, llama_sampler_init_grammar; llama_cpp/_internals.py, LlamaSampler.add_grammar).
    """
    require_parsed(grammar._grammar, partial(_count, vocab))
    text, root = grammar._grammar.encode("utf-8"), grammar._root.encode("utf-8")
    sampler = llama_cpp.llama_sampler_init_grammar(vocab, text, root)
    if not sampler:
        raise ValueError("the grammar cannot be used: a rule begins with itself")
    llama_cpp.llama_sampler_free(sampler)


def _count(vocab: Any, text: bytes) -> int:
    """Count the tokens of a text, with control tokens recognized."""
    return abs(int(llama_cpp.llama_tokenize(vocab, text, len(text), None, 0, False, True)))


def require_parsed(text: str, tokens: TokenCount) -> None:
    """Raise ValueError for a grammar that llama.cpp would not parse, or that is too large written out.

    The message quotes nothing of the grammar but the name of a rule.
    """
    _Parser(text.encode("utf-8", "surrogatepass"), tokens).parse()


class _Parser:
    """llama_grammar_parser, which keeps of each rule no more than its size."""

    def __init__(self, text: bytes, tokens: TokenCount) -> None:
        self._text = text
        self._tokens = tokens
        self._at = 0
        self._elements = 0
        self._rules = self._groups = 0
        self._defined: set[bytes] = set()
        self._names: set[bytes] = {b""}
        self._generated = 0
        """Rules without a name of their own."""

    def parse(self) -> None:
        """Raise ValueError for a fault."""
        if b"\0" in self._text:
            raise self._fault("there is a NUL character", self._text.index(b"\0"))
        self._skip(lines=True)
        while self._at < len(self._text):
            self._rule()
        if b"root" not in self._defined:
            raise ValueError("the grammar has no rule named root")
        if missing := self._names - self._defined - {b""}:
            raise ValueError(f"the grammar has no rule named {min(missing).decode()[:100]}")

    def _rule(self) -> None:
        name = self._match(_NAME, "the name of a rule is missing")
        self._rules += 1
        if self._rules > MOST_RULES:
            raise self._fault(f"the grammar has more than {MOST_RULES:,} rules")
        self._names.add(name)
        self._skip(lines=False)
        self._expect(b"::=")
        self._skip(lines=True)
        self._alternates(0)
        if self._at < len(self._text) and self._peek() not in b"\r\n":
            raise self._fault("a rule ends with its line")
        self._skip(lines=True)
        self._defined.add(name)

    def _alternates(self, depth: int) -> None:
        if depth > DEEPEST_GROUP:
            raise self._fault(f"groups are nested deeper than {DEEPEST_GROUP}")
        self._sequence(depth)
        while self._peek() == b"|":
            self._at += 1
            self._skip(lines=True)
            self._sequence(depth)

    def _sequence(self, depth: int) -> None:
        size, rules = 0, 1  # elements of the item that a repetition repeats, and rules that it is made of
        while sign := self._peek():
            if sign in b"*+?{":
                least, most = self._repetition(sign, lines=depth > 0)
                if not size:
                    raise self._fault("there is nothing to repeat")
                times = most or least or 1
                if rules * times > MOST_REPETITIONS:
                    raise self._fault("there are too many repetitions")
                optional = 1 if most is None else most - least
                self._count(size * (max(0, least - 1) + optional))
                self._generated += optional
                size = size * least + (optional > 0)
                rules *= times
                continue
            size, rules = 1, 1
            if sign == b'"':
                size = self._characters(b'"')
            elif sign == b"[":
                if self._text[self._at + 1 : self._at + 2] == b"^":
                    self._at += 1
                size = self._characters(b"]")
            elif sign in b"<!":
                self._token()
            elif sign == b".":
                self._at += 1
            elif sign == b"(":
                self._at += 1
                self._skip(lines=True)
                before = len(self._names) + self._generated
                self._generated += 1
                self._groups += 1
                if self._groups > MOST_RULES:
                    raise self._fault(f"the grammar has more than {MOST_RULES:,} groups")
                self._alternates(depth + 1)
                rules = max(1, len(self._names) + self._generated - before)
                self._expect(b")")
            elif _NAME.match(sign):
                self._names.add(self._match(_NAME, "the name of a rule is missing"))
            else:
                return
            self._count(size)
            self._skip(lines=depth > 0)

    def _repetition(self, sign: bytes, lines: bool) -> tuple[int, int | None]:
        """The least and the most times; None: no most."""
        self._at += 1
        self._skip(lines)
        if sign != b"{":
            return {b"*": (0, None), b"+": (1, None), b"?": (0, 1)}[sign]
        least = int(self._match(_INT, "a number of repetitions is missing"))
        most: int | None = least
        self._skip(lines)
        if self._peek() == b",":
            self._at += 1
            self._skip(lines)
            most = None
            if self._peek().isdigit():
                most = int(self._match(_INT, "a number of repetitions is missing"))
                if most < least:
                    raise self._fault(f"{least} to {most} repetitions are none")
                self._skip(lines)
        self._expect(b"}")
        self._skip(lines)
        if least > MOST_REPETITIONS:
            raise self._fault("there are too many repetitions")
        return least, None if most is not None and most > MOST_REPETITIONS else most

    def _characters(self, end: bytes) -> int:
        """Elements up to a quote or bracket, which is passed."""
        self._at += 1
        count = 0
        while self._peek() != end:
            self._match(_CHAR, "there is an escape that is none, or no end")
            count += 1
            if end == b"]" and self._peek() == b"-" and self._text[self._at + 1 : self._at + 2] != end:
                self._at += 1
                self._match(_CHAR, "there is an escape that is none, or no end")
                count += 1
        self._at += 1
        return count

    def _token(self) -> None:
        start = self._at + (self._peek() == b"!")
        found = _TOKEN.match(self._text, self._at)
        if found is None:
            raise self._fault("a token is <name> or <[id]>")
        self._at = found.end()
        if found[1] is None and self._tokens(self._text[start : self._at]) != 1:
            raise self._fault("a name between < and > is no token", start)

    def _count(self, elements: int) -> None:
        self._elements += elements
        if self._elements > MOST_ELEMENTS:
            raise self._fault(f"the grammar has more than {MOST_ELEMENTS:,} elements")

    def _peek(self) -> bytes:
        return self._text[self._at : self._at + 1]

    def _skip(self, lines: bool) -> None:
        found = (_SPACE_OR_LINES if lines else _SPACE).match(self._text, self._at)
        assert found is not None, "it matches nothing, too"
        self._at = found.end()

    def _expect(self, sign: bytes) -> None:
        if not self._text.startswith(sign, self._at):
            raise self._fault(f"{sign.decode()} is missing")
        self._at += len(sign)

    def _match(self, what: re.Pattern[bytes], missing: str) -> bytes:
        found = what.match(self._text, self._at)
        if found is None:
            raise self._fault(missing)
        self._at = found.end()
        return found[0]

    def _fault(self, why: str, at: int | None = None) -> ValueError:
        before = self._text[: self._at if at is None else at]
        line, column = before.count(b"\n") + 1, len(before) - before.rfind(b"\n")
        return ValueError(f"the grammar cannot be read: line {line}, column {column}: {why}")
