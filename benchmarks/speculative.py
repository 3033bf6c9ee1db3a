"""Time of an answer with drafts: ratios to no drafts, measured in one run.

A Qwen3.5-architecture model of about 100M parameters; the answer is prescribed, for the weights are random.
Once it quotes a document of the prompt with a word changed here and there, as an edit of code does, and once
it is new. With and without prompt-lookup drafts take turns, and the ratio is the median over the rounds.
Run: python -m benchmarks.speculative [--rounds N] [--arch ARCH] [--tokens N] [--cpu-time]
On a busy machine --cpu-time takes CPU seconds of one thread instead of wall time, for deciding on drafts too.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.figures import machine, milliseconds
from llamahybrid import Llama
from llamahybrid.harness.workloads.speech import Speech
from llamahybrid.tiny import make

# isort: split
import numpy as np
from llama_cpp import LogitsProcessorList
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

DOCUMENT = 600
KEPT = 25
"""Distance of changed words in the quotation."""
GUESSES = 10
HEADS = ("plain ms", "drafts ms", "ratio", "quartiles", "target", "tokens per batch", "right", "holds")


@dataclass
class Case:
    """A kind of answer: its targets, and what was measured."""

    name: str
    quotes: bool
    time: float
    """Decode time over that without drafts: at most this."""
    least: float
    """Tokens per native batch: at least this."""
    plain: list[float] = field(default_factory=list)
    drafted: list[float] = field(default_factory=list)
    per_batch: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def text(self, speech: Speech, rng: random.Random, tokens: int) -> tuple[list[int], list[int]]:
        """A prompt with a document, and the answer to it."""
        document = speech.words(DOCUMENT)
        if not self.quotes:
            return document, speech.words(tokens)
        start = rng.randrange(DOCUMENT - tokens)
        answer = document[start : start + tokens]
        for place in range(rng.randrange(KEPT), tokens, KEPT):
            answer[place] = speech.words(1)[0]
        return document, answer

    def row(self) -> tuple[bool, list[str]]:
        """Whether the targets are met, and the cells of the table."""
        ratios = [b / a for a, b in zip(self.plain, self.drafted, strict=True)]
        low, ratio, high = statistics.quantiles(ratios)
        per_batch = statistics.median(self.per_batch)
        holds = ratio <= self.time and per_batch >= self.least
        sides = (milliseconds(statistics.median(side)) for side in (self.plain, self.drafted))
        numbers = (f"{ratio:.3f}", f"{low:.3f}-{high:.3f}", f"{self.time:.2f}", f"{per_batch:.2f}")
        right = f"{statistics.median(self.accepted):.0%}"
        return holds, [self.name, *sides, *numbers, right, "yes" if holds else "no"]


def seconds(llm: Llama, prompt: list[int], answer: list[int]) -> float:
    """Time from the first token to the last."""
    said: list[int] = []

    def prescribe(ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        scores[answer[len(said)]] = 1e9
        return scores

    with closing(llm.generate(prompt, temp=0.0, logits_processor=LogitsProcessorList([prescribe]))) as stream:
        said.append(next(stream))
        gc.collect()
        started = time.perf_counter()
        while len(said) < len(answer):
            said.append(next(stream))
        took = time.perf_counter() - started
    assert said == answer
    return took


def measure(model: Path, cases: list[Case], rounds: int, tokens: int, threads: int | None) -> None:
    """Times by case, interleaved so that a busy machine slows both alike."""
    count = {"n_threads": threads, "n_threads_batch": threads} if threads else {}
    common: dict[str, Any] = {"n_ctx": 2048, "verbose": False, **count}
    draft, rng = LlamaPromptLookupDecoding(num_pred_tokens=GUESSES), random.Random(1)
    with (
        closing(Llama(str(model), **common)) as plain,
        closing(Llama(str(model), **common, draft_model=draft)) as drafting,
    ):
        speech = Speech(plain)
        for turn in track(range(rounds + 1), "measuring", transient=True):
            for case in cases:
                prompt, answer = case.text(speech, rng, tokens)
                for side in (0, 1) if turn % 2 else (1, 0):
                    lapse = seconds((plain, drafting)[side], prompt, answer)
                    if turn:  # the first is for learning what things cost
                        (case.plain, case.drafted)[side].append(lapse)
                report = drafting.last_request
                if turn and report is not None:
                    case.per_batch.append((report.generated - 1) / report.steps)
                    case.accepted.append(report.accepted / max(1, report.drafted))


def main(arch: str, rounds: int, tokens: int, cpu_time: bool) -> int:
    cases = [Case("a document quoted and edited", True, 0.8, 1.5), Case("a text that is new", False, 1.05, 0)]
    with tempfile.TemporaryDirectory() as folder:
        model = make(arch, Path(folder) / "model.gguf", params=100_000_000)
        size = model.stat().st_size
        if cpu_time:
            time.perf_counter = time.process_time
        measure(model, cases, rounds, tokens, 1 if cpu_time else None)
    title = f"{arch}, {size / 2e6:.0f}M parameters, answers of {tokens} tokens, medians of {rounds} rounds"
    table = Table("answer", title=title + ", CPU time" * cpu_time)
    for head in HEADS:
        table.add_column(head, justify="right")
    rows = [case.row() for case in cases]
    for _, cells in rows:
        table.add_row(*cells)
    console = Console()
    console.print(table)
    console.print(machine(), style="dim")
    return 0 if all(holds for holds, _ in rows) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--arch", default="qwen35")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--cpu-time", action="store_true")
    arguments = parser.parse_args()
    sys.exit(main(arguments.arch, arguments.rounds, arguments.tokens, arguments.cpu_time))
