"""Prefill: answers that go on from the beginning which the assistant's last message has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamahybrid.client.chat_template import template_of
from llamahybrid.client.chat_way import continuation_of
from llamahybrid.client.continuation import Continuing
from llamahybrid.llama import Llama
from llamahybrid.server.errors import bad
from llamahybrid.server.rendering import Prompt, rendered


def goes_on(llm: Llama, body: Any) -> bool:
    """The answer to a chat goes on from its last message.

    Unless the request says otherwise: where that is the assistant's, has text and calls no tool, as with
    llama-server. Raises Refusal for one that is to go on from nothing.
    """
    asked = body.continue_final_message
    if asked is None and body.add_generation_prompt is None:
        last = body.messages[-1]
        text = last.get("content") or last.get("reasoning_content")
        over = last.get("tool_calls") or last.get("function_call")
        return last["role"] == "assistant" and bool(text) and not over and template_of(llm) is not None
    if not (asked or body.add_generation_prompt is False):
        return False
    try:
        continuation_of(llm, body.messages)
    except ValueError as error:
        raise bad(str(error), "continue_final_message" if asked else "add_generation_prompt") from None
    return True


def prefilled(llm: Llama, template: Mapping[str, Any], **options: Any) -> Prompt:
    """Return the prompt of a chat whose answer goes on. Raises as `rendered`, and ValueError."""
    continuation = continuation_of(llm, options["messages"])
    stand_in: Any = Continuing(llm, continuation)
    prompt = rendered(stand_in, template, **{**options, "messages": options["messages"][:-1]})
    return Prompt(prompt.text + continuation.after(prompt.text), prompt.tokens)
