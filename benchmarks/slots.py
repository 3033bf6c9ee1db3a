"""What several slots cost: one request that has them to itself, and the step of eight beside a bare loop.

A Qwen3.5-architecture model of about 100M parameters, greedy, two threads. One request: the same prompts of
60 tokens and answers of 40 with `n_parallel` 1 and 4, in turn, in two processes, which are new every few
rounds; the ratio of each pair, and the median of those, for an answer's token and for the first. A step of
eight: eight answers in eight threads, and `llama_decode` over batches of one token of each of eight sequences
as long; the same way. On demand (`--only team`), what it costs that another thread keeps its OpenMP team.
Run: python -m benchmarks.slots [--rounds N] [--seconds S] [--model FILE] [--only alone] [--json FILE]
Exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import llama_cpp
from rich.console import Console

from llamahybrid import Llama
from llamahybrid.capi.calls import TokenBatch
from llamahybrid.evaluate.tables import machine
from llamahybrid.tiny import make
from tests.lab.quiet import silence

PARAMETERS = 100_000_000
CONTEXT = 8192
PROMPT, ANSWER = 60, 40
SEVERAL = 4
"""Slots beside one."""

TOGETHER = 8
"""Answers in lockstep."""

STARTING = 4
"""Tokens of each before that: eight threads do not begin at once."""

BOUNDS = {"alone": 1.02, "lockstep": 1.05}
"""Time of a token over that of the other, at most; of these two, unless others are asked for."""

SKIPPED = 1
"""Rounds at first that do not count, of each two processes,"""

TURNS = 4
"""and those that do. A process is faster or slower than its like for as long as it lives, by where its
buffers happen to lie: many short ones are compared, not two long ones."""

WORDS = np.random.default_rng(0).integers(10, 190, 1 << 16).tolist()

Round = Callable[[int], tuple[float, float]]
"""Milliseconds of an answer's token, or of a step, and to the first."""


def prompt_of(number: int) -> list[int]:
    """A prompt that no other number has."""
    first = 5 * PROMPT * number % (len(WORDS) - PROMPT)
    return WORDS[first : first + PROMPT]


def alone(llm: Llama) -> Round:
    """One request."""

    def round_of(number: int) -> tuple[float, float]:
        began = time.perf_counter()
        with closing(llm.generate(prompt_of(number), temp=0.0)) as answer:
            next(answer)
            first = time.perf_counter()
            for _ in islice(answer, ANSWER):
                pass
            return 1e3 * (time.perf_counter() - first) / ANSWER, 1e3 * (first - began)

    return round_of


def beside_a_team(llm: Llama) -> Round:
    """One request, while another thread that has computed keeps its team."""
    computed = threading.Event()

    def compute() -> None:
        llm.eval(WORDS[:1])
        computed.set()
        threading.Event().wait()

    threading.Thread(target=compute, daemon=True).start()
    computed.wait()
    return alone(llm)


def lockstep(llm: Llama) -> Round:
    """As many answers at once as there are slots."""

    def round_of(number: int) -> tuple[float, float]:
        start = threading.Barrier(TOGETHER)
        times: list[tuple[float, float]] = []

        def client(index: int) -> None:
            with closing(llm.generate(prompt_of(TOGETHER * number + index), temp=0.0)) as answer:
                next(answer)
                start.wait()
                for _ in islice(answer, STARTING):
                    pass
                began = time.perf_counter()
                for _ in islice(answer, ANSWER):
                    pass
                times.append((began, time.perf_counter()))
                start.wait()

        threads = [threading.Thread(target=client, args=(index,)) for index in range(TOGETHER)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return 1e3 * (max(end for _, end in times) - min(began for began, _ in times)) / ANSWER, 0.0

    return round_of


def bare(context: Any) -> Round:
    """The same batches, and nothing beside `llama_decode` and the wait for its logits."""
    batch = TokenBatch(PROMPT, sequences=True)
    memory = llama_cpp.llama_get_memory(context)
    everyone = range(TOGETHER)

    def decode() -> None:
        assert llama_cpp.llama_decode(context, batch.batch) == 0
        llama_cpp.llama_get_logits(context)

    def round_of(number: int) -> tuple[float, float]:
        llama_cpp.llama_memory_clear(memory, False)
        for seq in everyone:
            batch.fill(prompt_of(TOGETHER * number + seq), 0, "last", seq)
            decode()
        began = time.perf_counter()
        for position in range(PROMPT, PROMPT + ANSWER):
            tokens = [WORDS[TOGETHER * position + seq] for seq in everyone]
            batch.fill_rows(tokens, [position] * TOGETHER, list(everyone))
            decode()
        return 1e3 * (time.perf_counter() - began) / ANSWER, 0.0

    return round_of


def ours(slots: int, model: Path) -> Llama:
    options: dict[str, Any] = {"n_ctx": CONTEXT, "n_threads": 2, "n_threads_batch": 2, "verbose": False}
    return Llama(str(model), n_parallel=slots, **options)


def context_of(model: Path) -> Any:
    """A context as ours is, in a process where nobody else has computed: one OpenMP team."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.kv_unified = CONTEXT, TOGETHER, True
    params.n_threads = params.n_threads_batch = 2
    loaded = llama_cpp.llama_model_load_from_file(str(model).encode(), llama_cpp.llama_model_default_params())
    return llama_cpp.llama_init_from_model(loaded, params)


SUBJECTS: dict[str, Callable[[Path], Round]] = {
    "one slot": lambda model: alone(ours(1, model)),
    f"{SEVERAL} slots": lambda model: alone(ours(SEVERAL, model)),
    "bare loop": lambda model: bare(context_of(model)),
    f"{TOGETHER} answers": lambda model: lockstep(ours(TOGETHER, model)),
    "beside a team": lambda model: beside_a_team(ours(1, model)),
}
PAIRS = {
    "alone": ["one slot", f"{SEVERAL} slots"],
    "lockstep": ["bare loop", f"{TOGETHER} answers"],
    "team": ["one slot", "beside a team"],
}


def child(name: str, model: Path) -> int:
    """Be one subject: a round for each number that comes in."""
    silence()
    round_of = SUBJECTS[name](model)
    for line in sys.stdin:
        print(json.dumps(round_of(int(line))), flush=True)
    return 0


def opened(stack: ExitStack, name: str, model: Path) -> Callable[[int], list[float]]:
    """A process that is one subject, until the stack is closed."""
    command = [sys.executable, "-m", "benchmarks.slots", "--model", str(model), "--child", name]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process: Any = stack.enter_context(subprocess.Popen(command, **pipes))
    stack.callback(process.stdin.close)

    def play(number: int) -> list[float]:
        print(number, file=process.stdin, flush=True)
        times: list[float] = json.loads(process.stdout.readline())
        return times

    return play


def compare(pair: list[str], model: Path, rounds: int, seconds: float) -> list[list[list[float]]]:
    """Rounds of two subjects in turn, [round][subject] as `Round` gives it; none begin after so long."""
    seen: list[list[list[float]]] = []
    until = time.monotonic() + seconds
    while len(seen) < rounds and (not seen or time.monotonic() < until):
        with ExitStack() as stack:
            play = [opened(stack, name, model) for name in pair]
            for turn in range(SKIPPED + TURNS):
                number = len(seen) + turn
                row: list[list[float]] = [[], []]
                for index in (0, 1) if number % 2 else (1, 0):
                    row[index] = play[index](number)
                if turn >= SKIPPED:
                    seen.append(row)
    return seen


def main(arguments: Any) -> int:
    console = Console(width=None if sys.stdout.isatty() else 110)
    missed, results = False, {}
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or make(
            "qwen35", Path(folder) / "model.gguf", params=PARAMETERS, context=32_768
        )
        for kind in arguments.only or BOUNDS:
            pair = PAIRS[kind]
            rows = compare(pair, model, arguments.rounds, arguments.seconds)
            token, first = ([row[1][at] / row[0][at] for row in rows if row[0][at]] for at in range(2))
            ratio = statistics.median(token)
            times = {name: statistics.median(row[i][0] for row in rows) for i, name in enumerate(pair)}
            console.print(
                f"{pair[1]} over {pair[0]}: {ratio:.3f} a token (at most {BOUNDS.get(kind, '-')}), "
                + ", ".join(f"{name} {t:.2f} ms" for name, t in times.items())
                + (f"; {statistics.median(first):.3f} the first" if first else "")
                + f"; {len(rows)} pairs"
            )
            missed |= ratio > BOUNDS.get(kind, ratio)
            results[kind] = {
                "pairs": len(rows),
                "token": round(ratio, 4),
                "quartiles": [round(q, 4) for q in statistics.quantiles(token * 2, n=4)],
                "first": round(statistics.median(first), 4) if first else None,
                "milliseconds": {name: round(t, 3) for name, t in times.items()},
            }
    console.print(machine(), style="dim")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": machine(), **results}, indent=1) + "\n")
    return int(missed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=600, help="Begin no rounds after so many, of each.")
    parser.add_argument("--only", choices=PAIRS, nargs="+")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=SUBJECTS, help="Be one subject.")
    parsed = parser.parse_args()
    sys.exit(child(parsed.child, parsed.model) if parsed.child else main(parsed))
