"""Fixed costs of decoding and saving, so that what is counted does not hang on the machine's speed.

On a stalled machine a first snapshot takes a hundred times as long; checkpoints would then lie farther apart.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from llamahybrid import Llama
from llamahybrid.memory.costs import CostMeter
from llamahybrid.prompt_cache.base import Costs

REAL = Costs(token_seconds=10e-3, prefill_seconds=3e-3, snapshot_seconds=1e-3, restore_seconds=1e-3)
"""Costs in the proportions of a real model. A tiny one decodes a token in the time of a snapshot, and then
checkpoints within an answer come as rarely as the schedule allows."""

DEAR = Costs(token_seconds=1e-3, prefill_seconds=0.3e-3, snapshot_seconds=2e-3, restore_seconds=1e-3)
"""Costs in the proportions of a tiny model."""

TINY = Costs(
    token_seconds=0.25e-3,
    prefill_seconds=0.1e-3,
    snapshot_seconds=0.25e-3,
    restore_seconds=0.2e-3,
    segment_seconds=1e-6,
    batch_seconds=0.4e-3,
)
"""Costs of tiny models on one core."""

READ_SECONDS = 1e-6
"""A token of reading a whole sequence of such a model."""

MEASURED = {name: vars(CostMeter)[name] for name in ("costs", "read_seconds")}
"""What a meter says by itself."""


def _steady(meter: CostMeter) -> Costs:
    found: Costs = MEASURED["costs"](meter)
    times = [field.name for field in fields(Costs) if field.name.endswith("_seconds")]
    return replace(found, **{name: getattr(TINY, name) for name in times if getattr(found, name)})


def _steady_read(meter: CostMeter) -> float:
    return READ_SECONDS if MEASURED["read_seconds"].fget(meter) else 0.0


STEADY = {"costs": _steady, "read_seconds": property(_steady_read)}
"""The same with `TINY` costs and `READ_SECONDS` for each that was measured."""


class _Told(CostMeter):
    """Says `costs` as soon as something was measured, so that counts do not depend on the machine's speed."""

    def __init__(self, batch_tokens: int, costs: Costs) -> None:
        super().__init__(batch_tokens)
        self._real = costs

    @property
    def read_seconds(self) -> float:
        """Of a real model, whose cells are some KB a token."""
        return 5e-6

    def costs(self) -> Costs:
        """The given ones, with this context's own sizes."""
        measured = super().costs()
        if not (measured.token_seconds and measured.prefill_seconds):
            return measured
        return replace(self._real, snapshot_bytes=measured.snapshot_bytes, batch_tokens=measured.batch_tokens)


def decide_by(llm: Llama, costs: Costs = REAL) -> None:
    """Let all slots of `llm` decide as if decoding and saving took what `costs` says."""
    meter = _Told(llm.n_batch, costs)
    llm.requests.loop._scheduler._meter = meter  # type: ignore[union-attr]
    for slot in llm.slots.all:
        slot.runner.meter = slot.runner.checkpoints.meter = meter


def with_costs(costs: Costs = REAL, **options: Any) -> Llama:
    """A `Llama` that decides as it would if its model were a real one, or as `costs` says."""
    llm = Llama(**options)
    decide_by(llm, costs)
    return llm
