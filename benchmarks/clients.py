"""Speed at defaults: alone beside stock, and several clients beside llama-server of the same source.

A Qwen3.5-architecture model of about 100M parameters, greedy; each subject of each round (in `alone`: of all
rounds) is a process of its own, in turn, since OpenMP's threads of one would stand in the way of the next;
medians of the rounds' ratios.

alone   milliseconds a token of a streamed completion and of a `generate` loop, cold prompts; beside stock
first   time to the first token of a chat of 3,500 tokens whose thinking is stripped; beside both
chats   clients with a common system prompt whose chats lose their thinking, sizes drawn; beside llama-server
long    a cold prompt of 4,000 tokens beside three answers; beside llama-server
away    first token of a chat of 3,500 tokens whose model had made way for another, opening included; beside
        llama-server's router, and a process for each model (ollama's way; llama-server's)
drafts  milliseconds a token with prompt-lookup drafts, of an answer that quotes its document with a word in
        25 changed, as an edit of code does, and of a new text; answers are prescribed, for weights are random

Run: python -m benchmarks.clients [PART ...] [--rounds N] [--clients 4 8] [--threads N] [--n-gpu-layers N]
[--json FILE]
The file is written part by part. Exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.alone import alone
from benchmarks.figures import machine
from benchmarks.subjects import CONTEXT, Result, Stream, Subject, words
from llamahybrid.engine.process import display
from llamahybrid.tiny import make
from tests.lab import server_build
from tests.lab.campaign import silence

PARAMETERS = 100_000_000
LONG = 4_000
BESIDE = 3
CHAT = 3_500


@dataclass(frozen=True)
class Target:
    """A bound of a median over the rounds: of a measure, or of its ratio to another subject's (`over`)."""

    measure: str
    of: str
    over: str | None
    most: float | None = None
    least: float | None = None

    def met(self, ratio: float) -> bool:
        return (self.most is None or ratio <= self.most) and (self.least is None or ratio >= self.least)

    def ratio(self, runs: Mapping[str, Sequence[Result]]) -> float:
        """The median over the rounds, of the runs of each subject."""
        mine = [run[self.measure] for run in runs[self.of]]
        theirs = [1.0] * len(mine) if self.over is None else [run[self.measure] for run in runs[self.over]]
        return float(statistics.median(a / b for a, b in zip(mine, theirs, strict=True)))

    def told(self, ratio: float) -> str:
        bound = f"at most {self.most}" if self.least is None else f"at least {self.least}"
        return f"{self.of}{f' / {self.over}' if self.over else ''} {ratio:.3f} ({bound})"


PARTS: dict[str, tuple[tuple[str, ...], tuple[Target, ...]]] = {
    "alone": (
        ("stock", "ours"),
        (
            Target("streamed, ms a token", "ours", "stock", most=1.0),
            *(
                Target(measure, "ours", "stock", most=1.03)
                for measure in ("generate, ms a token", "cold 1,000 tokens, s", "cold 3,500 tokens, s")
            ),
        ),
    ),
    "first": (
        ("stock", "ours", "llama-server"),
        (
            Target("first token, s", "ours", "stock", most=0.03),
            Target("first token, s", "ours", "llama-server", most=0.4),
        ),
    ),
    "chats": (
        ("ours", "served", "llama-server"),
        (
            Target("tokens/s", "ours", "llama-server", least=1.05),
            Target("tokens/s", "served", "ours", least=0.97),
            Target("first token, s", "ours", "llama-server", most=0.8),
            Target("worst first token, s", "ours", "llama-server", most=0.8),
        ),
    ),
    "long": (
        ("ours", "llama-server"),
        (
            Target("gap, 95th percentile, ms", "ours", "llama-server", most=0.5),
            Target("beside / alone", "ours", None, most=1.15),
        ),
    ),
    "away": (
        ("served", "router", "new process"),
        tuple(Target("first token, s", "served", over, most=0.5) for over in ("router", "new process")),
    ),
    "drafts": (
        ("ours", "drafting"),
        (
            Target("quoted, ms a token", "drafting", "ours", most=0.8),
            Target("quoted, tokens a batch", "drafting", None, least=1.5),
            Target("new, ms a token", "drafting", "ours", most=1.05),
        ),
    ),
}


def timed(stream: Iterator[int]) -> tuple[list[int], list[float]]:
    began, tokens, times = time.perf_counter(), list[int](), list[float]()
    for token in stream:
        tokens.append(token)
        times.append(time.perf_counter() - began)
    return tokens, times


def drafts(llm: Any, seed: int) -> Result:
    chance, n, found = random.Random(f"drafts/{seed}"), 300, dict[str, list[float]]()

    def decode(kind: str, answer: list[int], prompt: list[int]) -> None:
        given = iter(answer)

        def prescribe(ids: Any, scores: Any) -> Any:
            scores[next(given)] = 1e9
            return scores

        with closing(llm.generate(prompt, temp=0.0, logits_processor=[prescribe])) as stream:
            said, began = [next(stream)], time.perf_counter()
            said += islice(stream, n - 1)
            found.setdefault(f"{kind}, ms a token", []).append(1e3 * (time.perf_counter() - began) / (n - 1))
        assert said == answer
        found.setdefault(f"{kind}, tokens a batch", []).append((n - 1) / max(1, llm.last_request.steps))

    for _ in range(4):  # costs are learnt from the first
        document = words(chance, 2 * n, 2 * n + 1)
        start = chance.randrange(n)
        quoted = [words(chance, 1, 2)[0] if i % 25 == 7 else document[start + i] for i in range(n)]
        decode("quoted", quoted, document)
        decode("new", words(chance, n, n + 1), document)
    return {measure: statistics.median(each[1:]) for measure, each in found.items()}


def first(stream: Stream, seed: int) -> Result:
    """The turns of one chat, from 3,500 tokens on; the thinking of each answer is stripped."""
    chance, firsts = random.Random(f"first/{seed}"), []
    history = words(chance, CHAT, CHAT + 1)
    for turn in range(4):
        history += words(chance, 10, 60)
        answer, times = timed(stream(history, 60))
        if turn:
            firsts.append(times[0])
        history += answer[chance.randrange(10, 50) :]
    return {"first token, s": statistics.median(firsts)}


def chats(stream: Stream, clients: int, seed: int) -> Result:
    """All clients at once, each its own chat behind a common system prompt."""
    system = words(random.Random(f"{seed}/system"), 200, 800)

    def client(number: int) -> list[tuple[float, int, float]]:
        chance, said = random.Random(f"{seed}/{number}"), []
        history = list(system)
        for _ in range(chance.randrange(4, 7)):
            history += words(chance, 20, 150)
            answer, times = timed(stream(history, chance.randrange(24, 96)))
            history += answer[len(answer) // 3 :]
            said.append((times[0], len(answer), time.perf_counter()))
        return said

    list(stream(words(random.Random("warm"), 30, 31), 4))
    with ThreadPoolExecutor(clients) as pool:
        began = time.perf_counter()
        answers = [said for each in pool.map(client, range(clients)) for said in each]
    firsts, counts, ends = zip(*answers, strict=True)
    return {
        "tokens/s": sum(counts) / (max(ends) - began),
        "first token, s": statistics.median(firsts),
        "worst first token, s": max(firsts),
    }


def long(stream: Stream, seed: int) -> Result:
    """A cold prompt alone, one beside answers that run, and one alone again."""
    chance, gaps = random.Random(f"long/{seed}"), list[float]()
    over, measured, running = threading.Event(), threading.Event(), threading.Barrier(BESIDE + 1)

    def one() -> float:
        return timed(stream(words(chance, LONG, LONG + 1), 2))[1][0]

    def answer(prompt: list[int]) -> None:
        last = 0.0
        for count, _ in enumerate(stream(prompt, CONTEXT // 2)):
            now = time.perf_counter()
            if count == 0:
                running.wait()
            elif measured.is_set():
                gaps.append(now - last)
            last = now
            if over.is_set():
                return

    before = one()
    with ThreadPoolExecutor(BESIDE) as pool:
        answers = [pool.submit(answer, words(chance, 80, 120)) for _ in range(BESIDE)]
        running.wait()
        measured.set()
        beside = one()
        over.set()
    for each in answers:
        each.result()
    return {
        "gap, 95th percentile, ms": 1e3 * statistics.quantiles(gaps, n=20)[-1],
        "first token beside, s": beside,
        "beside / alone": beside / ((before + one()) / 2),
    }


def away(subject: Subject, seed: int) -> Result:
    """A chat; an answer of another model, for which the chat's is closed; the chat's next turn."""
    chance = random.Random(f"away/{seed}")
    history = words(chance, CHAT, CHAT + 1)

    def anew(prompt: list[int], n: int) -> Iterator[int]:
        with subject.opened() as stream:
            yield from stream(prompt, n)

    both = nullcontext([anew, anew]) if subject.name == "new process" else subject.serving("a", "b")
    with both as (chat, other):
        history += list(chat(history, 60))
        list(other(words(chance, 30, 31), 4))
        return {"first token, s": timed(chat(history + words(chance, 10, 60), 4))[1][0]}


def measured(subject: Subject, part: str, seed: int) -> Result:
    """Return the measures of one subject of one part for one round."""
    silence()
    if part == "drafts":
        with closing(subject.in_process()) as llm:
            return drafts(llm, seed)
    if part == "away":
        return away(subject, seed)
    with subject.opened() as stream:
        if part == "chats":
            return chats(stream, subject.slots, seed)
        return {"first": first, "long": long}[part](stream, seed)


def played(subject: Subject, part: str, seed: int) -> Result:
    """Return the measures of one subject, taken in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measured, subject, part, seed).result()


def compare(arguments: argparse.Namespace, console: Console, part: str, clients: int) -> tuple[bool, Result]:
    """Play one part, print its table; whether all targets are met, and all runs."""
    (names, targets), given = PARTS[part], arguments
    slots = {"chats": clients, "long": BESIDE + 1}.get(part, 1)
    subjects = [
        Subject(name, given.model, slots, given.threads, given.program, given.n_gpu_layers) for name in names
    ]
    runs: dict[str, list[Result]] = {name: [] for name in names}
    if part == "alone":
        runs = alone(subjects, given.rounds)
    else:
        for seed in range(given.rounds):
            for subject in subjects if seed % 2 else reversed(subjects):
                runs[subject.name].append(played(subject, part, seed))
    title = f"chats, {clients} client{'s' * (clients != 1)}" if part == "chats" else part
    table = Table("", *names, "targets", title=title, title_justify="left")
    met = True
    for measure in runs[names[0]][0]:
        each = {name: statistics.median(run[measure] for run in some) for name, some in runs.items()}
        ratios = [(target, target.ratio(runs)) for target in targets if target.measure == measure]
        told = "\n".join(target.told(ratio) for target, ratio in ratios)
        table.add_row(measure, *(f"{each[name]:.4g}" for name in names), told)
        met &= all(target.met(ratio) for target, ratio in ratios)
    console.print(table)
    return met, {"title": title, "part": part, "clients": clients, "runs": runs}


def main(arguments: argparse.Namespace) -> int:
    console, results, missed = Console(width=None if sys.stdout.isatty() else 110), list[Result](), False
    parts = arguments.parts or [*PARTS]
    settings = {"made": date.today().isoformat(), "machine": machine()}
    settings |= {"threads": arguments.threads, "rounds": arguments.rounds}
    settings |= {} if arguments.n_gpu_layers is None else {"n_gpu_layers": arguments.n_gpu_layers}

    def write(complete: bool) -> None:
        if arguments.json is not None:
            found = {**settings, "complete": complete, "parts": results}
            arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    write(complete=False)  # fails before the measurements if the folder is missing
    with tempfile.TemporaryDirectory() as folder:
        if arguments.program is None and any(
            {"llama-server", "router"} & {*PARTS[part][0]} for part in parts
        ):
            with display() as progress:
                arguments.program = server_build.make(progress).stock
        if arguments.model is None:
            arguments.model = make("qwen35", Path(folder) / "model.gguf", params=PARAMETERS, context=32_768)
        for part in parts:
            for clients in arguments.clients if part == "chats" else (1,):
                met, result = compare(arguments, console, part, clients)
                missed |= not met
                results.append(result)
                write(complete=False)
    write(complete=True)
    console.print(f"{arguments.threads} threads, {arguments.rounds} rounds; {machine()}", style="dim")
    return int(missed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART", help="All without.")
    parser.add_argument("--clients", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--n-gpu-layers", type=int, help="-1: all; each subject's default without")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", type=Path, help="One is made without.")
    parser.add_argument("--program", type=Path, help="llama-server; it is built without.")
    sys.exit(main(parser.parse_args()))
