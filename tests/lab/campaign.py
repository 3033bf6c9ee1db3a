"""The command line that campaigns share: options, shares of the time, and the table at the end."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeAlias

import llama_cpp
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from llamahybrid import tiny

Play: TypeAlias = Callable[[Path, str, int, int, float], Mapping[str, object]]
"""(model, way, seed, rounds at most, time to stop at) -> cells of the table by column; one round at least."""


_SILENT = llama_cpp.llama_log_callback(lambda level, text, user_data: None)
"""Kept for the life of the process: the library goes on calling it."""


def silence() -> None:
    """Switch the library's log off: campaigns provoke thousands of its error lines."""
    llama_cpp.llama_log_set(_SILENT, None)


@contextmanager
def reported(console: Console, where: str) -> Iterator[None]:
    """Print a fault that the block finds, with its seed, and end the program with status 1."""
    try:
        yield
    except AssertionError as error:
        console.print(f"{where}: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(1) from error


def sweep(
    play: Play,
    archs: Sequence[str],
    ways: Sequence[str] = ("",),
    *,
    seconds: float,
    count: int = 100_000,
    seed: int = 0,
    window: int | None = None,
) -> None:
    """Play every architecture in every way, each for its share of the time and from the next seed on.

    Raises:
        typer.Exit: status 1 at the first mismatch, which is printed with its seed.
    """
    silence()
    console = Console(width=160)
    table = Table()
    trials = list(itertools.product(archs, ways))
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Progress(console=console, transient=True) as progress:
        for number, (arch, way) in enumerate(progress.track(trials)):
            model = tiny.make(arch, Path(folder, f"{arch}.gguf"), window=window)
            until = start + seconds * (number + 1) / len(trials)
            with reported(console, f"{arch} {way}, seed {seed + number}"):
                cells = play(model, way, seed + number, count, until)
            if not number:
                table = Table("architecture", "way", *cells, title=f"from seed {seed}")
            table.add_row(arch, way, *map(str, cells.values()))
    console.print(table)


def main(
    play: Play,
    archs: Sequence[str],
    ways: Sequence[str] = ("",),
    window: int | None = None,
) -> None:
    """Run a campaign with the options of the command line; without `--way` in all `ways`."""

    def swept(
        seconds: Annotated[float, typer.Option(help="How long at most.")] = 60,
        count: Annotated[int, typer.Option(help="Rounds of each architecture and way at most.")] = 100_000,
        seed: Annotated[int, typer.Option(help="The first seed; the same one gives the same campaign.")] = 0,
        arch: Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated.")] = None,
        way: Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated.")] = None,
    ) -> None:
        sweep(play, arch or archs, way or ways, seconds=seconds, count=count, seed=seed, window=window)

    typer.run(swept)
