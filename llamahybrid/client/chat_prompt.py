"""Chat prompts: the prompt that a model's chat format makes of messages, without decoding it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamahybrid.client.chat_template import chat_with
from llamahybrid.client.stand_in import StandIn
from llamahybrid.errors import LlamaHybridError


@dataclass(frozen=True)
class Prompt:
    """The input of a model."""

    text: str
    tokens: list[int]


class _Made(Exception):
    """The prompt of a chat format is complete."""

    def __init__(self, text: str, tokens: list[int] | None) -> None:
        self.text = text
        self.tokens = tokens


class _Prompting(StandIn):
    """Stops a chat format at its prompt: with `tokens` where it completes it, else before it tokenizes it."""

    def __init__(self, llm: Any, tokens: bool) -> None:
        super().__init__(llm)
        self._tokens = tokens
        self._text = ""

    def tokenize(self, text: bytes, *args: Any, **kwargs: Any) -> list[int]:
        self._text = text.decode("utf-8", "replace")
        if not self._tokens:
            raise _Made(self._text, None)
        tokens: list[int] = self._llm.tokenize(text, *args, **kwargs)
        return tokens

    def create_completion(self, prompt: str | list[int], **_: Any) -> Any:
        if isinstance(prompt, str):
            prompt = self.tokenize(prompt.encode("utf-8"), special=True)
        raise _Made(self._text, prompt)


def _made(llm: Any, tokens: bool, template: Mapping[str, Any], options: Mapping[str, Any]) -> _Made:
    try:
        chat_with(_Prompting(llm, tokens), template, **options)
    except _Made as made:
        return made.with_traceback(None)  # whose frames hold the model
    raise LlamaHybridError(f"the chat format {llm.chat_format!r} makes no prompt")


def chat_text(llm: Any, template: Mapping[str, Any], **options: Any) -> str:
    """Return the text of the same prompt, however long that is. Raises as `chat_prompt`."""
    return _made(llm, False, template, options).text


def chat_prompt(llm: Any, template: Mapping[str, Any], **options: Any) -> Prompt:
    """Return the prompt of `create_chat_completion(**options)`; `template`: variables of the chat template.

    `llm` may be a `StandIn`. Raises LlamaHybridError for a chat format that makes no prompt, and errors of
    formats at messages.
    """
    made = _made(llm, True, template, options)
    return Prompt(made.text, made.tokens or [])
