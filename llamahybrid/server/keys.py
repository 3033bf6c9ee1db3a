"""API keys, compared in constant time, and the rights of their holders on the page at /cache.

| conversations | shape | text |
|---|---|---|
| without a salt | every viewer | the operator |
| of a salt | the operator, under a short digest of the salt | no viewer |
| of a key as a salt (`salt_by_key`) | the operator, and the key's holder | the key's holder |
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from llamahybrid.client.salt import digest
from llamahybrid.memory.fingerprint import salt_tag
from llamahybrid.prompt_cache.base import HERE_ONLY
from llamahybrid.server.settings import ServerSettings

SALT_CONTEXT = b"llamahybrid cache_salt of an API key\0"

DIGEST_LETTERS = 6
"""Letters of a salt's digest, 6 bits each: enough to distinguish tenants."""


class ApiKeys:
    """The API keys of a server; without any, all requests are admitted."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def admit(self, key: str | None) -> bool:
        """Return True for a valid key. Every key is compared in full, so that the time reveals nothing."""
        given = _digest(key or "")
        found = False
        for each in self._digests:
            found |= hmac.compare_digest(each, given)
        return found or not self._digests


def key_of(headers: Mapping[str, str]) -> str | None:
    """Return the key of a request, as llama-server: `Authorization: Bearer`, or `X-Api-Key`."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and credentials.strip():
        return _sent(credentials.strip())
    key = headers.get("x-api-key")
    return key and _sent(key)


def _sent(key: str) -> str:
    """Return a key whose bytes are UTF-8, as curl's, as that text; headers are read as Latin-1."""
    try:
        return key.encode("latin-1").decode("utf-8")
    except ValueError:
        return key


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


@dataclass(frozen=True)
class Viewer:
    """A viewer of the page."""

    operator: bool = False
    own: str = ""
    """The tag of the viewer's key as a salt; empty without `salt_by_key`."""

    def sees(self, tag: str) -> bool:
        """Return True for a tag whose conversations this viewer may see; empty: those without a salt."""
        return self.operator or tag in ("", self.own)

    def reads(self, tag: str) -> bool:
        """Return True for a tag whose texts this viewer may see."""
        return tag == self.own if tag else self.operator

    def name(self, tag: str) -> str:
        """Return the displayed name of a tenant."""
        return "you" if tag and tag == self.own else tag[:DIGEST_LETTERS]


class Viewers:
    """Finds the viewer of a request."""

    def __init__(self, settings: ServerSettings) -> None:
        """Raises as `ServerSettings.keys`."""
        keys = set(settings.keys())
        self._open = settings.open_page and not keys
        named = settings.operator_key
        operators = keys if named is None else {named.get_secret_value()}
        self._operator = ApiKeys(operators) if len(operators) == 1 else None
        self._salted = settings.salt_by_key

    def of(self, key: str | None) -> Viewer:
        """Return the viewer with a valid API key."""
        operator = self._open if self._operator is None else self._operator.admit(key)
        return Viewer(operator, salt_tag(digest(salt_of(key))) if self._salted else "")


def tag_of(namespace: str) -> str:
    """Return the tag of the salt of a namespace; empty without a salt."""
    return namespace.partition("+")[2].removesuffix(HERE_ONLY)
