"""The same measurements in two checkouts, by turns in one run: what a change of the package costs.

A process for each side and case keeps its model loaded; both run once a round, in changing order, and the
ratio is the median over the rounds. A third process, of the old checkout once more, shows what the ratio of
two equal sides is. With --instructions callgrind counts instead, on a tiny model, with costs that no clock
measured: the figure is what one more run takes. The engine must be one that valgrind can run, without
AVX-512: LLAMAHYBRID_ENGINE names one that CMAKE_ARGS=-DGGML_NATIVE=OFF llamahybrid engine build --source
FOLDER made, the unpacked sdist, of both.
Run: python -m benchmarks.versions OLD_CHECKOUT NEW_CHECKOUT [--case CASE ...] [--seconds N] [--instructions]
Both need their shim: python setup.py build_ext --inplace. Exits with 1 where the new one is worse by more
than `LIMIT` and by more than the spread of its own rounds.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.version_work import CASES, COUNTING
from llamahybrid.evaluate.tables import machine
from llamahybrid.tiny import make

LIMIT = 1.01
ARCH, PARAMS = "qwen35", 20_000_000
SCRIPT = Path(__file__).with_name("version_work.py")


def environment(checkout: Path) -> dict[str, str]:
    """Where a side finds its package; nothing that one side measured reaches the other."""
    fixed = {"LLAMAHYBRID_COSTS": "off", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    return {**os.environ, **fixed, "PYTHONPATH": str(checkout)}


class Side:
    """One checkout's process for one case."""

    def __init__(self, checkout: Path, case: str, model: Path, folder: Path) -> None:
        (folder / "model.gguf").symlink_to(model)
        self._child = subprocess.Popen(
            [sys.executable, str(SCRIPT), case, str(folder)],
            cwd=checkout,
            env=environment(checkout),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> None:
        """Wait until it is prepared."""
        self._line()

    def once(self) -> float:
        """Seconds of one more run."""
        assert self._child.stdin is not None
        self._child.stdin.write("\n")
        self._child.stdin.flush()
        return float(self._line())

    def _line(self) -> str:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"a side ended with {self._child.wait()}")
        return line

    def close(self) -> None:
        """End it."""
        self._child.kill()
        self._child.wait()


@dataclass(frozen=True)
class Found:
    """One case on both sides."""

    old: float
    """Median, in milliseconds or million instructions."""
    new: float
    ratio: float
    error: float
    """Standard error of the ratio's median; 0 for counts."""
    equal: float | None = None
    """The ratio of two equal sides."""

    @property
    def worse(self) -> bool:
        return self.ratio - 2 * self.error > LIMIT


def error_of_median(values: list[float]) -> float:
    """Standard error, from the quartiles: a few wild rounds do not count."""
    low, _, high = statistics.quantiles(values)
    return 1.2533 * (high - low) / 1.349 / len(values) ** 0.5


def timed(case: str, checkouts: tuple[Path, Path], model: Path, seconds: float) -> Found:
    """Take turns for so long, and for five rounds at least."""
    with ExitStack() as stack:
        sides = []
        for checkout in (checkouts[0], checkouts[1], checkouts[0]):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            sides.append(Side(checkout, case, model, folder))
            stack.callback(sides[-1].close)
        for side in sides:
            side.ready()
        rounds: list[list[float]] = []
        started = time.monotonic()
        while len(rounds) < 5 or time.monotonic() - started < seconds:
            turn = [(n + len(rounds)) % 3 for n in range(3)]
            took = {n: sides[n].once() for n in (turn if len(rounds) % 2 else turn[::-1])}
            rounds.append([took[n] for n in range(3)])
    old, new, again = (list(column) for column in zip(*rounds, strict=True))
    ratios = [b / a for a, b in zip(old, new, strict=True)]
    equal = statistics.median(b / a for a, b in zip(old, again, strict=True))
    middle = statistics.median(ratios)
    return Found(*(statistics.median(x) * 1e3 for x in (old, new)), middle, error_of_median(ratios), equal)


def counting(folder: Path) -> str:
    """A library whose `toggle` has callgrind begin to count, and end; compiled with valgrind's own header.

    Named functions (--toggle-collect) are not found in every library.
    """
    source, library = folder / "counting.c", folder / "counting.so"
    source.write_text("#include <valgrind/callgrind.h>\nvoid toggle(void) { CALLGRIND_TOGGLE_COLLECT; }\n")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    return str(library)


def callgrind(
    python: list[str], folder: Path, environment: Mapping[str, str], here: Path | None = None
) -> int:
    """Instructions that Python takes with these arguments, between its calls of `counting`'s function."""
    out = folder / "callgrind"
    tool = ["setarch", "-R", "valgrind", "--tool=callgrind", "--collect-atstart=no"]
    command = [*tool, f"--callgrind-out-file={out}", sys.executable, *python]
    subprocess.run(command, cwd=here, env=environment, check=True, capture_output=True)
    found = re.search(r"^(?:summary|totals): (\d+)", out.read_text(), re.MULTILINE)
    assert found is not None, "callgrind wrote no total"
    assert int(found[1]), "callgrind counted nothing"
    return int(found[1])


def instructions(checkout: Path, case: str, model: Path, count: int) -> int:
    """Instructions of a process that runs `count` times."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "model.gguf").symlink_to(model)
        where = {**environment(checkout), COUNTING: counting(folder)}
        return callgrind([str(SCRIPT), case, str(folder), "--count", str(count)], folder, where, checkout)


def counted(case: str, checkouts: tuple[Path, Path], model: Path) -> Found:
    """What two more runs take, by one."""
    few, more = 1, 3
    old, new = (
        (instructions(side, case, model, more) - instructions(side, case, model, few)) / (more - few) / 1e6
        for side in checkouts
    )
    return Found(old, new, new / old, 0.0)


def main(checkouts: tuple[Path, Path], cases: list[str], seconds: float, count: bool) -> int:
    console = Console(width=None if sys.stdout.isatty() else 110)
    what = "million instructions" if count else "milliseconds"
    table = Table("case", title=f"{what}, new over old")
    for head in ("old", "new", "ratio", "± s.e.", "old over old", "holds"):
        table.add_column(head, justify="right")
    missed = 0
    with tempfile.TemporaryDirectory() as scratch:
        model = make(ARCH, Path(scratch) / "model.gguf", params=None if count else PARAMS)
        for case in cases:
            found = counted(case, checkouts, model) if count else timed(case, checkouts, model, seconds)
            missed += found.worse
            noise = ("", "") if found.equal is None else (f"{found.error:.4f}", f"{found.equal:.4f}")
            figures = (f"{found.old:,.2f}", f"{found.new:,.2f}", f"{found.ratio:.4f}", *noise)
            table.add_row(case, *figures, "no" if found.worse else "yes")
            console.print(f"{case}: {' '.join(figures)}", style="dim")
    console.print(table)
    console.print(machine(), style="dim")
    return 1 if missed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seconds", type=float, default=20.0, help="for each case")
    parser.add_argument("--instructions", action="store_true")
    given = parser.parse_args()
    sides = (given.old.resolve(), given.new.resolve())
    sys.exit(main(sides, given.case, given.seconds, given.instructions))
