"""Tokens that several clients at once make a `Llama` decode, over the least possible, by native counters.

Each client plays the same kind of conversation with words of its own (or the very same ones, `same`), all
on one `Llama(n_parallel=4)`. The least is counted as if each request came when it was sent.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamahybrid import Llama
from llamahybrid.harness.conversation import Answer, Request
from llamahybrid.harness.counters import DecodeCounter
from llamahybrid.harness.oracle import least_decodes
from llamahybrid.harness.workloads.speech import Speech
from llamahybrid.harness.workloads.tokens import Workload
from tests.lab.costs import decide_by
from tests.lab.in_process import Record, heard, played, send

CLIENTS = 4


@dataclass
class Asked:
    """A request as its client saw it."""

    client: int
    number: int
    sent: float
    record: Record


@dataclass(frozen=True)
class Crowd:
    """The requests of all clients, in the order of sending, and the tokens decoded for them."""

    asked: Sequence[Asked]
    decoded: int
    measured_from: int

    @property
    def least(self) -> list[int]:
        """Least tokens of each request."""
        return least_decodes([each.record for each in self.asked])

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
            report, record = each.record.report, each.record
            assert report is not None
            took = report.left + max(0, len(record.generated) - 1)
            lines.append(
                f"client {each.client}, request {each.number}: total {len(record.prompt)}, least {least}, "
                f"took {took}, {report.reason}"
            )
        return "\n".join([*lines, f"decoded {self.decoded}, least {sum(self.least)}"])


def play(
    model: Path, workload: Workload, *, clients: int = CLIENTS, same: bool = False, **options: Any
) -> Crowd:
    """All clients at once on a fresh `Llama` with as many slots; costs are those of a real model."""
    options = {"n_threads": 1, "n_threads_batch": 1, "verbose": False, **options}
    options = {"n_ctx": clients * workload.n_ctx, **options}
    with closing(Llama(model_path=str(model), n_parallel=clients, **options)) as llm, heard(llm) as calls:
        decide_by(llm)
        counter = DecodeCounter(llm)

        def text(tokens: Sequence[int]) -> str:
            return str(llm.detokenize(list(tokens)).decode("utf-8", errors="ignore"))

        def ask(request: Request) -> tuple[tuple[float, Record], Answer]:
            send(llm, request)
            mine = [call for call in calls if call.thread == threading.get_ident()][-1]
            record = Record(mine.prompt, tuple(mine.generated), report=llm.last_request)
            return (mine.sent, record), Answer(record.generated, text)

        def client(i: int) -> list[Asked]:
            speech = Speech(llm, seed=0 if same else i, marked=workload.marked)
            told = enumerate(played(workload.start(speech), ask))
            return [Asked(i, number, *each) for number, each in told]

        with ThreadPoolExecutor(clients) as pool:
            asked = [each for one in pool.map(client, range(clients)) for each in one]
        return Crowd(sorted(asked, key=lambda a: a.sent), counter.take(), workload.measured_from)
