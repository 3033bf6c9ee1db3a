"""Token hit rates of eviction policies on synthetic traces, over byte budgets from starving to ample.

Every policy runs in the same PromptCache, with the same checkpoints offered to it; only the order in which
things go differs. On small trees also the optimum that knows the future. Writes a table and a plot.
Run: python -m benchmarks.eviction [--seeds N] [--jobs N] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from llamahybrid.evaluate.tables import machine
from tests.lab.contest import MODERATE, POLICIES, SLOTS, Cell, SmallTree, cells, small_trees
from tests.lab.replay import LARGE
from tests.lab.traces import FAMILIES

matplotlib.use("Agg")
import matplotlib.pyplot as plt

POINT, OPTIMAL = 0.01, 0.9
"""How much worse a cell may be; what part of the optimum is asked for."""

OURS, RIVALS = "worth", ("LRU", "Marconi")
Rates = dict[str, list[float]]


def rates_of(case: Cell | SmallTree, seeds: Sequence[int]) -> Rates:
    return case.contest(seeds)


def pooled(results: Iterable[Rates]) -> Rates:
    """Seeds of several cells together."""
    rows = list(results)
    return {name: [rate for row in rows for rate in row[name]] for name in rows[0]}


def ratio_to_optimum(tokens: Rates, name: str) -> float:
    return sum(tokens[name]) / sum(tokens["optimum"])


def hit_rate_table(results: dict[Cell, Rates]) -> tuple[Table, list[str]]:
    """One line for a family on a model within a budget; and what is missed."""
    table = Table("traces", "model", "GiB", title="token hit rate, per cent")
    for name in (*POLICIES, "± s.e. of the lead"):
        table.add_column(name, justify="right")
    missed = []
    for cell, rates in results.items():
        means = {name: float(np.mean(rates[name])) for name in POLICIES}
        spread = np.std(np.subtract(rates[OURS], rates["Marconi"])) / np.sqrt(len(rates[OURS]))
        where = (cell.traffic.name, cell.sizes.name, f"{cell.gib:g}")
        worse = [rival for rival in RIVALS if means[OURS] < means[rival] - POINT]
        missed += [f"{' '.join(where)}: below {rival}" for rival in worse]
        table.add_row(*where, *(f"{100 * means[n]:.1f}" for n in POLICIES), f"{100 * spread:.1f}")
    return table, missed


def family_table(results: dict[Cell, Rates]) -> tuple[Table, list[str]]:
    """Means over all cells of a family on one model."""
    table = Table("traces", "model", *POLICIES, title="token hit rate, per cent, all budgets")
    missed = []
    for family, sizes in dict.fromkeys((c.family, c.sizes) for c in results):
        rates = pooled(r for c, r in results.items() if (c.family, c.sizes) == (family, sizes))
        means = {name: float(np.mean(rates[name])) for name in POLICIES}
        where = (FAMILIES[family].name, sizes.name)
        missed += [f"{' '.join(where)}: not above {r}" for r in RIVALS if means[OURS] <= means[r]]
        table.add_row(*where, *(f"{100 * means[n]:.1f}" for n in POLICIES))
    return table, missed


def optimum_table(results: dict[SmallTree, Rates]) -> tuple[Table, list[str]]:
    """Tokens reused over the most possible."""
    title = "small trees: tokens reused, per cent of the offline optimum"
    table = Table("traces", "checkpoints that fit", *POLICIES, title=title)
    missed = []
    for case, tokens in results.items():
        ratios = {name: ratio_to_optimum(tokens, name) for name in POLICIES}
        name = FAMILIES[case.family].name
        if case.slots == MODERATE and ratios[OURS] < OPTIMAL:
            missed.append(f"{name}, {case.slots} checkpoints: {ratios[OURS]:.2f} of the optimum")
        mark = " (moderate)" if case.slots == MODERATE else ""
        table.add_row(name, f"{case.slots}{mark}", *(f"{100 * ratios[n]:.1f}" for n in POLICIES))
    return table, missed


def plot(hit: dict[Cell, Rates], small: dict[SmallTree, Rates], path: Path) -> None:
    """Above: hit rate over the budget, large model. Below: part of the optimum over the budget."""
    figure, axes = plt.subplots(2, len(FAMILIES), figsize=(13, 7.5), sharey="row")
    for number, family in enumerate(FAMILIES):
        above, below = axes[0][number], axes[1][number]
        mine = {c: r for c, r in hit.items() if c.family == number and c.sizes == LARGE}
        budgets = [cell.gib for cell in mine]
        for name in POLICIES:
            means = [100 * np.mean(rates[name]) for rates in mine.values()]
            above.plot(budgets, means, marker="o", label=name)
            parts = [100 * ratio_to_optimum(small[SmallTree(number, slots)], name) for slots in SLOTS]
            below.plot(SLOTS, parts, marker="o", label=name)
        above.set(title=family.name, xscale="log", xlabel=f"budget in GiB ({LARGE.name})")
        above.set_xticks(budgets, [f"{gib:g}" for gib in budgets])
        below.set(xlabel="checkpoints that fit (small trees)")
        below.axhline(100, color="grey", linewidth=0.8)
    axes[0][0].set_ylabel("token hit rate, %")
    axes[1][0].set_ylabel("% of the offline optimum")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def run(cases: Sequence[Cell | SmallTree], seeds: int, jobs: int, what: str) -> list[Rates]:
    task: Callable[[Cell | SmallTree], Rates] = partial(rates_of, seeds=range(seeds))
    with ProcessPoolExecutor(jobs) as pool:
        return list(track(pool.map(task, cases), what, len(cases), console=Console(stderr=True)))


def main(seeds: int, jobs: int, out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    small = dict(zip(small_trees(), run(small_trees(), seeds, jobs, "small trees"), strict=True))
    hit = dict(zip(cells(), run(cells(), seeds, jobs, "traces"), strict=True))
    console = Console(record=True, width=118)
    missed = []
    for table, misses in (family_table(hit), hit_rate_table(hit), optimum_table(small)):
        console.print(table)
        missed += misses
    requests, load = cells()[0].requests, small_trees()[0].load
    console.print(
        f"seeds 0 to {seeds - 1}, {requests} requests a trace, loads by turns; small trees: {load} open at a "
        f"time, {small_trees()[0].requests} requests. Marconi's alpha is tuned for each cell on other seeds. "
        f"{machine()}"
    )
    console.print("\n".join(["missed:", *missed]) if missed else "all targets met")
    (out / "eviction.md").write_text(f"```\n{console.export_text()}```\n\n![hit rates](eviction.png)\n")
    plot(hit, small, out / "eviction.png")
    return 1 if missed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=21)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    sys.exit(main(args.seeds, args.jobs, args.out))
