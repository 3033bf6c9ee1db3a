"""Conversations on a `Llama` of this process: tokens decoded by native counters, reports, times.

`llamahybrid.harness` does the same for targets in other processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import llama_cpp

from llamahybrid.core.report import RequestReport
from llamahybrid.harness.conversation import Answer, Conversation, Request
from llamahybrid.harness.counters import DecodeCounter
from llamahybrid.harness.oracle import Exchange, least_decodes
from llamahybrid.harness.workloads.chats import CHAT_WORKLOADS
from llamahybrid.harness.workloads.multi_user import CROWDS
from llamahybrid.harness.workloads.speech import Speech
from llamahybrid.harness.workloads.tokens import TOKEN_WORKLOADS, Workload

T = TypeVar("T")
WORKLOADS: Mapping[str, Workload] = {w.name: w for w in (*TOKEN_WORKLOADS, *CROWDS, *CHAT_WORKLOADS)}


class Stock(llama_cpp.Llama):  # type: ignore[misc]
    """Upstream's class on the engine that llamahybrid chose; `llamahybrid.install` leaves it alone."""

    llamahybrid_install = False


@dataclass(frozen=True)
class Record(Exchange):
    """A measured request."""

    decoded: int = 0
    """Tokens decoded natively, prompt and answer."""
    first_token_seconds: float = 0.0
    seconds: float = 0.0
    text: str = ""
    usage_cached: int | None = None
    """`usage.prompt_tokens_details.cached_tokens` of a completion."""
    report: RequestReport | None = None
    """`llm.last_request` of llamahybrid."""

    @property
    def cached(self) -> int:
        """Prompt tokens that were not decoded, by the native counters."""
        return len(self.prompt) - (self.decoded - max(0, len(self.generated) - 1))


def oracle_ratio(records: Sequence[Record], first: int = 0) -> float:
    """Tokens decoded over the least possible, from request number `first` on."""
    least = sum(least_decodes(records)[first:])
    return sum(record.decoded for record in records[first:]) / least


@dataclass
class Heard:
    """A call of `llm.generate`."""

    prompt: tuple[int, ...]
    generated: list[int] = field(default_factory=list)
    first_token: float = 0.0
    """When it came, by `time.perf_counter`."""
    sent: float = field(default_factory=time.perf_counter)
    thread: int = field(default_factory=threading.get_ident)


@contextmanager
def heard(llm: llama_cpp.Llama) -> Iterator[list[Heard]]:
    """Note the calls of `llm.generate` inside the block."""
    calls, generate = list[Heard](), llm.generate

    def noting(tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Any, None]:
        calls.append(call := Heard(tuple(tokens)))
        for token in generate(tokens, *args, **kwargs):
            call.first_token = call.first_token or time.perf_counter()
            call.generated.append(int(token))
            yield token

    llm.generate = noting
    try:
        yield calls
    finally:
        del llm.generate


def send(llm: llama_cpp.Llama, request: Request) -> dict[str, Any]:
    """Run one request to its end; return the usage of a completion."""
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
    with heard(llm) as calls:
        usage = send(llm, request)
    seconds = time.perf_counter() - started
    (seen,) = calls
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


def converse(llm: llama_cpp.Llama, conversation: Conversation) -> list[Record]:
    """Run a conversation to its end."""
    counter = DecodeCounter(llm)
    return list(played(conversation, lambda request: ask(llm, request, counter)))


def played(conversation: Conversation, ask: Callable[[Request], tuple[T, Answer]]) -> Iterator[T]:
    """Run a conversation to its end; what `ask` returned besides each answer."""
    request = next(conversation, None)
    while request is not None:
        told, answer = ask(request)
        yield told
        try:
            request = conversation.send(answer)
        except StopIteration:
            return


@dataclass(frozen=True)
class Side:
    """The records of a workload on one implementation."""

    records: Sequence[Record]
    measured_from: int

    @property
    def measured(self) -> Sequence[Record]:
        """The requests that count."""
        return self.records[self.measured_from :]

    @cached_property
    def least(self) -> int:
        """Least tokens that the measured requests could decode."""
        return sum(least_decodes(self.records)[self.measured_from :])

    @property
    def decoded(self) -> int:
        """Tokens that the measured requests decoded."""
        return sum(record.decoded for record in self.measured)

    @property
    def ratio(self) -> float:
        """Oracle ratio: decoded over least."""
        return oracle_ratio(self.records, self.measured_from)


@dataclass(frozen=True)
class Comparer:
    """Runs workloads on one model; `options` go to the constructors."""

    model: Path
    options: Mapping[str, Any] = field(default_factory=dict)

    def side(self, llama: Callable[..., llama_cpp.Llama], workload: Workload) -> Side:
        """Run `workload` on a fresh object made by `llama`."""
        options = {"verbose": False, **self.options, "n_ctx": workload.n_ctx}
        with closing(llama(model_path=str(self.model), **options)) as llm:
            speech = Speech(llm, marked=workload.marked)
            return Side(converse(llm, workload.start(speech)), workload.measured_from)
