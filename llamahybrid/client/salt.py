"""The salt of a request: only requests of the same salt share state.

Only a digest of fixed length is kept, which cannot be reversed: it is part of the names of stored states
(`Identity.namespace`) and of their seals. A reader of a disk cache's folder can still try out salts, and
reads the tokens there. So a secret salt is long and random, as vLLM requires of its `cache_salt`.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

SALT_BYTES = 16

SHARED = b""
"""Digest of requests without a salt: the shared default."""


def digest(salt: Any) -> bytes:
    """Return 16 bytes for a salt; `SHARED` for an empty one. Raises TypeError unless it is a text."""
    if not isinstance(salt, str):
        raise TypeError(f"cache_salt is a text, not {type(salt).__name__}")
    if not salt:
        return SHARED
    text = salt.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=SALT_BYTES, person=b"llamahybrid salt").digest()


def text_of(salt: Any) -> str:
    """Return a model's salt; empty for None. Raises TypeError unless it is a text."""
    if not isinstance(salt, str | None):
        raise TypeError(f"cache_salt is a text, not {type(salt).__name__}")
    return salt or ""


def model_salt() -> Any:
    """`cache_salt` of `Llama`."""

    def get(llm: Any) -> str:
        """Name of the computation: state stored under one salt is never used under another.

        Model content, parameters, engine, and changes by llama_cpp's functions are noticed without a salt.
        Set one when you change the numbers in another way; the old one makes its state usable again.
        """
        salt: str = llm._cache_salt
        return salt

    def put(llm: Any, salt: str | None) -> None:
        salt = text_of(salt)
        if llm.requests.loop is None or llm.requests.loop.closed:
            llm._cache_salt = salt
        else:
            llm.requests.whole(partial(change, llm, salt))

    def change(llm: Any, salt: str) -> None:
        llm._cache_salt = salt
        for slot in llm.slots:
            slot.runner.computed_under(salt)

    return property(get, put)
