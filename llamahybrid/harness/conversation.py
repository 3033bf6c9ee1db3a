"""Conversations: generators that yield a `Request` and are sent the `Answer`, as a client works."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

Message: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """A client's request: token ids, messages or a text."""

    __pydantic_config__: ClassVar = {"strict": True, "extra": "forbid"}
    max_tokens: int
    tokens: Sequence[int] = ()
    messages: Sequence[Message] = ()
    tools: Sequence[dict[str, Any]] = ()
    text: str = ""
    seed: int | None = None
    """None: greedy; otherwise temperature 1 with this seed."""
    salt: str = ""
    chat: str = ""
    """Name of the chat, in workloads with several."""

    def __post_init__(self) -> None:
        for name in ("tokens", "messages", "tools"):  # copied: a client's lists grow
            object.__setattr__(self, name, tuple(getattr(self, name)))


@dataclass(frozen=True)
class Answer:
    """The sampled tokens, and their text, whole or in part."""

    tokens: tuple[int, ...]
    detokenize: Callable[[Sequence[int]], str] = field(repr=False, compare=False)

    def text(self, start: int = 0, stop: int | None = None) -> str:
        """Return the text of the answer's tokens [start, stop)."""
        return self.detokenize(self.tokens[start:stop])


Conversation: TypeAlias = Generator[Request, Answer, None]
