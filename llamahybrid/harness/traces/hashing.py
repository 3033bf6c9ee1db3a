"""Hashed traces: texts are hidden, common prefixes stay visible.

Each piece of a text is replaced by a word that is chosen by a hash of the piece and of everything before it,
under a key that is made for the trace and discarded: a word has another replacement at each place, so that
words can be neither counted nor guessed. Lengths, roles, control tokens and common prefixes stay visible.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Collection, Sequence
from typing import Any

from llamahybrid.harness.conversation import Message, Request

CHUNK = 4
"""Characters of text that are replaced as one piece, about a token."""

_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


class Hasher:
    """Hides the texts of one trace."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def _next(self, state: bytes, piece: bytes) -> tuple[bytes, int]:
        """Return the hash of a piece behind all before it, and a number for the choice of a word."""
        state = hashlib.blake2b(state + piece, key=self._key, digest_size=16).digest()
        return state, int.from_bytes(state[:4], "big")

    def _tokens(
        self, tokens: Sequence[int], words: Sequence[int], control: Collection[int], state: bytes
    ) -> tuple[tuple[int, ...], bytes]:
        hidden = []
        for token in tokens:
            state, number = self._next(state, token.to_bytes(8, "big", signed=True))
            hidden.append(token if token in control else words[number % len(words)])
        return tuple(hidden), state

    def _text(self, text: str, state: bytes) -> tuple[str, bytes]:
        """Return a text of the same length."""
        parts = []
        for start in range(0, len(text), CHUNK):
            state, number = self._next(state, text[start : start + CHUNK].encode("utf-8", "surrogatepass"))
            for _ in range(CHUNK - 1):
                number, letter = divmod(number, len(_LETTERS))
                parts.append(_LETTERS[letter])
            parts.append(" ")
        return "".join(parts)[: len(text)], state

    def hide(
        self, ask: Request, answer: Sequence[int], words: Sequence[int], control: Collection[int]
    ) -> tuple[Request, tuple[int, ...]]:
        """Return a request and the tokens of its answer without what was said.

        `words`: tokens that stand for all but `control`; empty: any up to the largest one here.
        """
        words = words or range(1 + max((*ask.tokens, *answer), default=0))
        tokens, state = self._tokens(ask.tokens, words, control, b"tokens")
        answered, _ = self._tokens(answer, words, control, state)
        text, _ = self._text(ask.text, b"text")
        tools: tuple[dict[str, Any], ...] = ()
        messages, state = list[Message](), b"messages"
        if ask.tools:
            said, state = self._text(json.dumps(ask.tools, sort_keys=True), state)
            about = {"name": "tool", "description": said, "parameters": {"type": "object"}}
            tools = ({"type": "function", "function": about},)
        for message in ask.messages:
            role, content = str(message.get("role", "")), message.get("content")
            plain = content if isinstance(content, str) else json.dumps(content or "", sort_keys=True)
            more = {name: value for name, value in message.items() if name not in ("role", "content")}
            state, _ = self._next(state, role.encode())
            said, state = self._text(plain + (json.dumps(more, sort_keys=True) if more else ""), state)
            # a tool's message needs its call, which is hidden: it becomes a user's
            messages.append({"role": "user" if role == "tool" else role, "content": said})
        salt = ask.salt.encode("utf-8", "surrogatepass")
        named = f"{self._next(b'salt', salt)[1]:08x}" if salt else ""
        return Request(ask.max_tokens, tokens, messages, tools, text, ask.seed, named), answered
