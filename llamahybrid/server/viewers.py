"""Viewers: what the page at /cache shows to whom.

Conversations without a salt are everybody's who has a key: their shape is shown, their text to the operator
alone. Those of a salt are shown to the operator by the salt's short digest, without text. Where keys are
salts, each key's own conversations are shown to its holder, with text, and nobody else's.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamahybrid.client.salt import digest
from llamahybrid.memory.fingerprint import salt_tag
from llamahybrid.prompt_cache.base import HERE_ONLY
from llamahybrid.server.keys import ApiKeys, salt_of
from llamahybrid.server.settings import ServerSettings

DIGEST_LETTERS = 6
"""Of a salt, 6 bits each: enough to tell tenants apart."""


@dataclass(frozen=True)
class Viewer:
    """Somebody who looks at the page."""

    operator: bool = False
    own: str = ""
    """The tag of the salt that the viewer's key is; empty where keys are no salts."""

    def sees(self, tag: str) -> bool:
        """Conversations of a salt are shown, by its tag; empty: without a salt."""
        return self.operator or tag in ("", self.own)

    def reads(self, tag: str) -> bool:
        """Their text may be shown, too."""
        return tag == self.own if tag else self.operator

    def name(self, tag: str) -> str:
        """What a tenant is called."""
        return "you" if tag and tag == self.own else tag[:DIGEST_LETTERS]


class Viewers:
    """Tells who looks."""

    def __init__(self, settings: ServerSettings) -> None:
        """Raises as `ServerSettings.keys`."""
        keys = set(settings.keys())
        self._open = settings.open_page and not keys
        named = settings.operator_key
        operators = keys if named is None else {named.get_secret_value()}
        self._operator = ApiKeys(operators) if len(operators) == 1 else None
        self._salted = settings.salt_by_key

    def of(self, key: str | None) -> Viewer:
        """Who has an API key that was let in."""
        operator = self._open if self._operator is None else self._operator.admit(key)
        return Viewer(operator, salt_tag(digest(salt_of(key))) if self._salted else "")


def tag_of(namespace: str) -> str:
    """The tag of the salt that a namespace is of; empty without one."""
    return namespace.partition("+")[2].removesuffix(HERE_ONLY)
