"""Heard: the tokens of an answer, whatever tells of it, and the stop sequence that ended it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from llamahybrid.llama import Llama
from llamahybrid.request.extras import asking, current_extras


class Heard:
    """The tokens of one answer, its stop sequence included."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear the completion that is made inside the block, wherever it is advanced later."""
        with asking(replace(current_extras(), on_token=lambda _, token: self.tokens.append(token))):
            yield

    def stop_sequence(self, llm: Llama, stops: Sequence[str]) -> str | None:
        """The one of these that the answer ends with; None: the model ended it."""
        if not stops:
            return None
        text = llm.detokenize(self.tokens, special=True)
        return next((stop for stop in stops if stop.encode("utf-8") in text), None)
