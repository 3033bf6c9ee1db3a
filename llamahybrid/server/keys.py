"""API keys, compared in constant time."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterable, Mapping

SALT_CONTEXT = b"llamahybrid cache_salt of an API key\0"


class ApiKeys:
    """The API keys of a server; without any, all requests are admitted."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def admit(self, key: str | None) -> bool:
        """Return True for a valid key. Every key is compared in full, so that the time reveals nothing."""
        given = _digest(key or "")
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(digest, given)
        return found or not self._digests


def key_of(headers: Mapping[str, str]) -> str | None:
    """Return the key of a request, as llama-server: `Authorization: Bearer`, or `X-Api-Key`."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and credentials.strip():
        return credentials.strip()
    return headers.get("x-api-key")


def password_of(headers: Mapping[str, str]) -> str | None:
    """Return the password that a browser asks its user for, with any user name."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        text = base64.b64decode(credentials.strip(), validate=True).decode("utf-8", "surrogateescape")
    except ValueError:
        return None
    return text.partition(":")[2] or None


def salt_of(key: str | None) -> str:
    """Return the cache salt of a key, which does not reveal the key."""
    if not key:
        return ""
    return hashlib.blake2b(SALT_CONTEXT + _bytes(key), digest_size=16).hexdigest()


def salt_of_request(said: str | None, key: str | None, by_key: bool) -> str:
    """Return the salt of a request: its own, behind its key's if `by_key`; "": no salt."""
    own = salt_of(key) if by_key else ""
    return "/".join(filter(None, (own, said)))


def _digest(key: str) -> bytes:
    return hashlib.blake2b(_bytes(key), digest_size=32).digest()


def _bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")
