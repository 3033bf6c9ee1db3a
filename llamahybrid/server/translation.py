"""Translation of llama-server's and vLLM's names of fields to OpenAI's, before validation.

A null field counts as missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from llamahybrid.server.schemas import MOST_LETTERS

_SAME: Final = {
    "max_completion_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "n_cmpl": "n",
    "mirostat": "mirostat_mode",
}
"""Names of the same field."""

_FORMS: Final = (
    *("response_format", "json_schema", "structured_outputs", "guided_json", "guided_regex"),
    *("guided_choice", "guided_grammar"),
)
"""Fields for the form of an answer. A request has at most one of them, or a grammar."""

_INSIDE: Final = {
    "json": "guided_json",
    "regex": "guided_regex",
    "choice": "guided_choice",
    "grammar": "guided_grammar",
}
"""Fields of vLLM's `structured_outputs`, and their older names."""

MOST_CHOICES = 10_000


def translated(given: Mapping[str, Any], chat: bool) -> dict[str, Any]:
    """Return a request with the names of bodies. Raises ValueError for contradictory fields."""
    said = {name: value for name, value in given.items() if value is not None}
    for other, name in _SAME.items():
        if other in said and (other != "max_completion_tokens" or chat):
            _rename(said, other, name)
    if isinstance(said.get("max_tokens"), int) and said["max_tokens"] < 0 and "n_predict" in given:
        said["max_tokens"] = 0  # llama-server's -1: no limit
    if "n_probs" in said:
        _take_probabilities(said, chat)
    if "repetition_penalty" in said and "repeat_penalty" not in said:
        said["repeat_penalty"] = 1.0  # vLLM has no other, and upstream's default is 1.1
    _take_form(said)
    return said


def _rename(said: dict[str, Any], other: str, name: str) -> None:
    value = said.pop(other)
    if said.setdefault(name, value) != value:
        raise ValueError(f"{other} and {name} are the same field; give one")


def _take_probabilities(said: dict[str, Any], chat: bool) -> None:
    """Translate llama-server's `n_probs` to OpenAI's log-probabilities; 0: none."""
    count = said.pop("n_probs")
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError("n_probs is a number of tokens, 0 or more")
    if not count:
        return
    if chat:
        said.setdefault("logprobs", True)
    name = "top_logprobs" if chat else "logprobs"
    if said.setdefault(name, count) != count:
        raise ValueError(f"n_probs and {name} are the same field; give one")


# -- the form of an answer -----------------------------------------------------------------------------


def _take_form(said: dict[str, Any]) -> None:
    """Translate the form of the answer to `response_format`, `grammar` or `guided_regex`."""
    if (inside := said.get("structured_outputs")) is not None:
        said.pop("structured_outputs")
        said.update(_unpacked(inside, said))
    asked = [name for name in _FORMS if name in said]
    if said.get("response_format") == {"type": "text"}:
        asked.remove("response_format")
    if len(asked) > 1:
        raise ValueError(f"an answer has one form: {asked[0]} or {asked[1]}, not both")
    if not asked:
        return
    (name,) = asked
    if name != "response_format":
        value = said.pop(name)
        if name in ("json_schema", "guided_json"):
            said["response_format"] = {"type": "json_object", "schema": _schema(value, name)}
            return
        if "grammar" in said:
            raise ValueError(f"an answer has one form: {name} or grammar, not both")
        said["grammar" if name == "guided_grammar" else "guided_regex"] = _grammar(name, value)
        return
    form = said["response_format"]
    if isinstance(form, dict) and form.get("type") == "json_schema":
        inner = form.get("json_schema")
        if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
            raise ValueError("response_format.json_schema.schema is missing")
        said["response_format"] = {"type": "json_object", "schema": inner["schema"]}


def _unpacked(inside: Any, said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field that `structured_outputs` stands for."""
    if not isinstance(inside, dict):
        raise ValueError("structured_outputs is an object")
    given = {name: value for name, value in inside.items() if value not in (None, False)}
    if given == {"json_object": True}:
        found = {"response_format": {"type": "json_object"}}
    elif len(given) == 1 and (name := next(iter(given))) in _INSIDE:
        found = {_INSIDE[name]: given[name]}
    else:
        names = ", ".join([*_INSIDE, "json_object"])
        raise ValueError(f"structured_outputs has one of {names}, and nothing else")
    if (twice := [name for name in found if name in said]) != []:
        raise ValueError(f"an answer has one form: structured_outputs or {twice[0]}, not both")
    return found


def _schema(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, str) and len(value) <= MOST_LETTERS:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name} is no JSON: {error}") from error
    if value is True:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{name} is a JSON schema: an object")
    return value


def _grammar(name: str, value: Any) -> str:
    if name == "guided_choice":
        texts = isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value)
        if not texts or len(value) > MOST_CHOICES:
            raise ValueError(f"{name} is a list of texts, of at most {MOST_CHOICES:,}")
        return "|".join(map(re.escape, value))
    if not isinstance(value, str) or len(value) > MOST_LETTERS:
        raise ValueError(f"{name} is a text of at most {MOST_LETTERS:,} letters")
    return value
