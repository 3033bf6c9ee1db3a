"""Speed at defaults: alone beside stock, and several clients beside llama-server of the same source.

A Qwen3.5-architecture model of about 100M parameters, greedy; each subject of each round is a process of its
own, in turn, since OpenMP's threads of one would stand in the way of the next; medians of the rounds' ratios.

alone   milliseconds a token of a streamed completion and of a `generate` loop, cold prompts; beside stock
first   time to the first token of a chat of 3,500 tokens whose thinking is stripped; beside both
chats   clients with a common system prompt whose chats lose their thinking, sizes drawn; beside llama-server
long    a cold prompt of 4,000 tokens beside three answers; beside llama-server

Run: python -m benchmarks.clients [PART ...] [--rounds N] [--clients 4 8] [--threads N] [--json FILE]
Exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import subjects
from benchmarks.subjects import Shape, Stream
from tests.lab.quiet import silence

VOCABULARY = 200
PARAMETERS = 100_000_000
CONTEXT = 8_192
LONG = 4_000
BESIDE = 3
CHAT = 3_500

Result = dict[str, Any]
"""What a subject measured in one round, by name."""


@dataclass(frozen=True)
class Target:
    """A bound of the median over the rounds of a measure, as a share of another subject's."""

    measure: str
    of: str
    over: str
    most: float | None = None
    least: float | None = None

    def met(self, ratio: float) -> bool:
        """Within the bound."""
        return (self.most is None or ratio <= self.most) and (self.least is None or ratio >= self.least)


PARTS: dict[str, tuple[tuple[str, ...], tuple[Target, ...]]] = {
    "alone": (
        ("stock", "ours"),
        (
            Target("streamed, ms a token", "ours", "stock", most=1.0),
            Target("generate, ms a token", "ours", "stock", most=1.03),
            Target("cold 1,000 tokens, s", "ours", "stock", most=1.03),
            Target("cold 3,500 tokens, s", "ours", "stock", most=1.03),
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
        (Target("gap, 95th percentile, ms", "ours", "llama-server", most=0.5),),
    ),
}
LONG_FIRST = 1.15
"""First token of the long prompt beside answers, over that of one alone, at most."""


def words(chance: random.Random, low: int, high: int) -> list[int]:
    """Tokens of a message of a length that is drawn from [low, high)."""
    return [chance.randrange(10, VOCABULARY - 10) for _ in range(chance.randrange(low, high))]


def timed(stream: Iterator[int]) -> tuple[list[int], list[float]]:
    """An answer, and the seconds to each of its tokens."""
    began, tokens, times = time.perf_counter(), list[int](), list[float]()
    for token in stream:
        tokens.append(token)
        times.append(time.perf_counter() - began)
    return tokens, times


def p95(values: Sequence[float]) -> float:
    """Their 95th percentile."""
    return statistics.quantiles(values, n=20)[-1]


# -- one subject, one round --------------------------------------------------------------------------


def alone(name: str, shape: Shape, seed: int) -> Result:
    """One client that has the whole machine."""
    chance, n = random.Random(f"alone/{seed}"), 120

    def decode(answer: Iterator[Any]) -> float:
        next(answer)
        began = time.perf_counter()
        count = sum(1 for _ in islice(answer, n))
        return 1e3 * (time.perf_counter() - began) / count

    def cold(tokens: int) -> float:
        answer, began = llm.generate(words(chance, tokens, tokens + 1), temp=0.0), time.perf_counter()
        next(answer)
        seconds = time.perf_counter() - began
        answer.close()
        return seconds

    with (subjects.stock if name == "stock" else subjects.ours)(shape) as llm:
        stream = subjects.streamed(llm)
        decode(stream(words(chance, 300, 301), n))
        prompts = [words(chance, 200, 400) for _ in range(6)]
        return {
            "streamed, ms a token": min(decode(stream(prompt, n + 1)) for prompt in prompts[:3]),
            "generate, ms a token": min(decode(llm.generate(prompt, temp=0.0)) for prompt in prompts[3:]),
            "cold 1,000 tokens, s": min(cold(1000) for _ in range(3)),
            "cold 3,500 tokens, s": min(cold(3500) for _ in range(2)),
        }


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
    firsts, counts, ends, lock = list[float](), list[int](), list[float](), threading.Lock()
    system = words(random.Random(f"{seed}/system"), 200, 800)

    def client(number: int) -> None:
        chance = random.Random(f"{seed}/{number}")
        history = list(system)
        for _ in range(chance.randrange(4, 7)):
            history += words(chance, 20, 150)
            answer, times = timed(stream(history, chance.randrange(24, 96)))
            history += answer[len(answer) // 3 :]
            with lock:
                firsts.append(times[0])
                counts.append(len(answer))
                ends.append(time.perf_counter())

    list(stream(words(random.Random("warm"), 30, 31), 4))
    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
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
    prompts = [words(chance, 80, 120) for _ in range(BESIDE)]
    threads = [threading.Thread(target=answer, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    running.wait()
    measured.set()
    beside = one()
    over.set()
    for thread in threads:
        thread.join()
    return {
        "gap, 95th percentile, ms": 1e3 * p95(gaps),
        "first token beside, s": beside,
        "beside / alone": beside / ((before + one()) / 2),
    }


def child(arguments: argparse.Namespace) -> int:
    """Be one subject of one part for one round; its measures go to stdout."""
    silence()
    part, name, seed = arguments.parts[0], arguments.child, arguments.seed
    slots = {"chats": arguments.clients[0], "long": BESIDE + 1}.get(part, 1)
    shape = Shape(arguments.model, slots, CONTEXT, arguments.threads, arguments.program)
    if part == "alone":
        result = alone(name, shape, seed)
    else:
        with subjects.opened(name, shape) as stream:
            if part == "chats":
                result = chats(stream, slots, seed)
            else:
                result = {"first": first, "long": long}[part](stream, seed)
    print(json.dumps(result))
    return 0


# -- all of them --------------------------------------------------------------------------------------


def played(arguments: argparse.Namespace, part: str, name: str, clients: int, seed: int) -> Result:
    """What one subject measured, in a process of its own."""
    shape = ["--clients", str(clients), "--threads", str(arguments.threads), "--seed", str(seed)]
    files = ["--model", str(arguments.model), "--program", str(arguments.program)]
    command = [sys.executable, "-m", "benchmarks.clients", part, "--child", name, *shape, *files]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: Result = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(arguments: argparse.Namespace, console: Console, part: str, clients: int) -> tuple[bool, Result]:
    """Play one part, print its table; whether all targets are met, and all runs."""
    names, targets = PARTS[part]
    runs: dict[str, list[Result]] = {name: [] for name in names}
    for seed in range(arguments.rounds):
        for name in names if seed % 2 else names[::-1]:
            runs[name].append(played(arguments, part, name, clients, seed))
    title = f"{part}, {clients} clients" if part == "chats" else part
    table = Table("", *names, "targets", title=title, title_justify="left")
    met = True
    for measure in runs[names[0]][0]:
        each = {name: statistics.median(run[measure] for run in some) for name, some in runs.items()}
        told = []
        for target in targets:
            if target.measure != measure:
                continue
            pairs = zip(runs[target.of], runs[target.over], strict=True)
            ratio = statistics.median(mine[measure] / their[measure] for mine, their in pairs)
            bound = f"at most {target.most}" if target.least is None else f"at least {target.least}"
            told.append(f"{target.of} / {target.over} {ratio:.3f} ({bound})")
            met &= target.met(ratio)
        table.add_row(measure, *(f"{each[name]:.4g}" for name in names), "\n".join(told))
    if part == "long":
        met &= statistics.median(run["beside / alone"] for run in runs["ours"]) <= LONG_FIRST
    console.print(table)
    return met, {"part": part, "clients": clients, "runs": runs}


def main(arguments: argparse.Namespace) -> int:
    """Make what is missing, and play all parts."""
    from llamahybrid.engine.progress import display
    from llamahybrid.evaluate.tables import machine
    from llamahybrid.tiny import make
    from tests.lab import server_build

    console, results, missed = Console(width=None if sys.stdout.isatty() else 110), [], False
    with tempfile.TemporaryDirectory() as folder:
        if arguments.program is None:
            with display() as progress:
                arguments.program = server_build.make(progress).stock
        if arguments.model is None:
            arguments.model = make("qwen35", Path(folder) / "model.gguf", params=PARAMETERS, context=32_768)
        for part in arguments.parts or PARTS:
            for clients in arguments.clients if part == "chats" else (1,):
                met, result = compare(arguments, console, part, clients)
                missed |= not met
                results.append(result)
    console.print(f"{arguments.threads} threads, {arguments.rounds} rounds; {machine()}", style="dim")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": machine(), "parts": results}, indent=1) + "\n")
    return int(missed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS], help="All without.")
    parser.add_argument("--clients", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", type=Path, help="One is made without.")
    parser.add_argument("--program", type=Path, help="llama-server; it is built without.")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    sys.exit(child(parsed) if parsed.child else main(parsed))
