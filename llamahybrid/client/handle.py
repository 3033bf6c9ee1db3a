"""Handles: which requests belong together, to be cancelled and told of; and the salt that they have.

A context variable says so where a request is made. What was made keeps it, wherever it is advanced later.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Protocol

from llamahybrid.client.salt import SHARED
from llamahybrid.core.report import PromptProgress, RequestReport, sentence
from llamahybrid.core.request import Request


class Cancels(Protocol):
    """Whose requests a handle has."""

    def cancel(self, request: Request | None = None) -> None:
        """End this request."""


class RequestHandle:
    """The requests made inside `with llm.request() as handle:`, streams included; safe from any thread."""

    def __init__(self, owner: Cancels, part_of: RequestHandle | None = None, salt: bytes = SHARED) -> None:
        """`part_of`: its requests are also those of this one; `salt`: theirs (see `salt.digest`)."""
        self.on_progress: Callable[[PromptProgress], None] | None = None
        """Told of the progress of their prompts, instead of `Llama.on_progress`."""
        if part_of is not None:
            self.on_progress = part_of.on_progress
        self.salt = salt
        """Digest of the salt that its requests have."""
        self.open = False
        """Its `with` block runs."""
        self.outer: RequestHandle | None = None
        """The handle whose block it stands in."""
        self._owner = owner
        self._part_of = part_of
        self._requests: list[Request] = []
        self._cancelled = False
        self._unwanted = False

    def cancel(self) -> None:
        """Cancel these requests, running, suspended or waiting (see `Llama.cancel`)."""
        self._cancelled = True
        for request in list(self._requests):
            self._owner.cancel(request)

    def drop(self) -> None:
        """Nobody waits for what comes of them: `cancel`, and those in line raise RequestCancelled at once."""
        self._unwanted = True
        for request in list(self._requests):
            request.unwanted = True
        self.cancel()

    @property
    def reports(self) -> list[RequestReport]:
        """Reports of these requests so far, in the order of their creation."""
        return [r.progress.report() for r in self._requests if r.progress is not None]

    @property
    def reasons(self) -> list[str]:
        """How each of their prompts started (see `report.sentence`), naming no token."""
        return [sentence(r.progress.plan, None) for r in self._requests if r.progress is not None]

    def add(self, request: Request) -> None:
        """One more request."""
        self._requests.append(request)
        if self._unwanted:  # no |=: it would undo what `drop` says between its read and its write
            request.unwanted = True
        if self._cancelled:
            self._owner.cancel(request)
        if self._part_of is not None:
            self._part_of.add(request)

    def entered(self) -> RequestHandle:
        """Itself, as if its block ran from here on."""
        self.outer, self.open = _handle.get(), True
        return self

    def of(self, owner: Cancels) -> bool:
        """Its requests are those of this model."""
        return self._owner is owner


_handle: ContextVar[RequestHandle | None] = ContextVar("llamahybrid.request", default=None)


def handle_here(owner: Cancels) -> RequestHandle | None:
    """What requests of a model that are made here and now belong to: the innermost of its own."""
    handle = _handle.get()
    while handle is not None and not (handle.open and handle.of(owner)):
        handle = handle.outer
    return handle


@contextmanager
def made_with(handle: RequestHandle) -> Generator[RequestHandle, None, None]:
    """Requests made in this context belong to `handle`."""
    try:
        _handle.set(handle.entered())
        yield handle
    finally:
        handle.open = False
        if _handle.get() is handle:  # a generator may leave in another context, or after others came
            _handle.set(handle.outer)


@contextmanager
def belonging_to(handle: RequestHandle) -> Generator[None, None, None]:
    """Requests made by the body belong to a handle that is open elsewhere."""
    around = _handle.get()
    try:
        _handle.set(handle)
        yield
    finally:
        _handle.set(around)


def advanced_for(handle: RequestHandle, made: Iterator[Any]) -> Generator[Any, None, None]:
    """A stream; requests that are made only while it is advanced belong to a handle, too."""
    try:
        while True:
            with belonging_to(handle):
                chunk = next(made, handle)
            if chunk is handle:
                return
            yield chunk
    finally:
        if isinstance(made, Generator):
            made.close()


def takes_salt(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of `Llama` that makes a request, and `cache_salt`, as in `request(cache_salt)`."""

    @wraps(method)
    def salted(llm: Any, *args: Any, cache_salt: str | None = None, **kwargs: Any) -> Any:
        if cache_salt is None:
            return method(llm, *args, **kwargs)
        with llm.request(cache_salt):
            return method(llm, *args, **kwargs)

    return salted
