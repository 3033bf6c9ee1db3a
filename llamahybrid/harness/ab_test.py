"""The same conversations on stock `llama_cpp.Llama` and on `llamahybrid.Llama`, in one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import llama_cpp

from llamahybrid.configuration import own_cache
from llamahybrid.harness.conversation import Record, converse
from llamahybrid.harness.oracle import least_decodes, oracle_ratio
from llamahybrid.harness.workloads.chats import CHAT_WORKLOADS
from llamahybrid.harness.workloads.multi_user import CROWDS
from llamahybrid.harness.workloads.speech import Speech
from llamahybrid.harness.workloads.tokens import TOKEN_WORKLOADS, Workload
from llamahybrid.llama import Llama


class Stock(llama_cpp.Llama):  # type: ignore[misc]
    """Upstream's class, on the engine that llamahybrid chose: who imports llama_cpp first gets another."""

    llamahybrid_install = False
    """`llamahybrid.install` leaves it alone."""


def _ours(**options: Any) -> Llama:
    """Ours with nothing in its cache, whatever the environment says of one for all and of a folder."""
    return Llama(**{"prompt_cache": own_cache(), **options})


WORKLOADS: Mapping[str, Workload] = {w.name: w for w in (*TOKEN_WORKLOADS, *CROWDS, *CHAT_WORKLOADS)}


@dataclass(frozen=True)
class Side:
    """One implementation's way through a workload."""

    records: Sequence[Record]
    measured_from: int

    @property
    def measured(self) -> Sequence[Record]:
        """The requests that count."""
        return self.records[self.measured_from :]

    @cached_property
    def least(self) -> int:
        """Least tokens the measured requests could decode."""
        return sum(least_decodes(self.records)[self.measured_from :])

    @property
    def decoded(self) -> int:
        """Tokens the measured requests decoded."""
        return sum(record.decoded for record in self.measured)

    @property
    def ratio(self) -> float:
        """Oracle ratio: decoded over least."""
        return oracle_ratio(self.records, self.measured_from)

    @property
    def seconds(self) -> float:
        """Wall time of the measured requests."""
        return sum(record.seconds for record in self.measured)


@dataclass(frozen=True)
class Comparison:
    """A workload on both implementations."""

    workload: Workload
    stock: Side
    ours: Side

    @property
    def texts_equal(self) -> bool:
        """Every request sampled the same tokens on both."""
        return [r.generated for r in self.stock.records] == [r.generated for r in self.ours.records]

    def as_json(self) -> dict[str, Any]:
        """Plain data: totals, and each request's tokens, counters and seconds."""
        return {
            "scenario": self.workload.name,
            "texts_equal": self.texts_equal,
            **{name: _side_json(side) for name, side in (("stock", self.stock), ("ours", self.ours))},
        }


def _side_json(side: Side) -> dict[str, Any]:
    return {
        "least": side.least,
        "decoded": side.decoded,
        "ratio": side.ratio,
        "seconds": side.seconds,
        "requests": [
            {
                "total": len(record.prompt),
                "cached": record.cached,
                "generated": len(record.generated),
                "decoded": record.decoded,
                "first_token_seconds": record.first_token_seconds,
                "seconds": record.seconds,
            }
            for record in side.records
        ],
    }


@dataclass(frozen=True)
class Comparer:
    """Runs workloads on one model; `options` go to both constructors, `progress` hears of each step."""

    model: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    progress: Callable[[str], None] | None = None

    def run(self, workload: Workload) -> Comparison:
        """Run `workload` once on each, in fresh contexts."""
        stock = self.side(Stock, workload, "stock")
        return Comparison(workload, stock, self.side(_ours, workload, "ours"))

    def side(self, llama: Callable[..., llama_cpp.Llama], workload: Workload, name: str = "") -> Side:
        """Run `workload` on a fresh object made by `llama`."""

        def told(record: Record) -> None:
            if self.progress is not None:
                self.progress(f"{workload.name}: {name}, prompt of {len(record.prompt):,} tokens done")

        options = {"verbose": False, **self.options, "n_ctx": workload.n_ctx}
        with closing(llama(model_path=str(self.model), **options)) as llm:
            speech = Speech(llm, marked=workload.marked)
            return Side(converse(llm, workload.start(speech), told), workload.measured_from)

    def has_template(self) -> bool:
        """The model brings a chat template, so that chat workloads can run."""
        with closing(llama_cpp.Llama(str(self.model), vocab_only=True, verbose=False)) as llm:
            return "tokenizer.chat_template" in llm.metadata
