"""Identify the conversation of a request before tokenization.

A body is a chain of links (messages, or pieces of a prompt). A link's name is a hash of everything before it,
of the model, the tools and the salt; requests with a common prefix have the names of its links in common.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import xxhash

from llamahybrid.prompt_cache.base import Tokens

PIECE = 512
"""Characters, or token ids, of a prompt in one link."""

SESSION_HEADER = "x-session-id"
SHARED_ROLES = ("system", "developer")

MOST_CONVERSATIONS = 256
"""Conversations that a replica reports, the latest."""


@dataclass(frozen=True)
class Link:
    """A prefix of a request that ends with a message, or a piece of the prompt."""

    name: int
    length: int
    """Characters up to its end, approximately."""
    own: bool
    """Specific to one conversation, unlike a system prompt."""


@dataclass(frozen=True)
class Hints:
    """The router's view of a request."""

    chain: tuple[Link, ...] = ()
    session: str | None = None
    """The client's name of its conversation."""

    @property
    def length(self) -> int:
        """Characters of the whole request, approximately."""
        return self.chain[-1].length if self.chain else 0


NO_HINTS = Hints()


def hints_of(headers: Mapping[str, str], raw: bytes) -> Hints:
    """Hints of a request; header names in lower case. An invalid body gives none: the server rejects it."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return NO_HINTS
    if not isinstance(body, dict):
        return NO_HINTS
    whose = [headers.get("authorization"), headers.get("x-api-key"), body.get("cache_salt")]
    asked = {key: body.get(key) for key in ("model", "tools", "functions")}
    session = headers.get(SESSION_HEADER) or body.get("prompt_cache_key")
    links = tuple(_chain(_text([whose, asked]), _pieces(body)))
    # Routers keep many, and log them: neither a long one nor the client's key goes there.
    named = _digest(_text([whose, session])) if isinstance(session, str) and session else None
    return Hints(links, named)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _chain(start: str, pieces: Iterator[tuple[str, bool]]) -> Iterator[Link]:
    name, length = xxhash.xxh3_64_intdigest(start.encode("utf-8", "surrogatepass")), 0
    for text, own in pieces:
        raw = text.encode("utf-8", "surrogatepass")
        name, length = xxhash.xxh3_64_intdigest(raw, seed=name), length + len(text)
        yield Link(name, length, own)


def _pieces(body: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    messages, prompt = body.get("messages"), body.get("prompt", body.get("input"))
    if isinstance(messages, list):
        for message in messages:
            shared = isinstance(message, dict) and message.get("role") in SHARED_ROLES
            yield _text(message), not shared
    elif isinstance(prompt, str | list):
        for at in range(0, len(prompt), PIECE):
            yield _text(prompt[at : at + PIECE]), 2 * (at + PIECE) > len(prompt)


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


class RecentPrompts:
    """The latest prompts of a replica, and how much of each it can resume; thread-safe."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[Hints, Tokens]] = OrderedDict()
        self._lock = Lock()

    def add(self, hints: Hints, prompt: Tokens) -> None:
        """Add a prompt; it replaces the earlier prompts of the same conversation."""
        if not hints.chain:
            return
        with self._lock:
            for link in hints.chain:
                self._known.pop(link.name, None)
            self._known[hints.chain[-1].name] = hints, prompt
            while len(self._known) > MOST_CONVERSATIONS:
                self._known.popitem(last=False)

    def resumable(self, depth: Callable[[Tokens], int]) -> set[int]:
        """The names of the links that can be resumed.

        `depth(prompt)`: tokens of a prompt that can be resumed. The positions of links in the prompt are
        estimated from their lengths.
        """
        with self._lock:
            known = list(self._known.values())
        found = set[int]()
        for hints, prompt in known:
            reached = hints.length * depth(prompt) / max(1, len(prompt) - 1)
            found.update(link.name for link in hints.chain if link.length <= reached)
        return found


def deepest(chain: Sequence[Link], known: Collection[int]) -> Link | None:
    """The last known link of a chain."""
    return next((link for link in reversed(chain) if link.name in known), None)
