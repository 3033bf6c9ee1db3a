"""Tenants: what separates what is cached for one user from what is cached for another."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from llamahybrid.llama import Llama
from llamahybrid.request.handle import RequestHandle
from llamahybrid.server.errors import bad
from llamahybrid.server.keys import salt_of

MakeHandle = Callable[[], AbstractContextManager[RequestHandle]]


def salts_requests() -> bool:
    """Requests may have salts of their own."""
    return "cache_salt" in inspect.signature(Llama.request).parameters


def salt(said: str | None, key: str | None, by_key: bool) -> str:
    """A request's salt: its own, below its key's where the operator asks for that."""
    own = salt_of(key) if by_key else ""
    return "/".join(filter(None, (own, said)))


def handle_maker(llm: Llama, cache_salt: str) -> MakeHandle:
    """Makes what the requests under a salt belong to. Raises Refusal where they cannot have one."""
    if not cache_salt:
        return llm.request
    if not salts_requests():
        raise bad("cache_salt is not supported here: all requests share one cache", "cache_salt")
    make: Callable[..., AbstractContextManager[RequestHandle]] = llm.request
    return partial(make, cache_salt=cache_salt)
