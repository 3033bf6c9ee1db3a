"""The salt of a request: only requests of one salt share anything.

What is kept of it is a digest of fixed length, which cannot be turned back: it is part of the names that
states are stored under (`Computation.namespace`) and of what seals them. Whoever may read the folder of a
disk cache can try salts out all the same, and reads the tokens there: a salt that has to stay secret is long
and random, as vLLM asks of its `cache_salt`.
"""

from __future__ import annotations

import hashlib
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
