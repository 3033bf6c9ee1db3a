"""Two subjects of `benchmarks.parallel` and `benchmarks.served` at once: the ratio of their tokens a second.

A machine whose speed drifts tells little of two subjects that run one after the other: by how much it drifts,
mostly. Here both are there, and one process group is frozen while the other is awake, in slices of so many
seconds; what counts is how long each was awake. A subject against itself tells what else is in a ratio.
Slices of less than a second disturb what is decided by time here (pieces of prompts, patience with answers),
and so `ours` alone.
Run: python -m benchmarks.at_once ours llama-server [--clients 4 8] [--rounds N] [--slice SECONDS]
     [--model FILE] [--program FILE] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import parallel, served
from benchmarks.chats import READY, begin, command, parser_of, write
from llamahybrid.harness.tables import machine

PROGRAMS = {name: of.NAME for of in (served, parallel) for name in of.SUBJECTS}

SLICE = 2.0
"""Seconds that one of them is awake at a time."""


class Subject:
    """One of them in a process group of its own, that stands still until it is woken."""

    def __init__(self, name: str, run: list[str]) -> None:
        self.name = name
        self.awake = 0.0
        """Seconds, so far."""
        self.over = False
        self._process = subprocess.Popen(
            run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )

    def __enter__(self) -> Subject:
        return self

    def __exit__(self, *_: object) -> None:
        self._send(signal.SIGKILL)
        self._process.wait()

    def hold(self) -> None:
        """Once it is there, it may begin when it is woken."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode().strip()
        assert line == READY, f"{self.name} did not begin: {line}"
        self._send(signal.SIGSTOP)
        assert self._process.stdin is not None
        self._process.stdin.write(b"begin\n")
        self._process.stdin.flush()

    def wake(self, seconds: float) -> None:
        """Let it go on for so long, or until it is through."""
        assert self._process.stdout is not None
        began = time.perf_counter()
        self._send(signal.SIGCONT)
        said, _, _ = select.select([self._process.stdout], [], [], seconds)
        self.awake += time.perf_counter() - began
        if said:  # whole, before it stands still: a long line comes in parts
            self.over = True
            assert self._process.stdout.readline().startswith(b"{"), f"{self.name} did not come through"
        self._send(signal.SIGSTOP)

    def _send(self, what: signal.Signals) -> None:
        os.killpg(self._process.pid, what)


def compare(names: list[str], clients: int, seed: int, arguments: Any) -> list[float]:
    """The seconds that each was awake for the same chats."""
    more = ("--held", "--context", str(clients * 2_048))
    with ExitStack() as stack:
        subjects = []
        for name in names:
            program = PROGRAMS[name]
            shape = more if program == parallel.NAME else more[:1]
            run = command(program, arguments, name, clients, seed, *shape)
            subjects.append(stack.enter_context(Subject(name, run)))
        for subject in subjects:
            subject.hold()
        for subject in itertools.cycle(subjects if seed % 2 else subjects[::-1]):
            if not subject.over:
                subject.wake(arguments.slice)
            if all(each.over for each in subjects):
                break
        return [subject.awake for subject in subjects]


def main(arguments: Any) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # nobody is left frozen
    console, results = Console(width=None if sys.stdout.isatty() else 110), []
    for clients in arguments.clients:
        rounds = [compare(arguments.names, clients, seed, arguments) for seed in range(arguments.rounds)]
        ratios = [other / mine for mine, other in rounds]
        table = Table("round", *arguments.names, "ratio", title=f"{clients} clients, seconds awake")
        for number, (pair, ratio) in enumerate(zip(rounds, ratios, strict=True)):
            table.add_row(str(number), *(f"{seconds:.2f}" for seconds in pair), f"{ratio:.3f}")
        console.print(table)
        median = statistics.median(ratios)
        console.print(
            f"{arguments.names[0]} makes {median:.3f} of the tokens a second of {arguments.names[1]}"
        )
        results.append({"clients": clients, "names": arguments.names, "seconds": rounds, "ratio": median})
    console.print(machine(), style="dim")
    write(arguments.json, results)
    return 0


def child(_: Any) -> int:
    raise AssertionError("its subjects are those of other programs")


if __name__ == "__main__":
    parser: argparse.ArgumentParser = parser_of(__doc__, tuple(PROGRAMS), rounds=5)
    parser.add_argument("names", nargs=2, choices=tuple(PROGRAMS), metavar="SUBJECT")
    parser.add_argument("--slice", type=float, default=SLICE)
    sys.exit(begin(parser.parse_args(), child, main))
