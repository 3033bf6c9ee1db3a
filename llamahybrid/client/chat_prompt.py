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
    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt


class _Written(Exception):
    def __init__(self, text: str) -> None:
        self.text = text


class _Prompting(StandIn):
    """Makes a prompt and decodes nothing."""

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        self._text = ""

    def tokenize(self, text: bytes, *args: Any, **kwargs: Any) -> list[int]:
        self._text = text.decode("utf-8", "replace")
        tokens: list[int] = self._llm.tokenize(text, *args, **kwargs)
        return tokens

    def create_completion(self, prompt: str | list[int], **_: Any) -> Any:
        if isinstance(prompt, str):
            prompt = self.tokenize(prompt.encode("utf-8"), special=True)
        raise _Made(Prompt(self._text, prompt))


class _Writing(StandIn):
    """Makes the text of a prompt, and no more."""

    def tokenize(self, text: bytes, *args: Any, **kwargs: Any) -> list[int]:
        raise _Written(text.decode("utf-8", "replace"))

    def create_completion(self, prompt: str | list[int], **_: Any) -> Any:
        raise _Written(prompt if isinstance(prompt, str) else "")


def chat_text(llm: Any, template: Mapping[str, Any], **options: Any) -> str:
    """Return the text of the same prompt, however long that is. Raises as `chat_prompt`."""
    try:
        chat_with(_Writing(llm), template, **options)
    except _Written as written:
        return written.text
    raise LlamaHybridError(f"the chat format {llm.chat_format!r} makes no prompt")


def chat_prompt(llm: Any, template: Mapping[str, Any], **options: Any) -> Prompt:
    """Return the prompt of `create_chat_completion(**options)`; `template`: variables of the chat template.

    `llm` may be a `StandIn`. Raises LlamaHybridError for a chat format that makes no prompt, and what formats
    raise at messages.
    """
    try:
        chat_with(_Prompting(llm), template, **options)
    except _Made as made:
        return made.prompt
    raise LlamaHybridError(f"the chat format {llm.chat_format!r} makes no prompt")
