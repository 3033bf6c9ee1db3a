"""The messages of a chat: said, answered, taken back, and as JSON in a file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamahybrid.files import write_whole

Message = dict[str, str]

LARGEST_FILE = 64 << 20
"""Bytes of a file of messages; what is larger is something else."""


@dataclass(frozen=True)
class Turn:
    """What the user said, and the answer; None: there is none yet."""

    said: str
    answer: str | None = None


@dataclass
class Conversation:
    """A system prompt, and turns of which at most the last one has no answer."""

    system: str = ""
    turns: list[Turn] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        """As `create_chat_completion` takes them."""
        found = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            found.append({"role": "user", "content": turn.said})
            if turn.answer is not None:
                found.append({"role": "assistant", "content": turn.answer})
        return found

    def say(self, text: str) -> None:
        """The user says something; it takes the place of what was not answered."""
        if self.turns and self.turns[-1].answer is None:
            self.turns.pop()
        self.turns.append(Turn(text))

    def answered(self, text: str | None) -> None:
        """The answer to the last message; None: there is none after all."""
        self.turns[-1] = Turn(self.turns[-1].said, text)

    def save(self, path: Path) -> None:
        """Write the messages as JSON; whatever happens, the file is the old one or the whole new one.

        Raises ValueError where the file is there and is not a chat, OSError where it cannot be written.
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
    """A chat from a file of JSON messages: a list of them, or an object with `messages`.

    Raises ValueError, which says what it is instead, and OSError where it cannot be read.
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
