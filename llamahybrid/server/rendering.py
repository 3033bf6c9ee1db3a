"""Rendering: the prompt of a chat, without decoding it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from llamahybrid.client.chat_template import chat_with
from llamahybrid.llama import Llama
from llamahybrid.server.errors import bad
from llamahybrid.server.loading import prompting


@dataclass(frozen=True)
class Prompt:
    """The input of a model."""

    text: str
    tokens: list[int]


class _Made(Exception):
    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt


class _Stand:
    """A stand-in for the `Llama` of a chat format, which makes a prompt and decodes nothing."""

    def __init__(self, llm: Llama) -> None:
        self._llm = llm
        self._text = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def tokenize(self, text: bytes, *args: Any, **kwargs: Any) -> list[int]:
        self._text = text.decode("utf-8", "replace")
        tokens: list[int] = self._llm.tokenize(text, *args, **kwargs)
        return tokens

    def create_completion(self, prompt: str | list[int], **_: Any) -> Any:
        if isinstance(prompt, str):
            prompt = self.tokenize(prompt.encode("utf-8"), special=True)
        raise _Made(Prompt(self._text, prompt))


def rendered(llm: Llama, template: Mapping[str, Any], **options: Any) -> Prompt:
    """Return the prompt of `create_chat_completion(**options)`; `template`: variables of the chat template.

    Raises Refusal where this model's format decodes by itself, ContextOverflow for a prompt whose beginning
    alone fills the context, and what formats raise at messages.
    """
    if llm.chat_handler is not None:
        raise bad("the chat format of this model makes no prompt of text alone", "messages")
    token = prompting.set(True)
    try:
        chat_with(cast(Llama, _Stand(llm)), template, **options)
    except _Made as made:
        return made.prompt
    finally:
        prompting.reset(token)
    raise bad(f"the chat format {llm.chat_format!r} makes no prompt", "messages")
