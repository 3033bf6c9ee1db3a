"""What it costs to save a state into RAM, checksum included: ratio to a plain memcpy of as many bytes.

Snapshots and attention segments of models whose states take 1 MiB and more, flash attention on. Checkpoints
are kept, so each save goes into another touched buffer than the one before; so does the memcpy that follows
it. The ratio is the median over the rounds. Saves are measured as a prefill makes them: memory is looked at
deeply once for all of them, at the prompt's end, and after an answer; what that takes is the last column.
Then what filling a buffer takes that is used again, or new, in huge pages and without (`prompt_cache.ram`).
Run: python -m benchmarks.save [--rounds N]
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from llamahybrid import Llama
from llamahybrid.evaluate.tables import machine
from llamahybrid.memory.sequence import LiveSequence
from llamahybrid.prompt_cache.base import Bytes
from llamahybrid.prompt_cache.ram import new_buffer
from llamahybrid.tiny import make

TARGET = 1.5
MIB = 1 << 20
MODELS = {"qwen35": 100_000_000, "jamba": 60_000_000, "mamba": 60_000_000}
TOKENS = 2000
FILLED = 256 << 10, 5 << 19, 8 << 20, 20 << 20, 64 << 20
"""Bytes of the buffers that are filled."""

KEPT = 1 << 30
"""Bytes of those in huge pages that are kept at most, so that others get memory which nobody had before."""


class Buffers:
    """Touched buffers, handed out in turn."""

    def __init__(self) -> None:
        self._all: list[Bytes] = []
        self._next = 0

    def __call__(self, n: int) -> Bytes:
        """The next buffer; all are made anew when the size changes."""
        if not self._all or self._all[0].nbytes != n:
            self._all = [np.ones(n, np.uint8) for _ in range(max(2, min(32, (128 << 20) // n)))]
        self._next += 1
        return self._all[self._next % len(self._all)]


def ratio(save: Callable[[], Bytes], rounds: int) -> tuple[int, float, float, float]:
    """(bytes, ms of a save, ms of a memcpy, ratio): medians, taken in turns."""
    size = save().nbytes
    source, targets = np.ones(size, np.uint8), Buffers()
    targets(size)
    saves, copies = [], []
    for _ in range(rounds):
        started = time.perf_counter()
        save()
        saved = time.perf_counter()
        np.copyto(targets(size), source)
        copies.append(time.perf_counter() - saved)
        saves.append(saved - started)
    each = [a / b for a, b in zip(saves, copies, strict=True)]
    return size, statistics.median(saves) * 1e3, statistics.median(copies) * 1e3, statistics.median(each)


def fills(size: int, rounds: int) -> list[float]:
    """Milliseconds to make and fill one: used before, new (ours), with pages as they come, in huge ones."""
    source, used = np.ones(size, np.uint8), np.ones(size, np.uint8)
    kept: list[Bytes] = []

    def huge() -> Bytes:
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE)
        if len(kept) * size >= KEPT:
            del kept[::2]
        kept.append(np.frombuffer(mapping, np.uint8))
        return kept[-1]

    new = partial(new_buffer, size)
    makers: tuple[Callable[[], Bytes], ...] = (lambda: used, new, partial(new, filled=False), huge)
    took: list[list[float]] = [[] for _ in makers]
    for _ in range(rounds):
        for times, made in zip(took, makers, strict=True):
            started = time.perf_counter()
            np.copyto(made(), source)
            times.append(time.perf_counter() - started)
    return [statistics.median(times) * 1e3 for times in took]


def look(live: LiveSequence, rounds: int) -> float:
    """Milliseconds of a deep look at memory: the median."""
    took = []
    for _ in range(rounds):
        started = time.perf_counter()
        assert live.fault() is None
        took.append(time.perf_counter() - started)
    return statistics.median(took) * 1e3


def cases(live: LiveSequence) -> dict[str, Callable[[], Bytes]]:
    """What is saved: the recurrent state, and attention of all tokens."""
    buffer, out = Buffers(), {}

    def snapshot() -> Bytes:
        record = live.snapshot(buffer, deep=False)
        assert record is not None, "the state cannot be vouched for"
        return record

    def segment() -> Bytes:
        saved = live.page_out(0, live.n, buffer, deep=False)
        assert saved is not None, "the attention cannot be vouched for"
        return saved.record

    out["snapshot"] = snapshot
    if live.profile.pager is not None:
        out["segment"] = segment
    return out


def main(rounds: int) -> int:
    console = Console()
    table = Table("model", "what", title=f"medians of {rounds} rounds, {TOKENS:,} tokens")
    for head in ("MiB", "save ms", "memcpy ms", "ratio", "target", "holds", "deep look ms"):
        table.add_column(head, justify="right")
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        for arch, params in MODELS.items():
            model = make(arch, Path(folder) / f"{arch}.gguf", params=params)
            with closing(Llama(str(model), n_ctx=4096, flash_attn=True, verbose=False)) as llm:
                llm.eval([(7 * i + 1) % llm.n_vocab() for i in range(TOKENS)])
                runner = llm.runner
                assert runner is not None
                deep = f"{look(runner.live, rounds):.2f}"
                for what, save in cases(runner.live).items():
                    size, taken, copied, found = ratio(save, rounds)
                    counts = size >= MIB
                    missed += counts and found > TARGET
                    verdict = ("yes" if found <= TARGET else "no") if counts else "small"
                    row = (f"{size / MIB:.1f}", f"{taken:.2f}", f"{copied:.2f}", f"{found:.2f}")
                    table.add_row(arch, what, *row, str(TARGET), verdict, deep)
    console.print(table)
    table = Table("filling, ms", "used before", "new", "new, pages as they come", "new, huge pages")
    for size in FILLED:
        table.add_row(f"{size / MIB:.2f} MiB", *(f"{ms:.3f}" for ms in fills(size, rounds)))
    console.print(table)
    console.print(machine(), style="dim")
    return 1 if missed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    sys.exit(main(parser.parse_args().rounds))
