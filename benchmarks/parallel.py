"""Several clients at once: tokens a second and the time to the first token, beside llama-server's slots.

A Qwen3.5-architecture model of about 100M parameters; each client has a chat of `--turns` turns, answers of
`--answer` tokens, first prompts and questions of random sizes; greedy, two threads. Then one cold prompt of
3,000 to 5,000 tokens beside three answers that run. Round by round: llamahybrid with as many slots as
clients, with one, and llama-server of the same source with as many; each in a process of its own, since
OpenMP's threads of one subject would stand in the way of the next.
Run: python -m benchmarks.parallel [--clients 4 8] [--rounds N] [--model FILE] [--program FILE] [--json FILE]
Exits with 1 where a target is missed.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.chats import (
    VOCABULARY,
    Chats,
    Run,
    Stream,
    begin,
    hold,
    opened,
    parser_of,
    played,
    theirs,
    write,
)
from llamahybrid.harness.tables import machine
from tests.lab.quiet import silence

AGAINST_ONE = 1.5
"""Tokens a second over those of one slot, at least; those of llama-server are the other bound, and its first
tokens are."""

LONG = (3000, 5000)
"""Tokens of the long prompt."""

BESIDE = 3
"""Answers that run beside it."""

BESIDE_TOKENS = 100_000
"""So many that they run until they are told to stop."""

LONG_FIRST = 1.15
"""Its time to the first token, over that of such a prompt alone, at most."""


@dataclass
class LongRun:
    """A long prompt, alone and beside answers."""

    alone: float = 0.0
    beside: float = 0.0
    """Seconds to its first token."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between two tokens of the answers meanwhile."""


def play_long(stream: Stream, seed: int) -> LongRun:
    """A cold prompt alone, then one beside answers that run, then one alone again."""
    chance, run = random.Random(f"long/{seed}"), LongRun()
    length = chance.randrange(*LONG)

    def words(n: int) -> list[int]:
        return [chance.randrange(10, VOCABULARY - 10) for _ in range(n)]

    def first() -> float:
        began = time.perf_counter()
        answer = stream(words(length), 2)
        next(answer)
        seconds = time.perf_counter() - began
        for _ in answer:
            pass
        return seconds

    before = first()
    over, measured, running = threading.Event(), threading.Event(), threading.Barrier(BESIDE + 1)

    def answer(prompt: list[int]) -> None:
        last = 0.0
        for count, _ in enumerate(stream(prompt, BESIDE_TOKENS)):
            now = time.perf_counter()
            if count == 0:
                running.wait()
            elif measured.is_set():
                run.gaps.append(now - last)
            last = now
            if over.is_set():
                break

    threads = [threading.Thread(target=answer, args=(words(100),)) for _ in range(BESIDE)]
    for thread in threads:
        thread.start()
    running.wait()
    measured.set()
    run.beside = first()
    over.set()
    for thread in threads:
        thread.join()
    run.alone = (before + first()) / 2
    return run


@contextmanager
def ours(model: Path, slots: int, context: int, flash: str) -> Iterator[Stream]:
    """llamahybrid with so many slots."""
    with closing(opened(model, slots, context, flash)) as llm:
        yield lambda prompt, n: islice(llm.generate(list(prompt), temp=0.0), n)


NAME = "benchmarks.parallel"
SUBJECTS = ("ours", "one slot", "llama-server")


def child(arguments: Any) -> int:
    """Be one subject for one round; what it did goes to stdout."""
    silence()
    clients = arguments.clients[0]
    shape = (1 if arguments.child == "one slot" else clients, arguments.context, arguments.flash)
    if arguments.child == "llama-server":
        subject = theirs(arguments.program, arguments.model, *shape)
    else:
        subject = ours(arguments.model, *shape)
    with subject as stream:
        hold(arguments)
        if arguments.long:
            result: Any = play_long(stream, arguments.seed)
        else:
            chats = Chats(clients, arguments.turns, arguments.answer, arguments.seed)
            result = chats.play(stream)
    print(json.dumps(asdict(result)))
    return 0


def p95(values: list[float]) -> float:
    """Their 95th percentile."""
    return statistics.quantiles(values, n=20)[-1]


def main(arguments: Any) -> int:
    console = Console(width=None if sys.stdout.isatty() else 110)
    missed, results = False, list[Any]()
    for clients in arguments.clients:
        shape = ("--context", str(clients * 2_048))
        runs: dict[str, list[Run]] = {name: [] for name in SUBJECTS}
        for seed in range(arguments.rounds):
            for name in SUBJECTS:
                runs[name].append(Run(**played(NAME, arguments, name, clients, seed, *shape)))
        rate = {name: statistics.median(run.rate for run in some) for name, some in runs.items()}
        first = {n: statistics.median(t for run in some for t in run.first) for n, some in runs.items()}
        gap = {n: p95([t for run in some for t in run.gaps]) for n, some in runs.items()}
        table = Table("", "tokens/s", "first token, s", "gap, 95 %, ms", title=f"{clients} clients")
        for name in SUBJECTS:
            table.add_row(name, f"{rate[name]:.1f}", f"{first[name]:.3f}", f"{1e3 * gap[name]:.0f}")
        console.print(table)
        enough = rate["ours"] >= max(rate["llama-server"], AGAINST_ONE * rate["one slot"])
        missed |= not enough or first["ours"] > first["llama-server"]
        results.append({"clients": clients, "rate": rate, "first": first, "gap": gap})
    long_shape = ("--long", "--context", str(4 * 2 * LONG[1]))
    table = Table("", "alone, s", "beside, s", "gap, 95 %, ms", title=f"long prompts, {BESIDE} answers")
    longs: dict[str, list[LongRun]] = {name: [] for name in ("ours", "llama-server")}
    for seed in range(arguments.rounds):
        for name, some in longs.items():
            some.append(LongRun(**played(NAME, arguments, name, BESIDE + 1, seed, *long_shape)))
    for name, some in longs.items():
        alone, beside = (statistics.median(getattr(run, at) for run in some) for at in ("alone", "beside"))
        gap_95 = p95([t for run in some for t in run.gaps])
        table.add_row(name, f"{alone:.2f}", f"{beside:.2f}", f"{1e3 * gap_95:.0f}")
    console.print(table)
    ratio = statistics.median(run.beside / run.alone for run in longs["ours"])
    gaps = {name: p95([t for run in some for t in run.gaps]) for name, some in longs.items()}
    missed |= ratio > LONG_FIRST or gaps["ours"] > gaps["llama-server"]
    console.print(f"a long prompt beside answers: {ratio:.3f} of its time alone (at most {LONG_FIRST})")
    results.append({"long": {name: [asdict(run) for run in some] for name, some in longs.items()}})
    console.print(machine(), style="dim")
    write(arguments.json, results)
    return int(missed)


if __name__ == "__main__":
    parser = parser_of(__doc__, SUBJECTS, rounds=3)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--context", type=int, default=8192)
    sys.exit(begin(parser.parse_args(), child, main))
