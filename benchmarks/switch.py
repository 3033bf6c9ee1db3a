"""What it costs to go from one warm conversation to another: beside a memcpy of its bytes, and decoding it.

A Qwen3.5-architecture model of about 100M parameters and two chats of 8,000 tokens that take turns; each
turn's new range is stored after the answer. The switch is planning and restoring, by the request's report;
the memcpy is of the segments and the snapshot that were loaded, and follows each switch. Medians.
Run: python -m benchmarks.switch [--tokens N] [--rounds N] [--no-flash]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from llamahybrid import Llama, PromptCache
from llamahybrid.core.report import RequestReport
from llamahybrid.harness.tables import machine
from llamahybrid.harness.workloads.speech import Speech
from llamahybrid.prompt_cache import Plan
from llamahybrid.tiny import make

MEMCPY_TARGET, DECODE_TARGET = 3.0, 0.01
MIB = 1 << 20


class Watched(PromptCache):
    """Remembers the last plan."""

    last: Plan | None = None

    def release(self, plan: Plan) -> None:
        self.last = plan
        super().release(plan)

    def loaded_bytes(self) -> int:
        """What the last plan loaded."""
        assert self.last is not None
        assert self.last.checkpoint is not None, "nothing was restored"
        return self.last.checkpoint.snapshot.nbytes + sum(s.nbytes for s in self.last.segments)


def ask(llm: Llama, chat: list[int], speech: Speech) -> RequestReport:
    """One short turn."""
    chat += speech.message(8) + speech.reply()
    stream = llm.generate(chat, temp=0.0)
    chat += islice(stream, 4)
    stream.close()
    assert llm.last_request is not None
    return llm.last_request


def memcpy_seconds(n_bytes: int) -> float:
    """A copy between touched buffers."""
    source, target = np.ones(n_bytes, np.uint8), np.ones(n_bytes, np.uint8)
    started = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - started


def main(tokens: int, rounds: int, flash: bool) -> int:
    console, cache = Console(), Watched(2 << 30)
    switches, copies, sizes = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        model = make("qwen35", Path(folder) / "model.gguf", params=100_000_000)
        options = {"n_ctx": tokens + 1024, "flash_attn": flash, "verbose": False}
        with closing(Llama(str(model), prompt_cache=cache, **options)) as llm:  # type: ignore[arg-type]
            speech = Speech(llm)
            chats = [speech.message(tokens, "system") for _ in range(2)]
            cold = [ask(llm, chat, speech) for chat in chats]
            decoding = statistics.median(r.prefill_seconds / r.left * tokens for r in cold)
            for turn in range(rounds):
                report = ask(llm, chats[turn % 2], speech)
                assert report.left < 64, report.reason
                switches.append(report.plan_seconds + report.restore_seconds)
                sizes.append(cache.loaded_bytes())
                copies.append(memcpy_seconds(sizes[-1]))
    switch, copy = statistics.median(switches), statistics.median(copies)
    to_copy = statistics.median(s / c for s, c in zip(switches, copies, strict=True))
    table = Table("values", title=f"two chats of {tokens:,} tokens, medians of {rounds} switches")
    for head in ("ms", "memcpy ms", "decoding ms", "MiB", "/ memcpy", "target", "/ decoding", "target"):
        table.add_column(head, justify="right")
    figures = (f"{switch * 1e3:.1f}", f"{copy * 1e3:.1f}", f"{decoding * 1e3:,.0f}")
    shares = (f"{to_copy:.2f}", str(MEMCPY_TARGET), f"{switch / decoding:.4f}", str(DECODE_TARGET))
    flashing = "as they are" if flash else "transposed"
    table.add_row(flashing, *figures, f"{statistics.median(sizes) / MIB:.0f}", *shares)
    console.print(table)
    console.print(machine(), style="dim")
    return 1 if to_copy > MEMCPY_TARGET or switch / decoding > DECODE_TARGET else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-flash", action="store_true", help="values transposed, as is upstream's default")
    arguments = parser.parse_args()
    sys.exit(main(arguments.tokens, arguments.rounds, not arguments.no_flash))
