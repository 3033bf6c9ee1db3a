"""Heard: the tokens of an answer, and the stop sequence that ended it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from llamahybrid.client.extras import asking, current_extras
from llamahybrid.llama import Llama


class Heard:
    """Collects the tokens of one answer, if stop sequences may end it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._tokens: list[int] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Collect the tokens of a completion that is made inside the block, even if it is consumed later."""
        if not self._stops:
            yield
            return
        with asking(replace(current_extras(), on_token=lambda _, token: self._tokens.append(token))):
            yield

    def stop_sequence(self, llm: Llama) -> str | None:
        """Return the stop sequence that ended the answer; None if the model ended it."""
        text = llm.detokenize(self._tokens, special=True)
        return next((stop for stop in self._stops if stop.encode("utf-8") in text), None)
