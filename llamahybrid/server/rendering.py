"""Rendering: the prompt of a chat, without decoding it, as a request may be refused one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamahybrid.client.chat_prompt import Prompt, chat_prompt
from llamahybrid.llama import Llama
from llamahybrid.server.errors import bad
from llamahybrid.server.loading import prompting

__all__ = ["Prompt", "rendered"]


def rendered(llm: Llama, template: Mapping[str, Any], **options: Any) -> Prompt:
    """Return the prompt of `create_chat_completion(**options)`; `template`: variables of the chat template.

    Raises Refusal where this model's format decodes by itself, ContextOverflow for a prompt whose beginning
    alone fills the context, and what formats raise at messages.
    """
    if llm.chat_handler is not None:
        raise bad("the chat format of this model makes no prompt of text alone", "messages")
    token = prompting.set(True)
    try:
        return chat_prompt(llm, template, **options)
    finally:
        prompting.reset(token)
