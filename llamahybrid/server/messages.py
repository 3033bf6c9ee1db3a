"""Messages of OpenAI's clients, converted for upstream's types and chat templates."""

from __future__ import annotations

import json
from typing import Any

from llamahybrid.llama import Llama
from llamahybrid.server.errors import bad

MOST_PARTS = 1000
"""Most contents, or calls of tools, of one message."""

MOST_MESSAGES = 10_000
"""Most messages and parts of one request: validation and templates hold the interpreter for each."""

_OPTIONS = ("stream_options", "image_url")
"""Objects whose fields may be null."""

_ROLES = {"developer": "system"}


def without_nulls(body: dict[str, Any]) -> dict[str, Any]:
    """Return an object without null fields, also inside of `_OPTIONS`, as OpenAI's API ignores them."""
    found = {name: value for name, value in body.items() if value is not None}
    return {
        name: without_nulls(value) if isinstance(value, dict) and name in _OPTIONS else value
        for name, value in found.items()
    }


def require_few(messages: Any) -> None:
    """Raise ValueError for too many messages, or parts of them."""
    if not isinstance(messages, list):
        return
    count = len(messages)
    if count <= MOST_MESSAGES:
        for message in messages:
            lists = (
                [part for part in message.values() if isinstance(part, list)]
                if isinstance(message, dict)
                else []
            )
            if any(len(part) > MOST_PARTS for part in lists):
                raise ValueError(f"a message has more than {MOST_PARTS:,} parts")
            count += sum(map(len, lists))
    if count > MOST_MESSAGES:
        raise ValueError(f"there are more than {MOST_MESSAGES:,} messages and parts of messages")


def normalized(messages: Any) -> Any:
    """Return messages with upstream's names and contents.

    Null fields are left out. Text parts become one text, a line for each part, as in llama-server and vLLM.
    Faults are left to validation. Raises ValueError for an image in the result of a tool, since no chat
    format of upstream reads it.
    """
    if not isinstance(messages, list):
        return messages
    return [_normalized(message) if isinstance(message, dict) else message for message in messages]


def _normalized(message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    thought = message.get("reasoning")  # newer vLLM
    if role == "assistant" and isinstance(thought, str) and message.get("reasoning_content") is None:
        message = {**message, "reasoning_content": thought}
    made = {
        name: value
        for name, value in message.items()
        if value is not None or (name == "content" and role != "assistant")
    }
    if isinstance(role, str):
        made["role"] = _ROLES.get(role, role)
    content = made.get("content")
    if (texts := _texts(content)) is not None:
        made["content"] = "\n".join(texts)
    elif isinstance(content, list):
        if role == "tool" and any(
            isinstance(part, dict) and part.get("type") == "image_url" for part in content
        ):
            raise ValueError("messages: images in the result of a tool are not supported")
        made["content"] = [without_nulls(part) if isinstance(part, dict) else part for part in content]
    return made


def _texts(content: Any) -> list[str] | None:
    """Return the texts of parts; None if there are other parts, or no parts."""
    if not isinstance(content, list):
        return None
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kind) if kind in ("text", "refusal") else None
        if not isinstance(text, str):
            return None
        texts.append(text)
    return texts


def require_readable(llm: Llama, messages: list[Any]) -> None:
    """Raise Refusal for images and audio if this model reads text only: templates would leave them out."""
    if llm.chat_handler is not None:
        return
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part["type"] != "text":
                raise bad(f"this model reads text alone, no {part['type']}", "messages")


def with_mappings(messages: list[Any]) -> list[Any]:
    """Return messages whose calls have mappings as arguments, if the arguments are JSON objects."""
    return [
        {**message, "tool_calls": [_with_mapping(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def with_thoughts(messages: list[Any], taken: str) -> list[Any]:
    """Return messages with thoughts in the field that the chat template reads (`Markers.taken`)."""
    return messages if taken == "reasoning_content" else [_with_thought(each, taken) for each in messages]


def _with_thought(message: Any, taken: str) -> Any:
    thought, content = message.get("reasoning_content"), message.get("content")
    if not thought or message.get("role") != "assistant":
        return message
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    if taken == "thinking":
        if message.get("tool_calls"):  # gpt-oss's template has room for one of them
            rest["content"] = ""
        return {**rest, "thinking": thought}
    texts = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
    return {**rest, "content": [{"type": "thinking", "thinking": thought}, *texts]}


def _with_mapping(call: Any) -> Any:
    function = call["function"]
    try:
        found = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": found}} if isinstance(found, dict) else call
