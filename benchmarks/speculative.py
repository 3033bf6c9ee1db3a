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
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamahybrid import Llama

# isort: split
import numpy as np
from llama_cpp import LogitsProcessorList
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.figures import machine, milliseconds
from llamahybrid.harness.workloads.speech import Speech
from llamahybrid.tiny import make

Clock = Callable[[], float]

DOCUMENT = 600
KEPT = 25
"""Distance of changed words in the quotation."""
GUESSES = 10


@dataclass(frozen=True)
class Case:
    name: str
    quotes: bool
    time: float
    """Decode time over that without drafts: at most this."""
    per_batch: float
    """Tokens per native batch: at least this."""


CASES = (
    Case("a document quoted and edited", True, 0.8, 1.5),
    Case("a text that is new", False, 1.05, 0.0),
)


@dataclass
class Times:
    plain: list[float] = field(default_factory=list)
    drafted: list[float] = field(default_factory=list)
    per_batch: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)


def text(speech: Speech, rng: random.Random, case: Case, tokens: int) -> tuple[list[int], list[int]]:
    """A prompt with a document, and the answer to it."""
    document = speech.words(DOCUMENT)
    if not case.quotes:
        return document, speech.words(tokens)
    start = rng.randrange(DOCUMENT - tokens)
    answer = document[start : start + tokens]
    for place in range(rng.randrange(KEPT), tokens, KEPT):
        answer[place] = speech.words(1)[0]
    return document, answer


def seconds(llm: Llama, prompt: list[int], answer: list[int], clock: Clock) -> float:
    """Time from the first token to the last."""
    said: list[int] = []

    def prescribe(ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        scores[answer[len(said)]] = 1e9
        return scores

    stream = llm.generate(prompt, temp=0.0, logits_processor=LogitsProcessorList([prescribe]))
    said.append(next(stream))
    gc.collect()
    started = clock()
    while len(said) < len(answer):
        said.append(next(stream))
    took = clock() - started
    stream.close()
    assert said == answer
    return took


def measure(model: Path, rounds: int, tokens: int, clock: Clock, threads: int | None) -> dict[Case, Times]:
    """Times by case, interleaved so that a busy machine slows both alike."""
    times = {case: Times() for case in CASES}
    count = {"n_threads": threads, "n_threads_batch": threads}
    common: dict[str, Any] = {"n_ctx": 2048, "verbose": False, **(count if threads else {})}
    draft = LlamaPromptLookupDecoding(num_pred_tokens=GUESSES)
    rng = random.Random(1)
    with (
        closing(Llama(str(model), **common)) as plain,
        closing(Llama(str(model), **common, draft_model=draft)) as drafting,
        Progress(transient=True) as progress,
    ):
        speech = Speech(plain)
        task = progress.add_task("measuring", total=(rounds + 1) * len(CASES))
        for turn in range(rounds + 1):  # the first is for learning what things cost
            for case, took in times.items():
                prompt, answer = text(speech, rng, case, tokens)
                for side in (0, 1) if turn % 2 else (1, 0):
                    lapse = seconds((plain, drafting)[side], prompt, answer, clock)
                    if turn:
                        (took.plain, took.drafted)[side].append(lapse)
                report = drafting.last_request
                if turn and report is not None:
                    took.per_batch.append((report.generated - 1) / report.steps)
                    took.accepted.append(report.accepted / max(1, report.drafted))
                progress.advance(task)
    return times


def main(arch: str, rounds: int, tokens: int, cpu_time: bool) -> int:
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        model = make(arch, Path(folder) / "model.gguf", params=100_000_000)
        size = model.stat().st_size
        if cpu_time:
            time.perf_counter = time.process_time
        clock = time.perf_counter
        times = measure(model, rounds, tokens, clock, 1 if cpu_time else None)
    title = f"{arch}, {size / 2e6:.0f}M parameters, answers of {tokens} tokens, medians of {rounds} rounds"
    table = Table("answer", title=title + ", CPU time" * cpu_time)
    for head in (
        "plain ms",
        "drafts ms",
        "ratio",
        "quartiles",
        "target",
        "tokens per batch",
        "right",
        "holds",
    ):
        table.add_column(head, justify="right")
    missed = 0
    for case, took in times.items():
        low, ratio, high = statistics.quantiles(b / a for a, b in zip(took.plain, took.drafted, strict=True))
        per_batch = statistics.median(took.per_batch)
        holds = ratio <= case.time and per_batch >= case.per_batch
        missed += not holds
        row = (milliseconds(statistics.median(side)) for side in (took.plain, took.drafted))
        right = f"{statistics.median(took.accepted):.0%}"
        rest = (
            f"{low:.3f}-{high:.3f}",
            f"{case.time:.2f}",
            f"{per_batch:.2f}",
            right,
            "yes" if holds else "no",
        )
        table.add_row(case.name, *row, f"{ratio:.3f}", *rest)
    console.print(table)
    console.print(machine(), style="dim")
    return 1 if missed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--arch", default="qwen35")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--cpu-time", action="store_true")
    arguments = parser.parse_args()
    sys.exit(main(arguments.arch, arguments.rounds, arguments.tokens, arguments.cpu_time))
