"""API keys: who is let in, told in a time that says nothing of the keys."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterable, Mapping

SALT_CONTEXT = b"llamahybrid cache_salt of an API key\0"


class ApiKeys:
    """The keys that open this server; none: it is open."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def admit(self, key: str | None) -> bool:
        """This key is one of them. Each is compared, in full: no time tells how much of one was right."""
        given = _digest(key or "")
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(digest, given)
        return found or not self._digests


def key_of(headers: Mapping[str, str]) -> str | None:
    """The key a request carries, as llama-server takes it: `Authorization: Bearer`, or `X-Api-Key`."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and credentials.strip():
        return credentials.strip()
    return headers.get("x-api-key")


def password_of(headers: Mapping[str, str]) -> str | None:
    """The key where a browser that asks its user for a password puts it; any user name will do."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        text = base64.b64decode(credentials.strip(), validate=True).decode("utf-8", "surrogateescape")
    except ValueError:
        return None
    return text.partition(":")[2] or None


def salt_of(key: str | None) -> str:
    """What separates what is cached for this key from what is for others; the key cannot be told from it."""
    if not key:
        return ""
    return hashlib.blake2b(SALT_CONTEXT + _bytes(key), digest_size=16).hexdigest()


def salt_of_request(said: str | None, key: str | None, by_key: bool) -> str:
    """A request's salt: its own, below its key's where the operator asks for that; "": the shared one."""
    own = salt_of(key) if by_key else ""
    return "/".join(filter(None, (own, said)))


def _digest(key: str) -> bytes:
    return hashlib.blake2b(_bytes(key), digest_size=32).digest()


def _bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")
