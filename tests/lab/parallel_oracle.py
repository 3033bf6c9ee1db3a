"""Tokens that several clients at once make a `Llama` decode, over the least possible, by native counters.

Each client plays the same kind of conversation with words of its own (or the very same ones, `same`), all
on one `Llama(n_parallel=4)`. The least is counted as if each request came when it was sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamahybrid import Llama
from llamahybrid.core.report import RequestReport
from llamahybrid.harness.conversation import Answer, Request
from llamahybrid.harness.counters import DecodeCounter
from llamahybrid.harness.oracle import least_decodes
from llamahybrid.harness.workloads.speech import Speech
from llamahybrid.harness.workloads.tokens import Workload
from tests.lab.in_process import Record, send
from tests.lab.real_costs import decide_by

CLIENTS = 4


@dataclass
class Asked:
    """A request as its client saw it."""

    client: int
    number: int
    sent: float
    prompt: tuple[int, ...] = ()
    generated: list[int] = field(default_factory=list)
    report: RequestReport | None = None


@dataclass(frozen=True)
class Crowd:
    """The requests of all clients, in the order of sending, and the tokens decoded for them."""

    asked: Sequence[Asked]
    decoded: int
    measured_from: int

    @property
    def least(self) -> list[int]:
        """Least tokens of each request."""
        return least_decodes([_record(each) for each in self.asked])

    @property
    def ratio(self) -> float:
        """Decoded over least; the first requests of each client count as nothing but what they need."""
        least = self.least
        pairs = zip(self.asked, least, strict=True)
        cold = sum(tokens for each, tokens in pairs if each.number < self.measured_from)
        return (self.decoded - cold) / (sum(least) - cold)

    def account(self) -> str:
        """Return the tokens of each request, as a table."""
        lines = []
        for each, least in zip(self.asked, self.least, strict=True):
            assert each.report is not None
            took = each.report.left + max(0, len(each.generated) - 1)
            lines.append(
                f"client {each.client}, request {each.number}: total {len(each.prompt)}, least {least}, "
                f"took {took}, {each.report.reason}"
            )
        return "\n".join([*lines, f"decoded {self.decoded}, least {sum(self.least)}"])


def _record(each: Asked) -> Record:
    return Record(each.prompt, tuple(each.generated), report=each.report)


class _Observer:
    """Notes what reaches `llm.generate`, by thread."""

    def __init__(self, llm: Any) -> None:
        self._generate, self.of = llm.generate, threading.local()
        llm.generate = self._watched

    def _watched(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Any, None]:
        seen: Asked = self.of.asked
        seen.prompt = tuple(tokens)
        for token in self._generate(tokens, *args, **kwargs):
            seen.generated.append(int(token))
            yield token


def play(
    model: Path, workload: Workload, *, clients: int = CLIENTS, same: bool = False, **options: Any
) -> Crowd:
    """All clients at once on a fresh `Llama` with as many slots; costs are those of a real model."""
    options = {"n_threads": 1, "n_threads_batch": 1, "verbose": False, **options}
    options = {"n_ctx": clients * workload.n_ctx, **options}
    asked: list[Asked] = []
    with closing(Llama(model_path=str(model), n_parallel=clients, **options)) as llm:
        decide_by(llm)
        observer, counter = _Observer(llm), DecodeCounter(llm)

        def text(tokens: Sequence[int]) -> str:
            return str(llm.detokenize(list(tokens)).decode("utf-8", errors="ignore"))

        def client(i: int) -> None:
            speech = Speech(llm, seed=0 if same else i, marked=workload.marked)
            conversation = workload.start(speech)
            request: Request | None = next(conversation, None)
            number = 0
            while request is not None:
                observer.of.asked = each = Asked(i, number, time.monotonic())
                asked.append(each)
                send(llm, request)
                each.report, number = llm.last_request, number + 1
                try:
                    request = conversation.send(Answer(tuple(each.generated), text))
                except StopIteration:
                    request = None

        with ThreadPoolExecutor(clients) as pool:
            for each in [pool.submit(client, i) for i in range(clients)]:
                each.result()
        return Crowd(sorted(asked, key=lambda a: a.sent), counter.take(), workload.measured_from)
