"""Instructions that a prefill and 100 decodes take, patched over stock: what the patches cost, to the digit.

callgrind counts them in the one thread there is, so the figures repeat where timings do not. Both libraries
must be built with the same flags, and without instructions that valgrind does not know (AVX-512):
CMAKE_ARGS=-DGGML_NATIVE=OFF llamahybrid engine build, and the same with --source for the unpatched sources.
Run: python -m benchmarks.instructions STOCK_FOLDER PATCHED_FOLDER
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.versions import callgrind, counting

TARGET = 1.005
MODELS = ("qwen35", "jamba", "mamba", "llama")
PREFILL, DECODES = 256, 100
ROUNDS = 9

_WORK = """
import ctypes, sys, time
from llama_cpp import Llama
llm = Llama(sys.argv[1], n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False, logits_all=False)
prefill, decodes, rounds = map(int, sys.argv[2:5])
if sys.argv[5:]:  # only decodes count: the interpreter's own instructions vary by a percent
    toggle, decode = ctypes.CDLL(sys.argv[5]).toggle, llm._ctx.decode
    llm._ctx.decode = lambda batch: (toggle(), decode(batch), toggle())
for _ in range(rounds):
    llm.reset()
    started = time.perf_counter()
    if prefill:
        llm.eval([(7 * i + 1) % 120 for i in range(prefill)])
    for i in range(decodes):
        llm.eval([(5 * i + 2) % 120])
    print(time.perf_counter() - started)
"""


def environment(folder: str) -> Mapping[str, str]:
    """Where llama_cpp finds its library."""
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    return {**os.environ, **fixed, "LLAMA_CPP_LIB_PATH": folder}


def instructions(folder: str, model: Path, prefill: int, decodes: int) -> int:
    """Instructions inside decodes of a process that does this once."""
    with tempfile.TemporaryDirectory() as scratch:
        work = ["-c", _WORK, str(model), str(prefill), str(decodes), "1", counting(Path(scratch))]
        return callgrind(work, Path(scratch), environment(folder))


def counts(folder: str, model: Path) -> tuple[int, int]:
    """Instructions of a prefill, and of decodes behind it."""
    prefill = instructions(folder, model, PREFILL, 0)
    return prefill, instructions(folder, model, PREFILL, DECODES) - prefill


def seconds(folder: str, model: Path) -> list[float]:
    """Wall seconds of prefill and decodes together, one for each round."""
    command = [sys.executable, "-c", _WORK, str(model), str(PREFILL), str(DECODES), "3"]
    printed = subprocess.run(command, env=environment(folder), check=True, capture_output=True, text=True)
    return [float(line) for line in printed.stdout.split()]


def main(unpatched: str, patched: str) -> int:
    from llamahybrid import tiny

    console = Console()
    if shutil.which("valgrind") is None:
        console.print("valgrind is not installed (Debian package valgrind)", style="red")
        return 2
    table = Table("model", title="patched over stock")
    for head in ("prefill", "decodes", "target", "holds", "wall time", "quartiles"):
        table.add_column(head, justify="right")
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        for arch in MODELS:
            model = tiny.make(arch, Path(folder) / f"{arch}.gguf")
            stock, ours = counts(unpatched, model), counts(patched, model)
            ratios = [b / a for a, b in zip(stock, ours, strict=True)]
            times: list[float] = []
            for turn in range(ROUNDS):
                sides = (unpatched, patched) if turn % 2 else (patched, unpatched)
                took = {side: min(seconds(side, model)) for side in sides}
                times.append(took[patched] / took[unpatched])
            low, middle, high = statistics.quantiles(times)
            holds = max(ratios) <= TARGET
            missed += not holds
            row = (*(f"{r:.4f}" for r in ratios), str(TARGET), "yes" if holds else "no", f"{middle:.3f}")
            table.add_row(arch, *row, f"{low:.3f}-{high:.3f}")
    console.print(table)
    return 1 if missed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stock", help="folder of the unpatched libraries")
    parser.add_argument("patched", help="folder of the patched libraries")
    arguments = parser.parse_args()
    sys.exit(main(arguments.stock, arguments.patched))
