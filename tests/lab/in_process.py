"""Conversations on a `Llama` of this process: tokens decoded by native counters, and reports.

`llamahybrid.harness` does the same for targets in other processes. The clients of a crowd play the same kind
of conversation at once, with words of their own (or the very same ones, `same`), on one `Llama`; the least
is counted as if each request came when it was sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import llama_cpp

from llamahybrid import Llama
from llamahybrid.core.report import RequestReport
from llamahybrid.harness.conversation import Answer, Conversation, Request
from llamahybrid.harness.counters import DecodeCounter
from llamahybrid.harness.oracle import Exchange, least_decodes
from llamahybrid.harness.workloads.chats import CHAT_WORKLOADS
from llamahybrid.harness.workloads.multi_user import CROWDS
from llamahybrid.harness.workloads.speech import Speech
from llamahybrid.harness.workloads.tokens import TOKEN_WORKLOADS, Workload
from tests.lab.costs import decide_by

T = TypeVar("T")
WORKLOADS: Mapping[str, Workload] = {w.name: w for w in (*TOKEN_WORKLOADS, *CROWDS, *CHAT_WORKLOADS)}
ONE_THREAD: Mapping[str, Any] = {"n_threads": 1, "n_threads_batch": 1, "verbose": False}
CLIENTS = 4


class Stock(llama_cpp.Llama):  # type: ignore[misc]
    """Upstream's class on the engine that llamahybrid chose; `llamahybrid.install` leaves it alone."""

    llamahybrid_install = False


@dataclass(frozen=True)
class Record(Exchange):
    """A measured request."""

    decoded: int = 0
    """Tokens decoded natively, prompt and answer."""
    usage_cached: int | None = None
    """`usage.prompt_tokens_details.cached_tokens` of a completion."""
    report: RequestReport | None = None
    """`llm.last_request` of llamahybrid."""
    sent: float = 0.0
    """When it was, by `time.perf_counter`."""
    thread: int = 0

    @property
    def cached(self) -> int:
        """Prompt tokens that were not decoded, by the native counters."""
        return len(self.prompt) - (self.decoded - max(0, len(self.generated) - 1))


def oracle_ratio(records: Sequence[Record], first: int = 0) -> float:
    """Tokens decoded over the least possible, from request number `first` on."""
    least = sum(least_decodes(records)[first:])
    return sum(record.decoded for record in records[first:]) / least


@contextmanager
def heard(llm: llama_cpp.Llama, counter: DecodeCounter | None = None) -> Iterator[list[Record]]:
    """Record the calls of `llm.generate` that end inside the block, with the tokens that `counter` tells."""
    records, generate = list[Record](), llm.generate

    def noting(tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Any, None]:
        sent, said = time.perf_counter(), list[int]()
        try:
            for token in generate(tokens, *args, **kwargs):
                said.append(int(token))
                yield token
        finally:
            decoded = counter.take() if counter is not None else 0
            records.append(
                Record(tuple(tokens), tuple(said), decoded, sent=sent, thread=threading.get_ident())
            )

    llm.generate = noting
    try:
        yield records
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
    with closing(llm.generate(list(request.tokens), temp=temperature)) as stream:
        for _ in islice(stream, request.max_tokens):
            pass
    return {}


def ask(llm: llama_cpp.Llama, request: Request, records: Sequence[Record]) -> tuple[Record, Answer]:
    """Send one request; `records`: what is heard of `llm`."""

    def text(tokens: Sequence[int]) -> str:
        return str(llm.detokenize(list(tokens)).decode("utf-8", errors="ignore"))

    cached = send(llm, request).get("prompt_tokens_details", {}).get("cached_tokens")
    mine = [record for record in records if record.thread == threading.get_ident()][-1]
    record = replace(mine, usage_cached=cached, report=getattr(llm, "last_request", None))
    return record, Answer(record.generated, text)


def converse(llm: llama_cpp.Llama, conversation: Conversation) -> list[Record]:
    """Run a conversation to its end."""
    with heard(llm, DecodeCounter(llm)) as records:
        return list(played(conversation, lambda request: ask(llm, request, records)))


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
    """The records of a workload on one implementation, in the order of sending."""

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

    def account(self) -> str:
        """A line for each request."""
        pairs = zip(self.records, least_decodes(self.records), strict=True)
        return "\n".join(
            f"total {len(r.prompt)}, least {least}, decoded {r.decoded}, cached {r.cached}: {r.report}"
            for r, least in pairs
        )


def side(model: Path, llama: Callable[..., llama_cpp.Llama], workload: Workload, **options: Any) -> Side:
    """Run `workload` on a fresh object made by `llama`, with one thread."""
    options = {**ONE_THREAD, **options, "n_ctx": workload.n_ctx}
    with closing(llama(model_path=str(model), **options)) as llm:
        speech = Speech(llm, marked=workload.marked)
        return Side(converse(llm, workload.start(speech)), workload.measured_from)


@dataclass(frozen=True)
class Crowd(Side):
    """The requests of all clients, whose tokens are counted together."""

    numbers: Sequence[int] = ()
    """Number of each request within its client's conversation."""
    counted: int = 0
    """Tokens decoded for all of them."""

    @property
    def ratio(self) -> float:
        """Decoded over least; the first requests of each client count as nothing but what they need."""
        least = least_decodes(self.records)
        cold = sum(n for n, number in zip(least, self.numbers, strict=True) if number < self.measured_from)
        return (self.counted - cold) / (sum(least) - cold)


def crowd(model: Path, workload: Workload, *, same: bool = False, **options: Any) -> Crowd:
    """All clients at once on a fresh `Llama` with as many slots; costs are those of a real model."""
    options = {**ONE_THREAD, "n_ctx": CLIENTS * workload.n_ctx, **options}
    with closing(Llama(model_path=str(model), n_parallel=CLIENTS, **options)) as llm, heard(llm) as records:
        decide_by(llm)
        counter = DecodeCounter(llm)

        def client(i: int) -> list[tuple[int, Record]]:
            speech = Speech(llm, seed=0 if same else i, marked=workload.marked)
            return list(enumerate(played(workload.start(speech), lambda r: ask(llm, r, records))))

        with ThreadPoolExecutor(CLIENTS) as pool:
            asked = [each for one in pool.map(client, range(CLIENTS)) for each in one]
        numbers, told = zip(*sorted(asked, key=lambda each: each[1].sent), strict=True)
        return Crowd(told, workload.measured_from, numbers, counter.take())
