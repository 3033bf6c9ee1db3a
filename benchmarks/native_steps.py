"""What a step of several sequences takes in one unified cache, and a prompt beside them: stock and patched.

A Qwen3.5-architecture model of about 100M parameters, no flash attention, two threads, the C API alone: a
decode of one token of each sequence, and of a few dozen tokens of one of them, medians in ms. Each library in
a process of its own, in turn: `LLAMAHYBRID_ENGINE` chooses it.
Run: python -m benchmarks.native_steps [--sequences 4 8] [--cells N] [--context N] [--rounds N] [--model FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.table import Table

from benchmarks.chats import PARAMETERS
from llamahybrid.evaluate.tables import machine
from llamahybrid.tiny import make

STEPS = 40
PROMPT = 45
"""Tokens of a question."""

PROMPTS = 5
ENGINES = ("stock", "patched")


def measure(model: Path, sequences: int, cells: int, context_each: int) -> tuple[float, float]:
    """Seconds of a step, and of a prompt, with so many cells in each sequence, and room for so many."""
    from llamahybrid.hazards.bench import Bench
    from llamahybrid.hazards.context import Context

    end = cells + STEPS + PROMPT * PROMPTS
    shape = {
        "n_ctx": max(end, context_each) * sequences,
        "n_batch": 512,
        "n_ubatch": 512,
        "n_threads": 2,
        "n_threads_batch": 2,
    }
    context = Context(Bench(str(model)), {**shape, "n_seq_max": sequences, "kv_unified": True})
    for seq in range(sequences):
        context.grown(cells, seq, text=seq, chunk=100)

    def timed(rows: list[tuple[int, int, tuple[int]]]) -> float:
        began = perf_counter()
        assert context.decode(rows) == 0
        context.logits()
        return perf_counter() - began

    def row(seq: int, position: int) -> tuple[int, int, tuple[int]]:
        return context.bench.token(position, seq), position, (seq,)

    steps = [timed([row(s, cells + i) for s in range(sequences)]) for i in range(STEPS)]
    starts = range(cells + STEPS, end, PROMPT)
    prompts = [timed([row(0, p) for p in range(start, start + PROMPT)]) for start in starts]
    return statistics.median(steps), statistics.median(prompts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--cells", type=int, default=800)
    parser.add_argument(
        "--context", type=int, default=2048, help="of each sequence; 0: no more than it takes"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--child", action="store_true")
    arguments = parser.parse_args()
    if arguments.child:
        print(
            json.dumps(measure(arguments.model, arguments.sequences[0], arguments.cells, arguments.context))
        )
        return 0
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or make(
            "qwen35", Path(folder) / "model.gguf", params=PARAMETERS, context=32_768
        )
        table = Table("sequences", "engine", "step, ms", f"{PROMPT} tokens of one, ms")
        for sequences in arguments.sequences:
            found: dict[str, list[tuple[float, float]]] = {engine: [] for engine in ENGINES}
            for _ in range(arguments.rounds):
                for engine in ENGINES:
                    command = [sys.executable, "-m", "benchmarks.native_steps", "--child"]
                    command += ["--model", str(model)]
                    command += ["--sequences", str(sequences), "--cells", str(arguments.cells)]
                    command += ["--context", str(arguments.context)]
                    environment = {**os.environ, "LLAMAHYBRID_ENGINE": engine}
                    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
                    found[engine].append(json.loads(run.stdout.splitlines()[-1]))
            for engine, rounds in found.items():
                step, prompt = (1e3 * statistics.median(each) for each in zip(*rounds, strict=True))
                table.add_row(str(sequences), engine, f"{step:.0f}", f"{prompt:.0f}")
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    console.print(machine(), style="dim")
    return 0


if __name__ == "__main__":
    sys.exit(main())
