"""Oracle ratio over byte budgets at the real proportions of Qwen3.6-27B: ours beside llama-server's rules.

150 MiB a snapshot and 64 KiB of attention KV a token; state is played by tokens, all bytes divided by 64.
Each workload has a cache of its own, except in "side by side", where all share one and take turns. "x 4"
has messages of four times the length. The server's budget is what its prompt cache and the checkpoints of its
slot take together, with whichever --ctx-checkpoints of `CHECKPOINTS` serves it best at that budget.
"mid-generation" has no message starts where its histories diverge; it is listed, but no part of the means.
Run: python -m benchmarks.budgets [--gpu] [--out DIR]
Writes budgets.json, and budgets.png where matplotlib is installed; exits with 1 where the target is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from llamahybrid.harness.oracle import least_decodes
from llamahybrid.harness.workloads.multi_user import CROWDS
from llamahybrid.harness.workloads.tokens import TOKEN_WORKLOADS, Workload, long_prompt, mid_generation, raw
from tests.lab.pretend import (
    ON_A_GPU,
    QWEN36_27B,
    Ours,
    Policy,
    PretendSpeech,
    Scale,
    Server,
    interleaved,
)

GIB = 1 << 30
BUDGETS = (1, 2, 3, 4, 6, 8, 12, 16)
CHECKPOINTS = (2, 4, 8, 16, 32)
TARGET_GIB, TARGET = 4, 1.15
LONGER = 4
MARKED = tuple(w for w in (*TOKEN_WORKLOADS, *CROWDS) if w.start is not long_prompt)
COUNTED = tuple(w for w in MARKED if w.start is not mid_generation)
TOGETHER = "side by side"

Ratios: TypeAlias = dict[str, float]
"""By workload."""


def ratio(workloads: Sequence[Workload], policy: Policy, longer: int, warm: int) -> float:
    """Decoded over least of workloads that run side by side, from request number `warm` on."""
    speech = PretendSpeech(marked=workloads[0].marked, longer=longer)
    records = list(interleaved([w.start for w in workloads], speech, policy))
    return sum(r.decoded for r in records[warm:]) / sum(least_decodes(records)[warm:])


@dataclass
class Curve:
    """A family of workloads under all budgets."""

    name: str
    workloads: Sequence[Workload]
    longer: int = 1
    together: bool = False
    ours: dict[int, Ratios] = field(default_factory=dict)
    server: dict[int, Ratios] = field(default_factory=dict)

    def measure(self, scale: Scale, gib: int) -> None:
        self.ours[gib] = self._ratios(lambda: Ours(scale, gib * GIB))
        tried = (
            self._ratios(partial(Server, scale, gib * GIB, n))
            for n in CHECKPOINTS
            if n * scale.sizes.snapshot <= gib * GIB
        )
        self.server[gib] = min(tried, key=self.mean)

    def mean(self, found: Ratios) -> float:
        counted = {w.name for w in self.workloads if w.start is not mid_generation}
        return fmean(r for name, r in found.items() if self.together or name in counted)

    def _ratios(self, policy: Callable[[], Policy]) -> Ratios:
        """Each workload on a fresh policy, or all on one."""
        if self.together:
            return {TOGETHER: ratio(self.workloads, policy(), self.longer, 0)}
        return {w.name: ratio([w], policy(), self.longer, w.measured_from) for w in self.workloads}


def curves() -> list[Curve]:
    return [
        Curve("templates", MARKED),
        Curve(f"templates x {LONGER}", MARKED, LONGER),
        Curve("raw tokens", [raw(w) for w in MARKED]),
        Curve(TOGETHER, COUNTED, together=True),
        Curve(f"{TOGETHER} x {LONGER}", COUNTED, LONGER, together=True),
    ]


def mean_table(done: Sequence[Curve]) -> Table:
    table = Table("GiB", title="mean ratio, ours and the server's rules below")
    for curve in done:
        table.add_column(curve.name, justify="right")
    for gib in BUDGETS:
        cells = (f"{c.mean(c.ours[gib]):.3f}\n[dim]{c.mean(c.server[gib]):.3f}[/]" for c in done)
        table.add_row(str(gib), *cells)
    return table


def workload_table(done: Sequence[Curve]) -> Table:
    alone = [c for c in done if not c.together]
    table = Table("workload", title=f"at {TARGET_GIB} GiB, ours and the server's rules")
    for curve in alone:
        table.add_column(curve.name, justify="right")
    for marked in MARKED:
        pairs = []
        for curve in alone:
            name = next(w.name for w in curve.workloads if w.start is marked.start)
            pairs.append(f"{curve.ours[TARGET_GIB][name]:.3f} [dim]{curve.server[TARGET_GIB][name]:.3f}[/]")
        table.add_row(marked.name, *pairs)
    return table


def plot(done: Sequence[Curve], path: Path) -> None:
    """The means over the budgets, one panel for each family."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(done), 3.6), layout="constrained")
    for axes, curve in zip(figure.subplots(1, len(done), sharey=True), done, strict=True):
        for label, found in (("llamahybrid", curve.ours), ("llama-server's rules", curve.server)):
            axes.plot(BUDGETS, [curve.mean(found[gib]) for gib in BUDGETS], marker="o", label=label)
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.set(title=curve.name, xlabel="budget, GiB", xscale="log", xticks=BUDGETS, xticklabels=BUDGETS)
        axes.minorticks_off()
    figure.axes[0].set_ylabel("tokens decoded / least possible")
    figure.axes[0].legend()
    figure.savefig(path, dpi=110)


def main(scale: Scale, out: Path) -> int:
    console, done = Console(width=None if sys.stdout.isatty() else 140), curves()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(done) * len(BUDGETS))
        for curve in done:
            for gib in BUDGETS:
                progress.update(task, description=f"{curve.name}, {gib} GiB")
                curve.measure(scale, gib)
                progress.advance(task)
    console.print(mean_table(done))
    console.print(workload_table(done))
    out.mkdir(parents=True, exist_ok=True)
    numbers = {c.name: {"ours": c.ours, "server": c.server} for c in done}
    (out / "budgets.json").write_text(
        json.dumps({"made": date.today().isoformat(), **numbers}, indent=1) + "\n"
    )
    try:
        plot(done, out / "budgets.png")
    except ModuleNotFoundError:
        console.print("no plot: install matplotlib for one", style="yellow")
    found = done[0].mean(done[0].ours[TARGET_GIB])
    console.print(f"templates at {TARGET_GIB} GiB: {found:.3f}, target {TARGET}")
    return 1 if found > TARGET else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="costs of a GPU, where few cuts are affordable")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    sys.exit(main(ON_A_GPU if arguments.gpu else QWEN36_27B, arguments.out))
