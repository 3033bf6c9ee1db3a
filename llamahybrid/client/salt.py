"""The salt of a request: only requests of one salt share anything.

What is kept of it is a digest of fixed length, which cannot be turned back: it is part of the names that
states are stored under (`Computation.namespace`) and of what seals them. Whoever may read the folder of a
disk cache can try salts out all the same, and reads the tokens there: a salt that has to stay secret is long
and random, as vLLM asks of its `cache_salt`.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

SALT_BYTES = 16

SHARED = b""
"""Of requests without a salt: the shared default."""


def digest(salt: Any) -> bytes:
    """16 bytes that name a salt; `SHARED` for an empty one. Raises TypeError for what is no text."""
    if not isinstance(salt, str):
        raise TypeError(f"cache_salt is a text, not {type(salt).__name__}")
    if not salt:
        return SHARED
    text = salt.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=SALT_BYTES, person=b"llamahybrid salt").digest()


def text_of(salt: Any) -> str:
    """A model's salt; empty for None. Raises TypeError for what is no text."""
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
