"""Handles: groups of requests, to be cancelled and reported together, and their salt.

A context variable holds the handle for new requests. A request keeps its handle in any later context.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

from llamahybrid.client.salt import SHARED
from llamahybrid.core.report import PromptProgress, RequestReport, sentence
from llamahybrid.core.request import Request

Result = TypeVar("Result")


class RequestHandle:
    """The requests made inside `with llm.request() as handle:`, streams included; safe from any thread."""

    def __init__(self, owner: Any, part_of: RequestHandle | None = None, salt: bytes = SHARED) -> None:
        """`owner`: the `Requests` of a model; `part_of`: a handle that gets the requests, too.

        `salt`: digest of their salt (see `salt.digest`).
        """
        self.on_progress: Callable[[PromptProgress], None] | None = None
        """Called with the progress of prompts, instead of `Llama.on_progress`."""
        if part_of is not None:
            self.on_progress = part_of.on_progress
        self.salt = salt
        """Digest of the salt of its requests."""
        self.open = False
        """Its `with` block runs."""
        self.outer: RequestHandle | None = None
        """The handle of the enclosing block."""
        self._owner = owner
        self._part_of = part_of
        self._requests: list[Request] = []
        self.cancelled = False
        """Its requests were told to end."""

    def cancel(self) -> None:
        """Cancel these requests, running, suspended or waiting (see `Llama.cancel`)."""
        self.cancelled = True
        for request in list(self._requests):
            self._owner.cancel(request)

    @property
    def reports(self) -> list[RequestReport]:
        """Reports of these requests so far, in the order of their creation."""
        return [r.progress.report() for r in self._requests if r.progress is not None]

    @property
    def reasons(self) -> list[str]:
        """The start of each prompt, in words without tokens (see `report.sentence`)."""
        return [sentence(r.progress.plan, None) for r in self._requests if r.progress is not None]

    def add(self, request: Request) -> None:
        """Add a request."""
        self._requests.append(request)
        if self.cancelled:
            self._owner.cancel(request)
        if self._part_of is not None:
            self._part_of.add(request)

    def run(self, work: Callable[..., Result], *args: Any) -> Result:
        """Run `work(*args)`, whose requests belong to this handle, open elsewhere."""
        around = _handle.get()
        try:
            _handle.set(self)
            return work(*args)
        finally:
            _handle.set(around)

    def entered(self) -> RequestHandle:
        """Return the handle, as if its block began here."""
        self.outer, self.open = _handle.get(), True
        return self


_handle: ContextVar[RequestHandle | None] = ContextVar("llamahybrid.request", default=None)


def handle_here(owner: Any) -> RequestHandle | None:
    """Return the innermost handle of this context for requests of a model."""
    handle = _handle.get()
    while handle is not None and not (handle.open and handle._owner is owner):
        handle = handle.outer
    return handle


@contextmanager
def made_with(handle: RequestHandle) -> Generator[RequestHandle, None, None]:
    """Add requests made in this context to `handle`."""
    try:
        _handle.set(handle.entered())
        yield handle
    finally:
        handle.open = False
        if _handle.get() is handle:  # a generator may end in another context, or later than inner blocks
            _handle.set(handle.outer)


def advanced_for(handle: RequestHandle, made: Iterator[Any]) -> Generator[Any, None, None]:
    """Advance a stream; requests that are made on the way belong to a handle, too."""
    try:
        while True:
            chunk = handle.run(next, made, handle)
            if chunk is handle:
                return
            yield chunk
    finally:
        if isinstance(made, Generator):
            made.close()


def takes_salt(method: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument `cache_salt`, as of `request(cache_salt)`, to a method of `Llama`."""

    @wraps(method)
    def salted(llm: Any, *args: Any, cache_salt: str | None = None, **kwargs: Any) -> Any:
        if cache_salt is None:
            return method(llm, *args, **kwargs)
        with llm.request(cache_salt):
            return method(llm, *args, **kwargs)

    return salted
