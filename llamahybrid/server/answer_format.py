"""Answers in the form of an API: OpenAI's, as upstream makes them, or another one, made of a chat's parts."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias
from uuid import uuid4

from llamahybrid.core.report import PromptProgress
from llamahybrid.llama import Llama
from llamahybrid.server.errors import Refusal
from llamahybrid.server.job import Chunk, Create
from llamahybrid.server.request_fields import Route
from llamahybrid.server.usage import prompt_progress, reports_so_far

Events: TypeAlias = Generator[Chunk, None, None]

_encode = json.JSONEncoder(default=float).encode


def event(data: Chunk) -> bytes:
    """Encode a server-sent event; its type is that of the data, if they have one."""
    kind = b"event: " + data["type"].encode() + b"\n" if "type" in data else b""
    return kind + b"data: " + _encode(data).encode() + b"\n\n"


class AnswerFormat:
    """The answer to one request in OpenAI's form; made in the request's thread."""

    silence = b": ping\n\n"
    """A comment, which keeps proxies from closing a silent stream."""
    end = b"data: [DONE]\n\n"
    """End of a stream."""

    def __init__(self, llm: Llama, asked: Any, alias: str) -> None:
        """`asked`: the request. `alias`: the name of the model in the answer."""
        self.llm = llm
        self.asked = asked
        self.alias = alias
        kind = "chatcmpl" if asked.route is Route.CHAT else "cmpl"
        self._same = {"id": f"{kind}-{uuid4()}", "created": int(time.time())}

    def make(self, create: Create, stream: bool) -> Chunk | Events:
        """Return the answer, or the events of a stream; `create` makes a completion or its chunks."""
        made: Chunk | Events = create(stream=stream)
        return self._renamed(made) if isinstance(made, Generator) and self.asked.return_progress else made

    def progress(self, progress: PromptProgress) -> Chunk:
        """Return a chunk with the progress of the prompt."""
        chat = self.asked.route is Route.CHAT
        said: Chunk = {"delta": {"role": "assistant", "content": None}} if chat else {"text": ""}
        return {
            **self._same,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "model": self.alias,
            "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": None}],
            "prompt_progress": prompt_progress(progress),
        }

    def _renamed(self, chunks: Events) -> Events:
        """Yield chunks with the id of those with the progress."""
        with closing(chunks):
            for chunk in chunks:
                yield {**chunk, **self._same}

    @staticmethod
    def failed(refused: Refusal) -> bytes:
        """Return an error as an event of a stream."""
        return event(refused.body)


class EventFormat(AnswerFormat, ABC):
    """The answer to one chat in the form of another API, which has events of its own."""

    def make(self, create: Create, stream: bool) -> Chunk | Events:
        """See `AnswerFormat.make`."""
        made = create(stream=stream)
        events = self.events(made if stream else _as_chunks(made))
        return events if stream else self.whole(list(events))

    @abstractmethod
    def events(self, chunks: Events) -> Events:
        """Yield the events of the chunks of a chat."""

    @abstractmethod
    def whole(self, events: list[Chunk]) -> Chunk:
        """Return the answer that these events are of."""

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
