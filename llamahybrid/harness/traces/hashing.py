"""Hashed traces: texts are hidden, common prefixes stay visible.

The hash of each piece covers everything before it, too, under a key that is made for the trace and discarded:
a word has another hash at each place, so that words can be neither counted nor guessed. Lengths, roles,
control tokens and common prefixes stay visible.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from typing import Any

from llamahybrid.harness.conversation import Request

CHUNK = 4
"""Characters of text that are hashed as one piece, about a token."""

_BITS = 32


class Hasher:
    """Hides the texts of one trace."""

    def __init__(self, key: bytes | None = None) -> None:
        """`key`: for tests; a random one is made otherwise."""
        self._key = key or secrets.token_bytes(32)

    def _next(self, state: bytes, piece: bytes) -> tuple[bytes, int]:
        state = hashlib.blake2b(state + piece, key=self._key, digest_size=16).digest()
        return state, int.from_bytes(state[:4], "big") % (1 << _BITS)

    def _tokens(
        self, tokens: Sequence[int], control: frozenset[int], state: bytes
    ) -> tuple[list[int], bytes]:
        hidden = []
        for token in tokens:
            state, number = self._next(state, token.to_bytes(8, "big", signed=True))
            hidden.append(-1 - token if token in control else number)
        return hidden, state

    def _text(self, text: str, state: bytes) -> tuple[list[int], bytes]:
        hidden = [len(text)]
        for start in range(0, len(text), CHUNK):
            piece = text[start : start + CHUNK].encode("utf-8", "surrogatepass")
            state, number = self._next(state, piece)
            hidden.append(number)
        return hidden, state

    def ask(
        self, ask: dict[str, Any], answer: Sequence[int], control: frozenset[int]
    ) -> tuple[dict[str, Any], list[int]]:
        """Return a request and its answer's tokens without texts."""
        tokens, state = self._tokens(ask["tokens"], control, b"tokens")
        hidden_answer, _ = self._tokens(answer, control, state)
        text, _ = self._text(ask["text"], b"text") if ask["text"] else ([], b"")
        messages, state = [], b"messages"
        tools = []
        if ask["tools"]:
            pieces, state = self._text(json.dumps(ask["tools"], sort_keys=True), state)
            tools = [{"hidden": pieces, "count": len(ask["tools"])}]
        for message in ask["messages"]:
            role = str(message.get("role", ""))
            said = json.dumps(
                {k: v for k, v in message.items() if k not in ("role", "content")}, sort_keys=True
            )
            content = message.get("content")
            plain = content if isinstance(content, str) else json.dumps(content or "", sort_keys=True)
            state, _ = self._next(state, role.encode())
            pieces, state = self._text(plain + (said if said != "{}" else ""), state)
            messages.append({"role": role, "hidden": pieces})
        salt = self._next(b"salt", ask["salt"].encode("utf-8", "surrogatepass"))[1] if ask["salt"] else 0
        shown = {"max_tokens": ask["max_tokens"], "seed": ask["seed"], "salt": f"{salt:08x}" if salt else ""}
        hidden = {"tokens": tokens, "messages": messages, "tools": tools, "text": ""}
        return {**hidden, **shown, **({"text": json.dumps(text)} if text else {})}, hidden_answer


_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


def _stand_in(pieces: Sequence[int]) -> str:
    """Return a text as long as the hidden one, the same for the same pieces."""
    length, parts = int(pieces[0]), []
    for number in pieces[1:]:
        letters = []
        for _ in range(CHUNK - 1):
            number, letter = divmod(number, len(_LETTERS))
            letters.append(_LETTERS[letter])
        parts.append("".join(letters) + " ")
    return "".join(parts)[:length]


def stand_in(ask: Request, words: Sequence[int]) -> Request:
    """Return a request of a hashed trace with `words`, ordinary tokens of the model, for hashes."""
    tokens = tuple(-1 - t if t < 0 else (words[t % len(words)] if words else 0) for t in ask.tokens)
    messages = tuple({"role": m["role"], "content": _stand_in(m["hidden"])} for m in ask.messages)
    # a tool message needs its call, which is hidden: send it as a user's
    messages = tuple({**m, "role": "user"} if m["role"] == "tool" else m for m in messages)
    tools: tuple[dict[str, Any], ...] = ()
    if ask.tools:
        about = {"name": "tool", "description": _stand_in(ask.tools[0]["hidden"])}
        tools = ({"type": "function", "function": {**about, "parameters": {"type": "object"}}},)
    text = _stand_in(json.loads(ask.text)) if ask.text else ""
    return Request(ask.max_tokens, tokens, messages, tools, text, ask.seed, ask.salt)
