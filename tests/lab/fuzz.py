"""Fuzz campaigns: random histories on every architecture until the time is up.

``python -m tests.lab.fuzz --seconds 600 [--seed 1] [--arch qwen35]``

Each round takes the next seed through every architecture and the next setting. Exit status 1 on the first
mismatch, with the seed and the shrunk history; the table shows what was run and the worst difference seen.
"""

from __future__ import annotations

import importlib
import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from llamahybrid import tiny
from tests.lab.differential import Mismatch, Verdict, check
from tests.lab.history import random_history, restarted
from tests.lab.reference import Factory, Setting, settings_for

OURS = "llamahybrid.llama:Llama"


def load(name: str) -> Factory:
    """The class behind "module:class"."""
    module, _, attribute = name.partition(":")
    factory: Factory = getattr(importlib.import_module(module), attribute)
    return factory


def generative() -> tuple[str, ...]:
    """The architectures that can make tokens (bert cannot)."""
    return tuple(arch for arch in tiny.architectures() if arch != "bert")


def trials(models: dict[str, Path], seed: int) -> Iterator[tuple[int, str, Setting]]:
    """Endless (seed, architecture, setting): each seed meets every architecture, settings take turns."""
    settings = {arch: settings_for(model) for arch, model in models.items()}
    for number in itertools.count():
        for index, arch in enumerate(models):
            yield seed + number, arch, settings[arch][(number + index) % len(settings[arch])]


def campaign(
    architectures: tuple[str, ...],
    seconds: float,
    seed: int,
    factory: Factory,
    length: int,
    console: Console,
    restarts: bool = False,
) -> bool:
    """Run trials for `seconds`; True if nothing was found. `restarts`: see `restarted`."""
    verdicts = {arch: Verdict() for arch in architectures}
    histories = dict.fromkeys(architectures, 0)
    failure = ""
    last_seed = seed
    with tempfile.TemporaryDirectory() as folder, Progress(console=console, transient=True) as progress:
        models = {arch: tiny.make(arch, Path(folder, f"{arch}.gguf")) for arch in architectures}
        start = time.monotonic()
        bar = progress.add_task("fuzz", total=seconds)
        for last_seed, arch, setting in trials(models, seed):
            passed = time.monotonic() - start
            if passed >= seconds:
                break
            progress.update(bar, completed=passed, description=f"seed {last_seed} {arch}, {setting.name}")
            history = random_history(last_seed, length=length)
            history = restarted(history) if restarts else history
            try:
                verdict = check(history, factory, models[arch], setting)
            except Mismatch as mismatch:
                failure = f"seed {last_seed}, {mismatch}"
                break
            verdicts[arch].add(verdict)
            histories[arch] += 1
    console.print(_table(verdicts, histories, f"seeds {seed} to {last_seed}"))
    if failure:
        console.print(failure, style="red", markup=False, highlight=False)
    return not failure


def _table(verdicts: dict[str, Verdict], histories: dict[str, int], title: str) -> Table:
    table = Table("architecture", title=title)
    for heading in ("histories", "requests", "bit-equal", "worst difference", "ties", "from disk"):
        table.add_column(heading, justify="right")
    for arch, verdict in verdicts.items():
        counts = (histories[arch], verdict.requests, verdict.bit_equal)
        rest = (f"{verdict.worst:.1e}", str(len(verdict.ties)), str(verdict.from_disk))
        table.add_row(arch, *map(str, counts), *rest)
    return table


def main(
    seconds: Annotated[float, typer.Option(help="How long.")] = 60,
    seed: Annotated[int, typer.Option(help="The first seed; the same seed gives the same histories.")] = 0,
    arch: Annotated[list[str] | None, typer.Option(help="Only this architecture; may be repeated.")] = None,
    length: Annotated[int, typer.Option(help="Operations in a history.")] = 12,
    subject: Annotated[str, typer.Option(help="The class on trial, module:class.")] = OURS,
    restarts: Annotated[bool, typer.Option(help="A new process' model and cache before everything.")] = False,
) -> None:
    """Random histories against fresh stock contexts, for a bounded time."""
    architectures = tuple(arch) if arch else generative()
    if not campaign(architectures, seconds, seed, load(subject), length, Console(), restarts):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
