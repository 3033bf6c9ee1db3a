"""Oracle ratios: tokens decoded over the least possible, by llama.cpp's own counters, ours beside stock.

Every workload on every kind of memory, once with message starts that the vocabulary marks and once as raw
tokens; the first, cold request is left out. Sliding windows are 16 tokens, with `swa_full=False` and batches
small enough for the cache to throw cells away. Models are tiny, but costs are taken to be a real one's
(`tests.lab.costs.REAL`): they decide how near checkpoints lie.
Run: python -m benchmarks.ratios [--arch ARCH ...] [--workload NAME ...] [--no-stock] [--json FILE]
Once per engine, as LLAMAHYBRID_ENGINE says; exits with 1 where a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.progress import Progress

from benchmarks.figures import machine
from llamahybrid.engine.bindings import loaded_from, stock
from llamahybrid.harness.workloads.tokens import Workload, long_prompt, raw
from llamahybrid.tiny import make
from tests.lab.campaign import silence
from tests.lab.costs import with_costs
from tests.lab.in_process import SUBJECTS, WORKLOADS, Stock, side

ENGINE = "stock" if loaded_from() == stock() else "patched"


@dataclass(frozen=True)
class Cell:
    """A workload on a model."""

    workload: str
    arch: str
    bound: float
    ours: float
    least: int
    decoded: int
    stock: float | None
    texts_equal: bool | None

    @property
    def holds(self) -> bool:
        return self.ours <= self.bound


def measure(model: Path, subject: str, workload: Workload, with_stock: bool) -> Cell:
    options = SUBJECTS[subject].options
    ours = side(model, with_costs, workload, **options)
    stock = side(model, Stock, workload, **options) if with_stock else None
    answers = [record.generated for record in ours.records]
    return Cell(
        workload=workload.name,
        arch=subject,
        bound=workload.bound,
        ours=ours.ratio,
        least=ours.least,
        decoded=ours.decoded,
        stock=stock.ratio if stock else None,
        texts_equal=[record.generated for record in stock.records] == answers if stock else None,
    )


def chosen(names: list[str]) -> list[Workload]:
    """The workloads called `names`, all without names; those made of tokens raw as well."""
    marked = [w for w in WORKLOADS.values() if w.start is not long_prompt]
    every = marked + [raw(w) for w in marked if not w.template]
    return [w for w in every if not names or w.name in names]


def main(subjects: list[str], names: list[str], with_stock: bool, out: Path | None) -> int:
    console, cells, workloads = Console(), list[Cell](), chosen(names)
    silence()
    with tempfile.TemporaryDirectory() as folder, Progress(console=Console(stderr=True)) as progress:
        for subject in progress.track(subjects):
            how = SUBJECTS[subject]
            model = make(how.arch, Path(folder) / f"{subject}.gguf", **how.making)
            for workload in progress.track(workloads, description=subject):
                cell = measure(model, subject, workload, with_stock)
                cells.append(cell)
                console.print(
                    f"{subject}, {workload.name}: {cell.ours:.3f} (at most {cell.bound}); "
                    f"stock {cell.stock}, equal texts: {cell.texts_equal}",
                    style=None if cell.holds else "red",
                )
    missed = sum(not cell.holds for cell in cells)
    mean = fmean(c.ours for c in cells)
    console.print(f"mean of {len(cells)}: {mean:.4f}; {missed} above their bound. {machine()}", style="dim")
    if out is not None:
        made = {"made": date.today().isoformat(), "machine": machine(), "engine": ENGINE}
        lines = {**made, "cells": [asdict(c) for c in cells]}
        out.write_text(json.dumps(lines, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", nargs="+", choices=SUBJECTS, default=[*SUBJECTS])
    parser.add_argument("--workload", nargs="+", default=[])
    parser.add_argument("--no-stock", action="store_true", help="ours alone, in half the time")
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    given = parser.parse_args()
    sys.exit(main(given.arch, given.workload, not given.no_stock, given.json))
