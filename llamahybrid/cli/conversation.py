"""The messages of a chat, and their JSON files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llamahybrid.files import write_whole

Message = dict[str, str]

LARGEST_FILE = 64 << 20
"""Bytes of the largest file of messages that is read."""

_AFTER = {"system": ("",), "user": ("", "system", "assistant"), "assistant": ("user",)}
"""The roles that a message of each role may follow; empty: it is the first one."""


def save(path: Path, messages: Sequence[Message]) -> None:
    """Write messages as JSON, atomically.

    Raises:
        ValueError: the file exists and is not a chat.
        OSError: the file cannot be written.
    """
    path = path.resolve()
    if path.exists():
        try:
            read(path)
        except ValueError as error:
            raise ValueError(f"it is there and is not a chat, so it is left alone ({error})") from error
    text = json.dumps(messages, ensure_ascii=False, indent=1) + "\n"
    write_whole(path, text.encode("utf-8"))


def read(path: Path) -> list[Message]:
    """Read a chat from a JSON file: a list of messages, or an object with `messages`.

    Raises:
        ValueError: the file is not a chat; the message says why.
        OSError: the file cannot be read.
    """
    if not path.is_file():
        raise ValueError("not a file" if path.exists() else "there is no such file")
    if path.stat().st_size > LARGEST_FILE:
        raise ValueError(f"larger than {LARGEST_FILE >> 20} MiB")
    try:
        found: Any = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if isinstance(found, dict):
        found = found.get("messages")
    if not isinstance(found, list):
        raise ValueError("JSON, but not a list of messages")
    messages, last = list[Message](), ""
    for number, message in enumerate(found, 1):
        role, content = _parts(number, message)
        if last not in _AFTER[role]:
            raise ValueError(
                f"message {number} is {role!r} at the wrong place: a system message may come first, "
                "then user and assistant take turns"
            )
        if content or role != "system":
            messages.append({"role": role, "content": content})
        last = role
    return messages


def _parts(number: int, message: Any) -> tuple[str, str]:
    role = message.get("role") if isinstance(message, dict) else None
    content = message.get("content") if isinstance(message, dict) else None
    if role not in ("system", "user", "assistant") or not isinstance(content, str):
        raise ValueError(
            f"message {number} is not a text of system, user or assistant, as in "
            '{"role": "user", "content": "..."}'
        )
    try:
        content.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"message {number} has half a character (a lone surrogate)") from error
    return role, content
