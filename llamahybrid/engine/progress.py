"""Shows how far a build, or a merge, has come."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from llamahybrid.engine import process


@contextmanager
def display(done_is: str = "compiled") -> Iterator[process.Progress]:
    """A bar on a terminal, plain lines in a log; both on stderr. `done_is`: what a step that is done is."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain_lines(done_is)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        task = bars.add_task("llama-cpp-python", total=None)

        def show(done: int, total: int, text: str) -> None:
            bars.update(task, completed=done, total=total or None, description=text[:60])

        yield show


def _plain_lines(done_is: str) -> process.Progress:
    """One line for each phase and each tenth of the steps, for logs."""
    last = ""

    def show(done: int, total: int, text: str) -> None:
        nonlocal last
        now = f"{done * 10 // total * 10} % {done_is}" if total else text
        if now != last:
            print(f"llama-cpp-python: {now}", file=sys.stderr, flush=True)
            last = now

    return show
