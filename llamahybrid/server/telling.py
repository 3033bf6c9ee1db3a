"""Telling: answers in the form of another API than llama_cpp.server's, made in the request's thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from llamahybrid.llama import Llama
from llamahybrid.server.job import Chunk, Create
from llamahybrid.server.usage import reports_so_far

Events: TypeAlias = Generator[Chunk, None, None]


class Telling(ABC):
    """Makes the answer to one request."""

    def __init__(self, llm: Llama, asked: Any, alias: str) -> None:
        """`asked`: the request. `alias`: the name of the model in the answer."""
        self.llm = llm
        self.asked = asked
        self.alias = alias

    def make(self, create: Create, stream: bool) -> Chunk | Events:
        """Return the answer, or the events of a stream, of what `create` makes: a chat or its chunks."""
        made = create(stream=stream)
        events = self.events(made if stream else _as_chunks(made))
        return events if stream else self.whole(list(events))

    @abstractmethod
    def events(self, chunks: Events) -> Events:
        """Yield the events that tell the chunks of a chat."""

    @abstractmethod
    def whole(self, events: list[Chunk]) -> Chunk:
        """Return the answer that these events tell."""

    def stop_sequence(self) -> str | None:
        """Return the stop sequence of the request that ended the answer; None: none did."""
        ended = {report.stop for report in reports_so_far(self.llm) if report.stop}
        return next((stop for stop in self.asked.stops if stop in ended), None)


def _as_chunks(made: Chunk) -> Events:
    """Yield a whole chat as one chunk."""
    yield {**made, "choices": [{**choice, "delta": choice["message"]} for choice in made["choices"]]}


@dataclass
class Part:
    """A part of an answer."""

    kind: Literal["thought", "text", "call"]
    text: str = ""
    """So far; the arguments of a call."""
    call_id: str = ""
    name: str = ""


Step: TypeAlias = tuple[Literal["begin", "more", "end"], Part, str]
"""A beginning, an addition or an end of a part of an answer, and the text that is added."""


class Parts:
    """Splits an answer into thoughts, texts and calls of tools; each ends where the next one begins."""

    def __init__(self) -> None:
        self._part: Part | None = None
        self._call: int | None = None
        """Index of the call that the part is."""

    def add(self, delta: Chunk) -> Iterator[Step]:
        """Yield the steps of a delta of a chat, or of a whole message."""
        yield from self._add(None, Part("thought"), delta.get("reasoning_content"))
        yield from self._add(None, Part("text"), delta.get("content"))
        for number, call in enumerate(delta.get("tool_calls") or ()):
            function, index = call["function"], call.get("index", number)
            part = Part("call", "", call.get("id", ""), function.get("name", ""))
            yield from self._add(index, part, function.get("arguments") or "")

    def _add(self, call: int | None, part: Part, text: str | None) -> Iterator[Step]:
        """`text`: adds to this part, or to the last one if that is the same; None: there is no such part."""
        if not text and call is None:
            return
        if self._part is None or (self._part.kind, self._call) != (part.kind, call):
            yield from self.end()
            self._part, self._call = part, call
            yield "begin", part, ""
        if text:
            self._part.text += text
            yield "more", self._part, text

    def end(self) -> Iterator[Step]:
        """Yield the end of the last part."""
        if self._part is not None:
            yield "end", self._part, ""
            self._part = None
