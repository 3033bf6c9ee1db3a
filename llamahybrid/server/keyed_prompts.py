"""Keyed prompts: requests with a `prompt_cache_key` keep their last prompt in RAM.

OpenAI routes requests of one key to one machine. Here the last prompt of each key is pinned, within a share
of the cache's RAM; the least recently used key loses its pin first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from llamahybrid.prompt_cache import PromptCache
from llamahybrid.prompt_cache.base import Tokens

SHARE = 1 / 4
"""Share of the RAM budget for pinned prompts."""

MOST_KEYS = 256


class KeyedPrompts:
    """The last prompt of each key, in one model's cache; from any thread."""

    def __init__(self, cache: PromptCache) -> None:
        self._cache = cache
        self._prompts: OrderedDict[tuple[str, str], Tokens] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, salt: str, key: str, prompt: Sequence[int]) -> None:
        """Pin the prompt of a request with this key and this salt's tag."""
        tokens = np.array(prompt, np.int32)
        with self._lock:
            before = self._prompts.pop((salt, key), None)
            if self._holds(tokens) or not self._pinned(tokens):
                self._prompts[salt, key] = tokens
                self._cache.pin(tokens)
            if before is not None:
                self._let_go(before)
            while self._prompts and (len(self._prompts) > MOST_KEYS or self._too_much()):
                self._let_go(self._prompts.popitem(last=False)[1])

    def _holds(self, tokens: Tokens) -> bool:
        return any(np.array_equal(each, tokens) for each in self._prompts.values())

    def _pinned(self, tokens: Tokens) -> bool:
        """Return True for a prompt that the operator pinned."""
        return any(np.array_equal(each, tokens) for each in self._cache.pinned)

    def _let_go(self, tokens: Tokens) -> None:
        if not self._holds(tokens):
            self._cache.unpin(tokens)

    def _too_much(self) -> bool:
        staying = self._cache.look(lambda store: store.staying())
        return staying is not None and staying > SHARE * self._cache.ram_bytes
