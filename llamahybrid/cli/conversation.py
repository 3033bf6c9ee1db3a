"""The messages of a chat, and their JSON files."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamahybrid.files import write_whole

Message = dict[str, str]

LARGEST_FILE = 64 << 20
"""Bytes of the largest file of messages that is read."""


@dataclass(frozen=True)
class Turn:
    """A user's message and its answer; None: not answered."""

    said: str
    answer: str | None = None


@dataclass
class Conversation:
    """A system prompt and turns; only the last turn may lack an answer."""

    system: str = ""
    turns: list[Turn] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        """Messages for `create_chat_completion`."""
        found = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            found.append({"role": "user", "content": turn.said})
            if turn.answer is not None:
                found.append({"role": "assistant", "content": turn.answer})
        return found

    def say(self, text: str) -> None:
        """Add a user's message; it replaces an unanswered one."""
        if self.turns and self.turns[-1].answer is None:
            self.turns.pop()
        self.turns.append(Turn(text))

    def answered(self, text: str | None) -> None:
        """Set the answer to the last message; None: remove it."""
        self.turns[-1] = Turn(self.turns[-1].said, text)

    def save(self, path: Path) -> None:
        """Write the messages as JSON, atomically.

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
        text = json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n"
        write_whole(path, text.encode("utf-8"))


def read(path: Path) -> Conversation:
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
    return _conversation(found)


def _conversation(messages: list[Any]) -> Conversation:
    chat = Conversation()
    for number, message in enumerate(messages, 1):
        role, content = _parts(number, message)
        waits = bool(chat.turns) and chat.turns[-1].answer is None
        if role == "system" and number == 1:
            chat.system = content
        elif role == "user" and not waits:
            chat.turns.append(Turn(content))
        elif role == "assistant" and waits:
            chat.answered(content)
        else:
            raise ValueError(
                f"message {number} is {role!r} at the wrong place: a system message may come first, "
                "then user and assistant take turns"
            )
    return chat


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
