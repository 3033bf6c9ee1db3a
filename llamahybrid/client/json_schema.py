"""JSON schemas and regular expressions that answers follow, enforced by llguidance while they are sampled.

llama-cpp-python converts a schema to GBNF rules, which allow raw newlines in strings and silently ignore
keywords such as `minimum`, `uniqueItems` or `required` outside of `properties`. llguidance follows a keyword
or refuses the schema.

Without the package `llguidance` (it comes with `llamahybrid[server]`) upstream's rules are used.
"""

from __future__ import annotations

import ctypes
import json
import logging
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp import llama_grammar

from llamahybrid.client.exact_schema import BY_NAME, exact

try:
    from llguidance import LLMatcher, LLTokenizer
except ImportError:  # the package is optional
    LLMatcher = None  # type: ignore[assignment, misc]

logger = logging.getLogger("llamahybrid")

Logits = npt.NDArray[np.single]

WHITESPACE = " ?"
"""Between two tokens of JSON, as in upstream's rules (llama_cpp/llama_grammar.py, SPACE_RULE). Without a
limit a model may fill an answer with spaces."""

ANY_OBJECT: dict[str, Any] = {"type": "object"}
"""The schema of `{"type": "json_object"}` without one."""

_SPACES = r" \t\n\r\x0b\x0c"
_CLASSES = {"d": "[0-9]", "w": "[0-9A-Za-z_]", "s": f"[{_SPACES}]"}
_CLASSES |= {"D": "[^0-9]", "W": "[^0-9A-Za-z_]", "S": f"[^{_SPACES}]"}
"""ASCII classes of regular expressions, also inside of other classes."""

_DIFFERS = re.compile(
    r"\\[pPxuU]\{[^}]*\}"  # llguidance's own
    r"|\\."
    r"|\[\^?\]?(?:\\.|[^\]\\])*\]"  # a class
    r"|\{,\d+\}"
    r"|\{(?!\d+(?:,\d*)?\})",  # no quantifier
    re.DOTALL,
)
"""The parts of Python's regular expressions that llguidance's (Rust's regex-syntax) may read otherwise."""

_tokenizers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


class ConstraintGrammar(llama_cpp.LlamaGrammar):  # type: ignore[misc]
    """llguidance's grammar in the place of a `LlamaGrammar`, for llamahybrid's `Llama` alone."""

    def __init__(self, compiled: str) -> None:
        super().__init__(_grammar="")
        self._compiled = compiled

    def constraint(self, llm: Any) -> Constraint:
        """The form of one answer of a model; it follows sampled tokens, not those that are sent."""
        return Constraint(tokenizer_of(llm), self._compiled)


class RegexGrammar(ConstraintGrammar):
    r"""A regular expression that an answer matches as a whole, as in Python; `\d`, `\w` and `\s` are ASCII.

    Raises ValueError for one that cannot be read or followed (look-around, references to groups).
    """

    def __init__(self, pattern: str) -> None:
        super().__init__(_compiled_regex(pattern))


class SchemaGrammar(ConstraintGrammar):
    """A JSON schema. Raises ValueError for one that cannot be followed."""

    def __init__(self, schema: Any) -> None:
        super().__init__(compiled(schema))
        self._schema = schema

    def instead_of(self, grammar: Any) -> Any:
        """Return the schema in place of the rules that upstream's chat handlers use for it.

        Any other grammar stays, as that of a completion that a callback of the chat asks for.
        """
        try:
            written = llama_grammar.json_schema_to_gbnf(json.dumps(self._schema))
        except Exception:  # upstream's converter raises any; its handlers allow any JSON then
            written = llama_grammar.JSON_GBNF
        if grammar is None or grammar._grammar not in (written, llama_grammar.JSON_GBNF):
            return grammar
        return self


class Constraint:
    """Allows only tokens which continue a text of the grammar; for one answer."""

    def __init__(self, tokenizer: Any, grammar: str) -> None:
        self._matcher = LLMatcher(tokenizer, grammar, log_level=0)
        self._next: int | None = None
        """The last token, to be consumed before the next: the end of an answer is no part of its text."""
        self.waits: Callable[[], bool] | None = None
        """Returns True while the answer is inside its thought, which is not constrained."""

    def mask(self, logits: Logits) -> None:
        """Set the logits, shape (n_vocab,), of each token that breaks the schema to -inf."""
        if self.waits is not None:
            if self.waits():
                return
            self.waits = None  # a text of the answer may look like the begin of a thought
        if self._next is not None:
            self._matcher.consume_tokens([self._next])
            self._next = None
        allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if not self.error:  # else nothing is sampled from this: the caller looks at `error` first
            logits[np.unpackbits(allowed, bitorder="little")[: len(logits)] == 0] = -np.inf

    def took(self, token: int) -> None:
        """The answer has this token, which was sampled."""
        if self.waits is None or not self.waits():
            self._next = token

    @property
    def error(self) -> str:
        """The reason why nothing can be generated any more; empty where there is none."""
        return str(self._matcher.get_error()) if self._matcher.is_error() else ""


@lru_cache(maxsize=64)
def _compiled(text: str) -> str:
    grammar = LLMatcher.grammar_from_json_schema(
        text, overrides={"whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": False}
    )
    if why := LLMatcher.validate_grammar(grammar):
        raise ValueError(why.strip().splitlines()[0])
    return str(grammar)


def _as_rust(found: re.Match[str]) -> str:
    """Write a part of a Python regular expression as Rust's regex-syntax does."""
    part = found[0]
    if part[0] == "[":
        head = "[^" if part[1] == "^" else "["
        return head + re.sub(r"\\.|--|\[|&&|~~", _in_class, part[len(head) :], flags=re.DOTALL)
    if part[0] == "{":
        return "\\{" if part == "{" else part.replace(",", "0,")
    return r"\z" if part == r"\Z" else _CLASSES.get(part[1:], part)


def _in_class(found: re.Match[str]) -> str:
    """Escape the operators that a class has in Rust, and not in Python."""
    part = found[0]
    if part[0] == "\\":
        return _CLASSES.get(part[1:], part)
    if part == "--":  # begins a class, or ends a range
        return r"\--" if found.start() == 0 else r"-\-"
    return "".join(f"\\{letter}" for letter in part)


@lru_cache(maxsize=64)
def _compiled_regex(pattern: str) -> str:
    if LLMatcher is None:
        raise ValueError("regular expressions need the package llguidance")
    grammar = LLMatcher.grammar_from_regex(_DIFFERS.sub(_as_rust, pattern))
    if why := LLMatcher.validate_grammar(grammar):
        raise ValueError(" ".join(why.split()))
    return str(grammar)


def compiled(schema: Any) -> str:
    """llguidance's grammar of a JSON schema, whose objects are closed (see `closed`).

    Raises ValueError for a schema that cannot be followed.
    """
    if not isinstance(schema, (dict, bool)):
        raise ValueError("a JSON schema is an object")
    return _compiled(exact(closed(schema)))


def tokenizer_of(llm: Any) -> Any:
    """llguidance's view of a model's vocabulary: made once a model, since it looks at each token."""
    found = _tokenizers.get(llm)
    if found is None:
        found = _tokenizers[llm] = llm._calls.run(_tokenizer, llm)
    return found


def _tokenizer(llm: Any) -> Any:
    """As llguidance.llamacpp.lltokenizer_from_vocab, which warns of a deprecated call for each token."""
    vocab, n_vocab = llm._model.vocab, llm.n_vocab()
    special = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL
    pieces, room = [], ctypes.create_string_buffer(16 << 10)
    for token in range(n_vocab):
        length = llama_cpp.llama_token_to_piece(vocab, token, room, len(room), 0, True)
        piece = room.raw[: max(0, length)]
        control = llama_cpp.llama_vocab_get_attr(vocab, token) & special
        pieces.append(b"\xff" + piece if control else piece)  # llguidance's mark of a special token
    ends = [token for token in range(n_vocab) if llama_cpp.llama_vocab_is_eog(vocab, token)]
    return LLTokenizer.from_llamacpp(  # type: ignore[attr-defined]
        tokens=pieces,
        vocab_ptr=vocab,
        tokenize_fptr=ctypes.cast(llama_cpp.llama_cpp._lib.llama_tokenize, ctypes.c_void_p).value,
        eos_token=ends or llama_cpp.llama_vocab_eos(vocab),
        slices=None,
    )


def schema_grammar(options: dict[str, Any]) -> SchemaGrammar | None:
    """Return the JSON schema that a chat asks for; `options`: the arguments of `create_chat_completion`.

    None without one, or without llguidance. A schema that llguidance cannot follow is left to upstream, with
    a warning: a program that ran with llama-cpp-python goes on running.
    """
    schema = schema_of(options) if LLMatcher is not None else None
    try:
        return None if schema is None else SchemaGrammar(schema)
    except ValueError as error:
        logger.warning("this JSON schema is followed only as far as llama-cpp-python does: %s", error)
        return None


def schema_of(options: dict[str, Any]) -> Any:
    """The JSON schema that a chat's answer has to follow: of its format, or of the tool that was chosen."""
    choice = options.get("tool_choice")
    if isinstance(options.get("function_call"), dict):
        choice = {"function": options["function_call"]}
    if isinstance(choice, dict):
        functions = [tool.get("function", {}) for tool in options.get("tools") or ()]
        functions += list(options.get("functions") or ())
        name = choice.get("function", {}).get("name")
        return next((each.get("parameters") for each in functions if each.get("name") == name), None)
    form = options.get("response_format") or {}
    if form.get("type") != "json_object":
        return None
    schema = form.get("schema")
    return ANY_OBJECT if schema is None else schema


# -- objects without properties that their schema does not name ------------------------------------------

_SAYS_OTHERWISE = {"additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties"}
_COMBINATIONS = ("allOf", "anyOf", "oneOf", "$ref")
_INNER = ("items", "additionalProperties", "prefixItems", "allOf", "anyOf", "oneOf")
_NOTES = {"title", "description", "default", "examples", "discriminator", "$defs", "definitions", "$schema"}
"""Keywords that constrain nothing."""


class _Combined(Exception):
    """A value is constrained by several schemas."""


def closed(schema: Any) -> Any:
    """Return the schema with `additionalProperties: false` in each object that does not say otherwise.

    A model seldom adds useful properties: llama.cpp's converters and OpenAI's strict mode forbid them, too.
    A schema that combines schemas for one value stays open: a closed one would contradict the rest.
    """
    try:
        return _closed(schema)
    except _Combined:
        return schema


def _closed(part: Any) -> Any:
    if isinstance(part, list):
        return [_closed(each) for each in part]
    if not isinstance(part, dict):
        return part
    result = dict(part)
    for name, value in part.items():
        several = name == "allOf" and isinstance(value, list) and len(value) > 1
        if name in _COMBINATIONS and (several or not part.keys() <= {name, *_NOTES}):
            raise _Combined
        if name in BY_NAME and isinstance(value, dict):
            result[name] = {key: _closed(each) for key, each in value.items()}
        elif name in _INNER:
            result[name] = _closed(value)
    names, required = part.get("properties"), part.get("required", [])
    if isinstance(names, dict) and isinstance(required, list) and not part.keys() & _SAYS_OTHERWISE:
        closes = all(str(name) in names for name in required)
        result |= {"additionalProperties": False} if closes else {}
    return result
