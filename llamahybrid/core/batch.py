"""The things a task of the decode loop can wait for: decoded tokens, or its reader."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from llamahybrid.capi.calls import Outputs
from llamahybrid.memory.sequence import LiveSequence
from llamahybrid.prompt_cache.base import Tokens

T = TypeVar("T")


@dataclass(eq=False)
class Decode:
    """Tokens to be appended to one live sequence; the loop answers with how many of them it decoded."""

    live: LiveSequence
    tokens: Tokens | tuple[int]
    """Shape (k,), k >= 1."""
    outputs: Outputs
    """Rows of logits wanted once all of them are decoded."""
    prompt: bool = False
    """Part of a prompt: may be decoded in several batches, and stopped inside one."""
    alone: bool = False
    """Not in a batch with tokens of other sequences."""

    position: int = field(init=False)
    """Tokens there were when it was asked for."""

    def __post_init__(self) -> None:
        self.position = self.live.n

    def rows_of(self, count: int) -> Outputs:
        """The rows that a batch with the first `count` of the tokens has to have."""
        return self.outputs if count == len(self.tokens) or self.outputs == "all" else "none"


class Reader:
    """The task waits until its reader asks for more."""


READER = Reader()

Wanted: TypeAlias = Decode | Reader

Steps: TypeAlias = Generator[Wanted, int, T]
"""A task as a generator: yields what it waits for, returns its result."""
