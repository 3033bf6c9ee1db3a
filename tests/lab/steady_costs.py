"""Fixed costs of decoding and saving for tests that count tokens.

On a stalled machine a first snapshot takes a hundred times as long; checkpoints would then lie farther apart.
"""

from __future__ import annotations

from dataclasses import fields, replace

from llamahybrid.memory.costs import CostMeter
from llamahybrid.prompt_cache.base import Costs

TINY = Costs(
    token_seconds=0.25e-3,
    prefill_seconds=0.1e-3,
    snapshot_seconds=0.25e-3,
    restore_seconds=0.2e-3,
    segment_seconds=1e-6,
    batch_seconds=0.4e-3,
)
"""Costs of tiny models on one core."""

measured = CostMeter.costs
"""The meter's own costs."""


def steady(meter: CostMeter) -> Costs:
    """`CostMeter.costs`, with `TINY` for each that was measured."""
    found = measured(meter)
    times = [field.name for field in fields(Costs) if field.name.endswith("_seconds")]
    return replace(found, **{name: getattr(TINY, name) for name in times if getattr(found, name)})
