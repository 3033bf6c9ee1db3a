"""Cost of checkpoints where nothing can be reused: ratios to stock, measured in one run.

A Qwen3.5-architecture model of about 100M parameters; stock and ours take turns, and the ratio is the median
over the rounds, because a machine's speed may change by a fifth between one round and the next.
Run: python -m benchmarks.overhead [--rounds N] [--cpu-time]
On a busy machine --cpu-time compares CPU seconds of one thread instead of wall time.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from llamahybrid import Llama

# isort: split
import llama_cpp
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.tables import machine, milliseconds
from llamahybrid.harness.workloads.speech import Speech
from llamahybrid.tiny import make

Clock = Callable[[], float]

PAUSE = 0.25
"""Seconds between requests, as between the turns of a chat: what ours does after an answer (touching memory
ahead of time) must not run beside stock's clock."""


@dataclass(frozen=True)
class Case:
    name: str
    prepared: int
    """Tokens evaluated before the clock starts."""
    prompt: int
    """Tokens of the timed prompt, those prepared included."""
    generated: int
    target: float


CASES = (
    Case("first prefill, 1,000 tokens", 0, 1000, 1, 1.03),
    Case("first prefill, 3,000 tokens", 0, 3000, 1, 1.03),
    Case("suffix of 100 tokens", 1000, 1100, 1, 1.12),
    Case("decode, 200 tokens", 300, 301, 200, 1.02),
)


def take(llm: llama_cpp.Llama, prompt: list[int], tokens: int) -> None:
    stream = llm.generate(list(prompt), temp=0.0)
    for _ in islice(stream, tokens):
        pass
    stream.close()


def seconds(llm: llama_cpp.Llama, speech: Speech, case: Case, clock: Clock) -> float:
    """Time of one round on a prompt nobody has seen."""
    prompt = speech.message(case.prompt)
    if case.prepared:
        take(llm, prompt[: case.prepared], 1)
    gc.collect()
    time.sleep(PAUSE)
    started = clock()
    take(llm, prompt, case.generated)
    return clock() - started


def measure(
    makers: list[Callable[[], llama_cpp.Llama]], rounds: int, clock: Clock
) -> dict[Case, list[list[float]]]:
    """Seconds by case, implementation and round, interleaved so that a busy machine slows both alike."""
    times: dict[Case, list[list[float]]] = {case: [[], []] for case in CASES}
    with closing(makers[0]()) as stock, closing(makers[1]()) as ours, Progress(transient=True) as progress:
        speech = Speech(stock)
        for llm in (stock, ours):
            take(llm, speech.message(600), 8)
        task = progress.add_task("measuring", total=rounds * len(CASES))
        for turn in range(rounds):
            for case in CASES:
                for side in (0, 1) if turn % 2 else (1, 0):
                    times[case][side].append(seconds((stock, ours)[side], speech, case, clock))
                progress.advance(task)
    return times


def main(rounds: int, cpu_time: bool) -> int:
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        model = make("qwen35", Path(folder) / "model.gguf", params=100_000_000)
        size = model.stat().st_size
        count = {"n_threads": 1, "n_threads_batch": 1} if cpu_time else {}

        def maker(llama: Callable[..., llama_cpp.Llama]) -> Callable[[], llama_cpp.Llama]:
            return lambda: llama(model_path=str(model), n_ctx=4096, verbose=False, **count)

        times = measure(
            [maker(llama_cpp.Llama), maker(Llama)],
            rounds,
            time.process_time if cpu_time else time.perf_counter,
        )
    table = Table(
        "case",
        title=f"qwen35, {size / 2e6:.0f}M parameters, medians of {rounds} rounds{', CPU time' * cpu_time}",
    )
    for head in ("stock ms", "ours ms", "ratio", "quartiles", "target", "holds"):
        table.add_column(head, justify="right")
    missed = 0
    for case, (stock, ours) in times.items():
        low, ratio, high = statistics.quantiles(o / s for o, s in zip(ours, stock, strict=True))
        missed += ratio > case.target
        row = (milliseconds(statistics.median(side)) for side in (stock, ours))
        spread, holds = f"{low:.3f}-{high:.3f}", "no" if ratio > case.target else "yes"
        table.add_row(case.name, *row, f"{ratio:.3f}", spread, f"{case.target:.2f}", holds)
    console.print(table)
    console.print(machine(), style="dim")
    return 1 if missed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cpu-time", action="store_true")
    arguments = parser.parse_args()
    sys.exit(main(arguments.rounds, arguments.cpu_time))
