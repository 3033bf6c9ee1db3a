"""Keyed prompts: what requests with a `prompt_cache_key` left behind goes from RAM after all else.

OpenAI routes requests of one key to one machine. Here the key is a hint what to keep: the last prompt of each
key is pinned, for as many of the keys that were used last as a share of the cache's RAM has room for.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from llamahybrid.prompt_cache import PromptCache
from llamahybrid.prompt_cache.base import Tokens

SHARE = 1 / 4
"""Of the budget: with more pinned, the key that was used longest ago loses its prompt."""

MOST_KEYS = 256


class KeyedPrompts:
    """The last prompt of each key, in one model's cache; from any thread."""

    def __init__(self, cache: PromptCache) -> None:
        self._cache = cache
        self._prompts: OrderedDict[tuple[str, str], Tokens] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, salt: str, key: str, prompt: Sequence[int]) -> None:
        """A request of that key, and of the salt of that tag, begins with this prompt."""
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
        """The operator has pinned it."""
        return any(np.array_equal(each, tokens) for each in self._cache.ram.pinned)

    def _let_go(self, tokens: Tokens) -> None:
        if not self._holds(tokens):
            self._cache.unpin(tokens)

    def _too_much(self) -> bool:
        staying = self._cache.ram.look(lambda store: store.staying())
        return staying is not None and staying > SHARE * self._cache.ram_bytes
