"""What restores, copies and removals cost beside 131,072 attention cells: patched engine to stock, ratios.

All cells of a unified cache are filled from states of 256 cells, as a cache of attention segments fills
them: through a scratch sequence (restore, copy, remove), and on the patched engine through ranges, which
are compared with stock's way. The last steps, beside an almost full cache, are shown one by one, and so is a
whole sequence that is forked and dropped. Each engine runs in processes of its own, in turns; the ratio is
that of the medians over the rounds. CPU time of the thread is taken: a busy machine does not count.
Run: python -m benchmarks.native_cells [--rounds N] [--cells N] [--patched FOLDER]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TARGET = 1.2
STEP = 256
LAST = 20
_HEADER = {"state": 16, "range": 8}  # bytes before the cells: magic, sequence, streams, count; magic, count
CASES = {
    "restore": "a state of 256 cells into an empty sequence",
    "copy": "it is copied to the long sequence",
    "remove": "and dropped",
    "fill": "the whole cache, through a scratch sequence",
    "ranges": "the whole cache, through ranges (stock: scratch sequence)",
    "replace": "a range of 256 cells that is there already (stock: scratch sequence)",
    "fork": "the whole long sequence",
    "share": "the same again, all of it shared",
    "drop": "and the fork dropped",
}


def clock(call: Callable[[], object]) -> float:
    """Milliseconds of CPU time."""
    started = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - started) / 1e6


class Cells:
    """A cache of `n` cells, filled from the first 256 under other positions."""

    def __init__(self, model: str, n: int) -> None:
        from llamahybrid.hazards.bench import Bench, lib

        self.n, self.lib = n, lib._lib
        shape = {"n_ctx": n, "n_ubatch": STEP, "n_seq_max": 2, "kv_unified": True}
        self.context = Bench(model).context(**shape)
        assert self.context.feed(0, STEP) == 0
        self.state = bytearray(self.context.save())
        self.range = bytearray(self._save_range())
        self.context.rm(0, -1, -1)

    @property
    def has_ranges(self) -> bool:
        return hasattr(self.lib, "llama_state_seq_set_data_range")

    def restore(self, position: int, seq: int) -> None:
        read = self.lib.llama_state_seq_set_data_ext(*self._at(self.state, "state", position), seq, 0)
        assert read == len(self.state)

    def set_range(self, position: int) -> None:
        place = [ctypes.c_int32(value) for value in (0, position, position + STEP)]
        read = self.lib.llama_state_seq_set_data_range(*self._at(self.range, "range", position), *place)
        assert read == len(self.range)

    def copy(self, source: int, target: int) -> None:
        self.context.cp(source, target)

    def remove(self, seq: int) -> None:
        assert self.context.rm(seq, -1, -1)

    def _save_range(self) -> bytes:
        if not self.has_ranges:
            return b""
        place = [ctypes.c_int32(value) for value in (0, 0, STEP)]
        size, get = self.lib.llama_state_seq_get_size_range, self.lib.llama_state_seq_get_data_range
        size.restype = get.restype = self.lib.llama_state_seq_set_data_range.restype = ctypes.c_size_t
        length = size(ctypes.c_void_p(self.context.ctx), *place)
        buffer = ctypes.create_string_buffer(length)
        assert get(ctypes.c_void_p(self.context.ctx), buffer, ctypes.c_size_t(length), *place) == length
        return buffer.raw

    def _at(self, state: bytearray, kind: str, position: int) -> tuple[Any, ...]:
        """Arguments for `state` from `position` on; a cell is saved as position, count and sequence."""
        import numpy as np

        head = _HEADER[kind]
        cells = np.frombuffer(state, np.int32, STEP * 3, head).reshape(STEP, 3)
        cells[:, 0] = np.arange(position, position + STEP)
        pointer = (ctypes.c_uint8 * len(state)).from_buffer(state)
        return ctypes.c_void_p(self.context.ctx), pointer, ctypes.c_size_t(len(state))


def measure(model: str, n: int) -> dict[str, float]:
    """Milliseconds of each of `CASES`, in this process's engine."""
    cells = Cells(model, n)
    steps: dict[str, list[float]] = {name: [] for name in ("restore", "copy", "remove")}
    for position in range(0, n - 2 * STEP, STEP):
        steps["restore"].append(clock(lambda position=position: cells.restore(position, 1)))
        steps["copy"].append(clock(lambda: cells.copy(1, 0)))
        steps["remove"].append(clock(lambda: cells.remove(1)))
    took = {name: statistics.median(each[-LAST:]) for name, each in steps.items()}
    took["fill"] = sum(map(sum, steps.values()))
    last = n - 3 * STEP
    if cells.has_ranges:
        took["replace"] = statistics.median(clock(lambda: cells.set_range(last)) for _ in range(LAST))
    whole: dict[str, list[float]] = {name: [] for name in ("fork", "share", "drop")}
    for _ in range(LAST):
        whole["fork"].append(clock(lambda: cells.copy(0, 1)))
        whole["share"].append(clock(lambda: cells.copy(0, 1)))
        whole["drop"].append(clock(lambda: cells.remove(1)))
    took |= {name: statistics.median(each) for name, each in whole.items()}
    if cells.has_ranges:
        cells.remove(0)
        took["ranges"] = sum(
            clock(lambda position=position: cells.set_range(position))
            for position in range(0, n - 2 * STEP, STEP)
        )
    else:
        took["ranges"] = took["fill"]
        took["replace"] = took["restore"] + took["copy"] + took["remove"]
    return took


def run(engine: str, model: Path, n: int) -> dict[str, float]:
    """`measure` in a process with this engine."""
    command = [sys.executable, __file__, "--measure", str(model), "--cells", str(n)]
    environment = {**os.environ, "LLAMAHYBRID_ENGINE": engine}
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if child.returncode:
        raise SystemExit(f"{engine}: {child.stderr[-2000:]}")
    answer: dict[str, float] = json.loads(child.stdout)
    return answer


def main(rounds: int, n: int, patched: str) -> int:
    from rich.console import Console
    from rich.table import Table

    from llamahybrid.evaluate.tables import machine
    from llamahybrid.tiny import make

    found: dict[str, list[dict[str, float]]] = {"stock": [], patched: []}
    with tempfile.TemporaryDirectory() as folder:
        model = make("llama", Path(folder) / "llama.gguf")
        for _ in range(rounds):
            for engine, each in found.items():
                each.append(run(engine, model, n))
    table = Table("case", "what", title=f"beside {n:,} cells, medians of {rounds} rounds")
    for head in ("stock ms", "patched ms", "ratio", "target", "holds"):
        table.add_column(head, justify="right")
    missed = 0
    for case, what in CASES.items():
        stock, ours = (statistics.median(each[case] for each in found[name]) for name in ("stock", patched))
        missed += ours > TARGET * stock
        verdict = "yes" if ours <= TARGET * stock else "no"
        table.add_row(case, what, f"{stock:.3f}", f"{ours:.3f}", f"{ours / stock:.2f}", str(TARGET), verdict)
    console = Console()
    console.print(table)
    console.print(machine(), style="dim")
    return 1 if missed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cells", type=int, default=131_072)
    parser.add_argument("--patched", default="patched", help="the patched engine, or a folder of libraries")
    parser.add_argument("--measure", metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.cells)))
    else:
        sys.exit(main(options.rounds, options.cells, options.patched))
