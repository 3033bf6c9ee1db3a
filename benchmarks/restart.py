"""Time to the first token after a restart: a conversation read from disk against decoding it again.

Each round starts a new `Llama` on the same folder, and one without; the prompt is the conversation and a few
tokens more. The system keeps the files in memory if it can: what is measured is reading, checking, loading.
Run: python -m benchmarks.restart [--tokens N] [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.table import Table

from llamahybrid import Llama, PromptCache
from llamahybrid.evaluate.tables import machine
from llamahybrid.tiny import make

TARGET = 0.15
MODELS = ("qwen35", "jamba", "mamba")
PARAMS = 100_000_000


def first_token(llm: Llama, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and tokens that were not decoded."""
    stream = llm.generate(prompt, temp=0.0)
    next(stream)
    report = llm.last_request
    stream.close()
    assert report is not None
    return report.first_token_seconds, report.cached


def main(tokens: int, rounds: int) -> int:
    console = Console()
    table = Table("model", title=f"medians of {rounds} rounds, {tokens:,} tokens")
    for head in ("MiB on disk", "decode s", "restart s", "ratio", "target", "holds"):
        table.add_column(head, justify="right")
    missed = 0
    for arch in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            model = make(arch, Path(folder) / "model.gguf", params=PARAMS)
            options = {"n_ctx": tokens + 256, "verbose": False}
            with closing(
                Llama(str(model), prompt_cache=PromptCache(None, f"{folder}/cache"), **options)
            ) as llm:
                prompt = [(7 * i + 1) % llm.n_vocab() for i in range(tokens)]
                first_token(llm, prompt)
            cold, warm, size = [], [], 0
            for _ in range(rounds):
                for times, where in ((warm, f"{folder}/cache"), (cold, None)):
                    with closing(Llama(str(model), prompt_cache=PromptCache(None, where), **options)) as llm:
                        seconds, cached = first_token(llm, [*prompt, 3, 5, 7])
                        assert cached == (tokens if where else 0), f"{cached} tokens were cached"
                        times.append(seconds)
                        size = llm.prompt_cache.stats().extra.get("disk_bytes", size)
            ratio = statistics.median(w / c for w, c in zip(warm, cold, strict=True))
            missed += ratio > TARGET
            row = (size / 2**20, statistics.median(cold), statistics.median(warm), ratio)
            table.add_row(arch, *(f"{x:.3f}" for x in row), str(TARGET), "yes" if ratio <= TARGET else "no")
    console.print(table)
    console.print(machine(), style="dim")
    return 1 if missed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    sys.exit(main(arguments.tokens, arguments.rounds))
