"""Oracle ratios (tokens decoded over the least possible) of every workload, stock and ours, by architecture.

A tiny model decodes so fast that snapshots may only be 64 tokens apart, which shows in "mid-generation".
Run: python benchmarks/oracle_gap.py [ARCH ...]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from llamahybrid.harness.compare import WORKLOADS, Comparer, Comparison
from llamahybrid.harness.tables import machine
from llamahybrid.harness.workloads import long_prompt
from llamahybrid.tiny import make

ARCHITECTURES = ("qwen35", "jamba", "falcon-h1", "lfm2", "mamba2", "rwkv7", "gemma3", "llama")
ONE_THREAD = {"n_threads": 1, "n_threads_batch": 1}


def cell(comparison: Comparison) -> str:
    mark = "" if comparison.texts_equal else " [red]texts differ[/]"
    kept = comparison.ours.ratio <= comparison.workload.bound
    return (
        f"{comparison.stock.ratio:.2f} → [{'green' if kept else 'red'}]{comparison.ours.ratio:.3f}[/]{mark}"
    )


def main(architectures: list[str]) -> None:
    console = Console()
    table = Table("workload", *architectures, title="oracle ratio, stock → ours (follow-ups only)")
    workloads = [w for w in WORKLOADS.values() if w.start is not long_prompt]
    with tempfile.TemporaryDirectory() as folder, console.status("making models") as status:
        columns = []
        for arch in architectures:
            model = make(arch, Path(folder) / f"{arch}.gguf")
            comparer = Comparer(model, {"swa_full": False, **ONE_THREAD}, status.update)
            columns.append([cell(comparer.run(workload)) for workload in workloads])
    for workload, *cells in zip(workloads, *columns, strict=True):
        table.add_row(workload.name, *cells)
    console.print(table)
    console.print(machine(), style="dim")


if __name__ == "__main__":
    main(sys.argv[1:] or list(ARCHITECTURES))
