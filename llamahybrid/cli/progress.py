"""Progress of long commands on stderr: a bar on a terminal, a line a step elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Told = Callable[[str, int, int], None]
"""Called with the running step, the number of finished steps, and of all."""


@contextmanager
def progress() -> Iterator[Told]:
    """Show how far a command is."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines()
        return
    columns = (
        *(TextColumn("{task.description}", markup=False), BarColumn(20)),
        *(TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn(), TimeRemainingColumn()),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda text, done, of: bar.update(task, description=text, completed=done, total=of)


def _lines() -> Told:
    """Print a line for each step that begins."""
    begun = -1

    def told(text: str, done: int, of: int) -> None:
        nonlocal begun
        if done > begun:
            begun = done
            typer.echo(f"[{done + 1}/{of}] {text}", err=True)

    return told
