"""Extras: what a completion may ask for beyond the arguments of `llama_cpp.Llama.create_completion`.

A context variable hands them through upstream's chat formats, which know no further arguments. A completion
takes them when it is made, and keeps them wherever its stream is advanced later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from llamahybrid.capi.samplers import Samplers
from llamahybrid.client.thought import Thinking


@dataclass(frozen=True)
class Extras:
    """What one request asks for."""

    samplers: Samplers | None = None
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the answer, and are no part of it."""
    truncate: int | None = None
    """Only so many tokens of the prompt are used, its last ones."""
    thinking: Thinking | None = None
    """How answers think; None: nobody looks."""
    spelt: frozenset[int] = frozenset()
    """Control tokens that the text of an answer has, too."""
    prompt_only: bool = False
    """With `echo`: the answer is the prompt and its log-probabilities alone."""
    on_token: Callable[[int, int], None] | None = None
    """Called with the index of the answer and each token of it, in the thread that makes the answer."""
    index: int = 0
    """Of several answers, the index of this one."""


NO_EXTRAS = Extras()

_extras: ContextVar[Extras] = ContextVar("llamahybrid.extras", default=NO_EXTRAS)


def current_extras() -> Extras:
    """The extras of the request that is being made in this context."""
    return _extras.get()


@contextmanager
def asking(extras: Extras) -> Iterator[None]:
    """Completions that are made inside the block have these extras."""
    token = _extras.set(extras)
    try:
        yield
    finally:
        _extras.reset(token)
