"""Classes with a prefix cache of their own, sound or with one fault each; `class:broken.py:NAME` tests them.

The cache keeps whole states by their tokens. Each fault is one that a cache, an engine or a fork has had.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import llama_cpp
import numpy as np

Key = tuple[str, tuple[int, ...]]


def common(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Sound(llama_cpp.Llama):
    """Restores the longest stored state that is a prefix; stores at a prompt's end and at an answer's."""

    cache_salt = ""
    """Its presence tells the harness that salts are kept apart."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stored: dict[Key, bytes] = {}
        self.salt = ""
        self.last_request: Any = None

    @contextmanager
    def request(self, cache_salt: str = "") -> Iterator[None]:
        self.salt = cache_salt
        yield
        self.salt = ""

    def state(self, flags: int = 0) -> bytes:
        size = llama_cpp.llama_state_seq_get_size_ext(self._ctx.ctx, 0, flags)
        buffer = (ctypes.c_uint8 * size)()
        llama_cpp.llama_state_seq_get_data_ext(self._ctx.ctx, buffer, size, 0, flags)
        return bytes(buffer)

    def put(self, state: bytes, flags: int = 0) -> None:
        buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        assert llama_cpp.llama_state_seq_set_data_ext(self._ctx.ctx, buffer, len(state), 0, flags)

    def live(self) -> tuple[int, ...]:
        return tuple(map(int, self.input_ids[: self.n_tokens]))

    def store(self) -> None:
        self.stored[self.salt, self.live()] = self.state()

    def choose(self, prompt: tuple[int, ...]) -> Key | None:
        """The longest that is a prefix and leaves a token to decode."""
        fitting = [
            key for key in self.stored if key[0] == self.salt and common(key[1], prompt) == len(key[1])
        ]
        return max(
            (key for key in fitting if len(key[1]) < len(prompt)), key=lambda k: len(k[1]), default=None
        )

    def restore(self, prompt: tuple[int, ...], key: Key) -> int:
        """Restore a stored state; return its tokens."""
        self._ctx.kv_cache_clear()
        self.put(self.stored[key])
        return len(key[1])

    def begin(self, prompt: tuple[int, ...]) -> int:
        """Restore the known part of the prompt; return its tokens."""
        key = self.choose(prompt)
        if key is None:
            self._ctx.kv_cache_clear()
            return 0
        return self.restore(prompt, key)

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Any, None]:
        prompt = tuple(map(int, tokens))
        cached = self.begin(prompt)
        self.input_ids[:cached] = np.array(prompt[:cached], np.intc)
        self.n_tokens = cached
        self.eval(list(prompt[cached:]))
        self.last_request = SimpleNamespace(cached=cached, reason=None)
        self.store()
        try:
            while True:
                row = llama_cpp.llama_get_logits_ith(self._ctx.ctx, -1)
                token = int(np.ctypeslib.as_array(row, (self.n_vocab(),)).argmax())
                yield token
                self.eval([token])
        finally:
            self.store()


class LongerNonPrefix(Sound):
    """Takes the longest state that begins as the prompt does, whether all of it is a prefix or not."""

    def choose(self, prompt: tuple[int, ...]) -> Key | None:
        alike = [key for key in self.stored if key[0] == self.salt and common(key[1], prompt) >= 16]
        return max((key for key in alike if len(key[1]) < len(prompt)), key=lambda k: len(k[1]), default=None)


class TailStays(Sound):
    """Continues from a live prefix without cutting the tokens behind it."""

    shifted = 0
    live_salt = ""

    def begin(self, prompt: tuple[int, ...]) -> int:
        same = common(self.live(), prompt)
        if self.salt == self.live_salt and 16 <= same < min(self.n_tokens - 8, len(prompt)):
            self.shifted = self.held - same
            return same
        return super().begin(prompt)

    def eval(self, tokens: Sequence[int]) -> None:
        if not self.shifted:
            super().eval(tokens)
            return
        for token in tokens:  # decode behind the tail
            self._batch.set_batch(batch=[token], n_past=self.n_tokens + self.shifted, logits_all=False)
            self._ctx.decode(self._batch)
            self.input_ids[self.n_tokens] = token
            self.n_tokens += 1

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Any, None]:
        self.held = self.n_tokens + self.shifted  # positions that are taken
        self.shifted = 0
        yield from super().generate(tokens, *args, **kwargs)

    def store(self) -> None:
        self.live_salt = self.salt
        if not self.shifted:
            super().store()


PARTIAL = 1
"""LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: of a hybrid memory the recurrent part."""


class StalePlane(Sound):
    """Keeps a state for each token of an answer, and takes tokens back with a later one's recurrent part."""

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Any, None]:
        for token in super().generate(tokens, *args, **kwargs):
            yield token
            self.store()  # one before each token of the answer

    def restore(self, prompt: tuple[int, ...], key: Key) -> int:
        restored = super().restore(prompt, key)
        later = [
            k for k in self.stored if len(k[1]) in (restored + 1, restored + 2) and k[1][:restored] == key[1]
        ]
        if later:
            self._overlay(self.stored[max(later, key=lambda k: len(k[1]))], self.stored[key])
        return restored

    def _overlay(self, later: bytes, right: bytes) -> None:
        """The attention of one position, the recurrent state of a later one."""
        self._ctx.kv_cache_clear()
        self.put(later)
        recurrent = self.state(PARTIAL)
        self._ctx.kv_cache_clear()
        self.put(right)
        self.put(recurrent, PARTIAL)


class OthersAttention(Sound):
    """Takes live tokens of another conversation for a stored state of the same length."""

    def restore(self, prompt: tuple[int, ...], key: Key) -> int:
        length = len(key[1])
        if self.n_tokens > length and common(self.live(), prompt) < 16:
            self._ctx.kv_cache_seq_rm(0, length, -1)
            return length
        return super().restore(prompt, key)


class NeverHits(Sound):
    """Stores states and never finds one."""

    def choose(self, prompt: tuple[int, ...]) -> Key | None:
        return None


class SaltsTogether(Sound):
    """Finds states of every salt."""

    def choose(self, prompt: tuple[int, ...]) -> Key | None:
        fitting = [key for key in self.stored if common(key[1], prompt) == len(key[1]) < len(prompt)]
        return max(fitting, key=lambda k: len(k[1]), default=None)


class Grows(Sound):
    """Leaks a copy of the state in each request."""

    def store(self) -> None:
        super().store()
        leaked = self.__dict__.setdefault("leaked", [])
        leaked.append(bytearray(self.state()))


class SaysMore(Sound):
    """Reports that it reused all of each prompt."""

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Any, None]:
        for token in super().generate(tokens, *args, **kwargs):
            self.last_request = SimpleNamespace(cached=len(tokens) - 1, reason=None)
            yield token
