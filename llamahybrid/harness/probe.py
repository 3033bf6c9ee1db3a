"""`llamahybrid probe MODEL`: every scenario on stock and on ours, side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from llamahybrid.harness.ab_test import WORKLOADS, Comparer, Comparison
from llamahybrid.harness.tables import comparison_table, five_turn_table, followup_line, machine
from llamahybrid.harness.workloads.tokens import Workload, five_turns, long_prompt, long_then_followup


def chosen(names: Sequence[str], template: bool) -> list[Workload]:
    """The scenarios called `names`; with no names, all that suit the model but the very long prompt.

    Raises:
        ValueError: if a name is unknown or its scenario needs a chat template the model does not have.
    """
    if not names:
        return [w for w in WORKLOADS.values() if (template or not w.template) and w.start is not long_prompt]
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        raise ValueError(f"no scenario called {', '.join(unknown)}; there are: {', '.join(WORKLOADS)}")
    workloads = [WORKLOADS[name] for name in names]
    if not template and any(w.template for w in workloads):
        raise ValueError("this model has no chat template; choose scenarios without 'chat:'")
    return workloads


def probe(
    model: Path,
    scenarios: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    *,
    as_json: bool = False,
    console: Console | None = None,
) -> list[Comparison]:
    """Run scenarios on `model` and print them as tables, or as one JSON document.

    `options` go to both `Llama` constructors (n_gpu_layers, n_threads, ...).
    """
    console = console or Console()
    status = Console(stderr=True).status("loading")
    comparer = Comparer(model, options or {}, status.update)
    with status:
        done = [comparer.run(workload) for workload in chosen(scenarios, comparer.has_template())]
    if as_json:
        console.print_json(json.dumps({"machine": machine(), "scenarios": [c.as_json() for c in done]}))
        return done
    console.print(comparison_table(done, f"{model.name}: tokens decoded after the first request"))
    for comparison in done:
        if comparison.workload.start is five_turns:
            console.print(five_turn_table(comparison))
        if comparison.workload.start is long_then_followup:
            console.print(followup_line(comparison))
    console.print(machine(), style="dim")
    return done
