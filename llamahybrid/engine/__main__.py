"""``python -m llamahybrid.engine wheel|sdist``: make the pinned engine, and print where it lies.

Runs before anything else is installed: it needs the standard library, platformdirs and rich.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from llamahybrid.engine import build, sdist
from llamahybrid.errors import EngineError


def main() -> int:
    """Print the path of the wheel (built if need be) or of the sdist; progress goes to stderr."""
    parser = argparse.ArgumentParser(prog="python -m llamahybrid.engine", description=__doc__)
    parser.add_argument("what", choices=("wheel", "sdist"))
    what = parser.parse_args().what
    try:
        if what == "sdist":
            print(sdist.fetch())
        else:
            with _display() as progress:
                path = build.wheel(progress)
            print(path)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: nothing was kept of the build; start it again any time", file=sys.stderr)
        return 130
    return 0


@contextmanager
def _display() -> Iterator[build.Progress]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain_lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        task = bars.add_task("llama-cpp-python", total=None)

        def show(done: int, total: int, text: str) -> None:
            bars.update(task, completed=done, total=total or None, description=text[:60])

        yield show


def _plain_lines() -> build.Progress:
    """One line for each phase and each tenth of the build, for logs."""
    last = ""

    def show(done: int, total: int, text: str) -> None:
        nonlocal last
        now = f"{done * 10 // total * 10} % compiled" if total else text
        if now != last:
            print(f"llama-cpp-python: {now}", file=sys.stderr, flush=True)
            last = now

    return show


if __name__ == "__main__":
    sys.exit(main())
