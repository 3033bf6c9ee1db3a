"""The things a task of the decode loop can wait for: decoded tokens, or its reader."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

from llamahybrid.capi.calls import Outputs
from llamahybrid.memory.sequence import LiveSequence
from llamahybrid.prompt_cache.base import Tokens

T = TypeVar("T")


class Decode:
    """Tokens to be appended to one live sequence; the loop answers with how many of them it decoded."""

    __slots__ = ("alone", "count", "live", "outputs", "position", "prompt", "step", "tokens")

    def __init__(
        self,
        live: LiveSequence,
        tokens: Tokens | tuple[int, ...],
        outputs: Outputs,
        *,
        prompt: bool = False,
        alone: bool = False,
    ) -> None:
        """`tokens`: shape (k,), k >= 1; `outputs`: rows of logits wanted once all of them are decoded.

        `prompt`: part of a prompt: may be decoded in several batches, and stopped inside one. `alone`: not in
        a batch with tokens of other sequences.
        """
        self.live = live
        self.tokens = tokens
        self.outputs = outputs
        self.prompt = prompt
        self.alone = alone
        self.position = live.state.n
        """Tokens there were when it was asked for."""
        self.count = len(tokens)
        """Number of its first tokens that the next batch holds."""
        self.step = not prompt and self.count == 1
        """A step of an answer: a single token of it."""

    @property
    def part(self) -> tuple[LiveSequence, Tokens | tuple[int, ...], Outputs]:
        """The sequence, the first `count` tokens, and the rows that a batch with them has to have."""
        whole = self.count == len(self.tokens)
        tokens = self.tokens if whole else self.tokens[: self.count]
        return self.live, tokens, self.outputs if whole or self.outputs == "all" else "none"


class Reader:
    """The task waits until its reader asks for more."""


READER = Reader()

Wanted: TypeAlias = Decode | Reader

Steps: TypeAlias = Generator[Wanted, int, T]
"""A task as a generator: yields what it waits for, returns its result."""
