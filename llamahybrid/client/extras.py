"""Extras: options of a completion beyond the arguments of `llama_cpp.Llama.create_completion`.

A context variable passes them through upstream's chat formats, which take no further arguments. A completion
reads them when it is made, and keeps them in any later context. A `StandIn` takes the place of the
model where upstream's code has to do something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from llamahybrid.capi.samplers import Samplers
from llamahybrid.client.json_schema import SchemaGrammar
from llamahybrid.client.thought import Thinking


@dataclass(frozen=True)
class Extras:
    """Extra options of one request."""

    samplers: Samplers | None = None
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the answer and are not part of it."""
    truncate: int | None = None
    """Number of last tokens of the prompt to use; None: all."""
    thinking: Thinking | None = None
    """Markers and budget of thoughts; None: thoughts are not recognized."""
    schema: SchemaGrammar | None = None
    """The JSON schema of the chat, in place of the rules that upstream's chat format writes for it."""
    spelt: frozenset[int] = frozenset()
    """Control tokens that the text of an answer includes."""
    prompt_only: bool = False
    """With `echo`: the answer is the prompt and its log-probabilities alone."""
    on_token: Callable[[int, int], None] | None = None
    """Called with the index of the answer and each token of it, in the thread that makes the answer."""
    index: int = 0
    """Of several answers, the index of this one,"""
    group: Any = None
    """and the `answers.Group` that decodes them together; None: none does."""


NO_EXTRAS = Extras()

_extras: ContextVar[Extras] = ContextVar("llamahybrid.extras", default=NO_EXTRAS)


def current_extras() -> Extras:
    """Return the extras of this context."""
    return _extras.get()


@contextmanager
def asking(extras: Extras) -> Iterator[None]:
    """Give completions that are made inside the block these extras."""
    token = _extras.set(extras)
    try:
        yield
    finally:
        _extras.reset(token)


class StandIn:
    """Stands for a `Llama` in upstream's code; what a subclass does not define is the model's."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)
