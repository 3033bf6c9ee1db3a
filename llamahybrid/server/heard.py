"""Heard: the tokens of an answer, whatever tells of it, and the stop sequence that ended it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from llamahybrid.client.extras import asking, current_extras
from llamahybrid.llama import Llama


class Heard:
    """The tokens of one answer, where stop sequences may end it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._tokens: list[int] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear the completion that is made inside the block, wherever it is advanced later."""
        if not self._stops:
            yield
            return
        with asking(replace(current_extras(), on_token=lambda _, token: self._tokens.append(token))):
            yield

    def stop_sequence(self, llm: Llama) -> str | None:
        """The one that the answer ended with; None: the model ended it."""
        text = llm.detokenize(self._tokens, special=True)
        return next((stop for stop in self._stops if stop.encode("utf-8") in text), None)
