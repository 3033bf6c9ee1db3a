"""Tenants: what separates what is cached for one user from what is cached for another."""

from __future__ import annotations

from llamahybrid.server.keys import salt_of


def salt(said: str | None, key: str | None, by_key: bool) -> str:
    """A request's salt: its own, below its key's where the operator asks for that; "": the shared one."""
    own = salt_of(key) if by_key else ""
    return "/".join(filter(None, (own, said)))
