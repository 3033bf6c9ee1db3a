"""The command line that campaigns share: options, shares of the time, and the table at the end."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from llamahybrid import tiny
from tests.lab.differential import Mismatch
from tests.lab.quiet import silence

Seconds: TypeAlias = Annotated[float, typer.Option(help="How long at most.")]
Count: TypeAlias = Annotated[int, typer.Option(help="Rounds, requests or histories at most.")]
Seed: TypeAlias = Annotated[int, typer.Option(help="The first seed; the same seed gives the same campaign.")]
Archs: TypeAlias = Annotated[list[str] | None, typer.Option(help="Only this architecture; may be repeated.")]

Play: TypeAlias = Callable[[Path, str, int, float], Iterable[Any]]
"""(model, way, number of the trial, time to stop at) -> cells of the table. Raises Mismatch."""


def sweep(
    play: Play,
    archs: Sequence[str],
    columns: str,
    seconds: float,
    seed: int,
    ways: Sequence[str] = ("",),
    window: int | None = None,
) -> None:
    """Play every architecture in every way, each for its share of the time.

    Raises:
        typer.Exit: status 1 at the first mismatch, which is printed with its seed.
    """
    silence()
    console = Console(width=160)
    table = Table("architecture", *columns.split(", "), title=f"from seed {seed}")
    trials = list(itertools.product(archs, ways))
    start, failure = time.monotonic(), ""
    with tempfile.TemporaryDirectory() as folder, Progress(console=console, transient=True) as progress:
        for number, (arch, way) in enumerate(progress.track(trials)):
            model = tiny.make(arch, Path(folder, f"{arch}.gguf"), window=window)
            try:
                cells = play(model, way, number, start + seconds * (number + 1) / len(trials))
            except Mismatch as mismatch:
                failure = f"{arch} {way}, seed {seed}, trial {number}: {mismatch}"
                break
            table.add_row(arch, *map(str, cells))
    console.print(table)
    if failure:
        console.print(failure, style="red", markup=False, highlight=False)
        raise typer.Exit(1)
