"""The messages of a chat, and their JSON files."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from llamahybrid.files import write_whole

Message = dict[str, str]

LARGEST_FILE = 64 << 20
"""Bytes of the largest file of messages that is read."""

_AFTER = {"system": ("",), "user": ("", "system", "assistant"), "assistant": ("user",)}
"""The roles that a message of each role may follow; empty: it is the first one."""


@dataclass(frozen=True)
class _Message:
    role: Literal["system", "user", "assistant"]
    content: str


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
    """Read a chat from a JSON file.

    Raises:
        ValueError: the file is not a chat; the message says why.
        OSError: the file cannot be read.
    """
    if not path.is_file():
        raise ValueError("not a file" if path.exists() else "there is no such file")
    if path.stat().st_size > LARGEST_FILE:
        raise ValueError(f"larger than {LARGEST_FILE >> 20} MiB")
    try:
        found = TypeAdapter(list[_Message]).validate_json(path.read_bytes().removeprefix(BOM_UTF8))
    except ValidationError as error:
        wrong = error.errors()[0]
        raise ValueError("".join(f"{part}: " for part in wrong["loc"]) + wrong["msg"]) from error
    messages, last = list[Message](), ""
    for number, message in enumerate(found, 1):
        if last not in _AFTER[message.role]:
            raise ValueError(
                f"message {number} is {message.role!r} at the wrong place: a system message may come first, "
                "then user and assistant take turns"
            )
        if message.content or message.role != "system":
            messages.append({"role": message.role, "content": message.content})
        last = message.role
    return messages
