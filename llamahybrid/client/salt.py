"""The salt of a request: only requests of the same salt share state.

Only a digest of fixed length is kept, which cannot be reversed: it is part of the names of stored states
(`Identity.namespace`) and of their seals. A reader of a disk cache's folder can still try out salts, and
reads the tokens there. So a secret salt is long and random, as vLLM requires of its `cache_salt`.
"""

from __future__ import annotations

import hashlib
from typing import Any

SALT_BYTES = 16

SHARED = b""
"""Digest of requests without a salt: the shared default."""


def text_of(salt: Any) -> str:
    """Return a salt; empty for None. Raises TypeError unless it is a text."""
    if not isinstance(salt, str | None):
        raise TypeError(f"cache_salt is a text, not {type(salt).__name__}")
    return salt or ""


def digest(salt: Any) -> bytes:
    """Return 16 bytes for a salt; `SHARED` for an empty one. Raises TypeError unless it is a text."""
    text = text_of(salt).encode("utf-8", "surrogatepass")
    if not text:
        return SHARED
    return hashlib.blake2b(text, digest_size=SALT_BYTES, person=b"llamahybrid salt").digest()
