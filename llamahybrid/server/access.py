"""Viewers: access rights on the page at /cache.

| conversations | shape | text |
|---|---|---|
| without a salt | every viewer | the operator |
| of a salt | the operator, under a short digest of the salt | no viewer |
| of a key as a salt (`salt_by_key`) | the operator, and the key's holder | the key's holder |
"""

from __future__ import annotations

from dataclasses import dataclass

from llamahybrid.client.salt import digest
from llamahybrid.memory.fingerprint import salt_tag
from llamahybrid.prompt_cache.base import HERE_ONLY
from llamahybrid.server.keys import ApiKeys, salt_of
from llamahybrid.server.settings import ServerSettings

DIGEST_LETTERS = 6
"""Letters of a salt's digest, 6 bits each: enough to distinguish tenants."""


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
