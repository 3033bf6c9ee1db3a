"""Drive a conversation on any `Llama` and record what each request cost.

A conversation is a generator: it yields a `Request`, is sent the `Answer`, and builds the next request from
it, as a client does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias

import llama_cpp

from llamahybrid.core.report import RequestReport
from llamahybrid.harness.counters import DecodeCounter

Message: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What a client asks: either token ids or chat messages."""

    max_tokens: int
    tokens: Sequence[int] = ()
    messages: Sequence[Message] = ()
    tools: Sequence[dict[str, Any]] = ()
    seed: int | None = None
    """None: greedy; otherwise temperature 1 with this seed."""
    chat: str = ""
    """Whose conversation it is, where a workload has several."""


@dataclass(frozen=True)
class Answer:
    """What the client gets: the sampled tokens, and their text, whole or in part."""

    tokens: tuple[int, ...]
    detokenize: Callable[[Sequence[int]], str] = field(repr=False, compare=False)

    def text(self, start: int = 0, stop: int | None = None) -> str:
        """The answer's tokens [start, stop) as text."""
        return self.detokenize(self.tokens[start:stop])


Conversation: TypeAlias = Generator[Request, Answer, None]


@dataclass(frozen=True)
class Record:
    """One request as it was measured."""

    prompt: tuple[int, ...]
    generated: tuple[int, ...]
    """Sampled tokens; the last one was never decoded."""
    decoded: int
    """Tokens decoded natively, prompt and answer."""
    first_token_seconds: float
    seconds: float
    text: str
    usage_cached: int | None
    """`usage.prompt_tokens_details.cached_tokens`, where a completion reported it."""
    report: RequestReport | None
    """`llm.last_request`, where the object has one."""

    @property
    def cached(self) -> int:
        """Prompt tokens that were not decoded, by the native counters."""
        return len(self.prompt) - (self.decoded - max(0, len(self.generated) - 1))


@dataclass
class _Observed:
    prompt: tuple[int, ...] = ()
    generated: list[int] = field(default_factory=list)
    first_token: float = 0.0


@contextmanager
def _observe(llm: llama_cpp.Llama) -> Iterator[_Observed]:
    """Note prompt, sampled tokens and the first token's time of whatever reaches `llm.generate`."""
    seen = _Observed()
    generate = llm.generate

    def watched(tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Any, None]:
        seen.prompt = tuple(tokens)
        for token in generate(tokens, *args, **kwargs):
            seen.first_token = seen.first_token or time.perf_counter()
            seen.generated.append(int(token))
            yield token

    llm.generate = watched
    try:
        yield seen
    finally:
        del llm.generate


def _send(llm: llama_cpp.Llama, request: Request) -> dict[str, Any]:
    """Run one request to its end and return its usage, if the interface has one."""
    temperature = 0.0 if request.seed is None else 1.0
    if request.messages:
        completion = llm.create_chat_completion(
            messages=list(request.messages),
            tools=list(request.tools) or None,
            max_tokens=request.max_tokens,
            temperature=temperature,
            seed=request.seed,
        )
        usage: dict[str, Any] = completion["usage"]
        return usage
    if request.seed is not None:
        llm.set_seed(request.seed)
    stream = llm.generate(list(request.tokens), temp=temperature)
    for _ in islice(stream, request.max_tokens):
        pass
    stream.close()
    return {}


def ask(llm: llama_cpp.Llama, request: Request, counter: DecodeCounter) -> tuple[Record, Answer]:
    """Send one request and record it; `counter` must belong to `llm`."""

    def text(tokens: Sequence[int]) -> str:
        return str(llm.detokenize(list(tokens)).decode("utf-8", errors="ignore"))

    counter.take()
    started = time.perf_counter()
    with _observe(llm) as seen:
        usage = _send(llm, request)
    seconds = time.perf_counter() - started
    answer = Answer(tuple(seen.generated), text)
    return (
        Record(
            prompt=seen.prompt,
            generated=answer.tokens,
            decoded=counter.take(),
            first_token_seconds=seen.first_token - started,
            seconds=seconds,
            text=answer.text(),
            usage_cached=usage.get("prompt_tokens_details", {}).get("cached_tokens"),
            report=getattr(llm, "last_request", None),
        ),
        answer,
    )


def converse(
    llm: llama_cpp.Llama, conversation: Conversation, progress: Callable[[Record], None] | None = None
) -> list[Record]:
    """Run a conversation to its end; `progress` is called after every request."""
    counter = DecodeCounter(llm)
    records: list[Record] = []
    request = next(conversation, None)
    while request is not None:
        record, answer = ask(llm, request, counter)
        records.append(record)
        if progress is not None:
            progress(record)
        try:
            request = conversation.send(answer)
        except StopIteration:
            request = None
    return records
