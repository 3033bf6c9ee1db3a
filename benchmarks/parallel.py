"""Several clients at once: tokens a second and the time to the first token, beside llama-server's slots.

A Qwen3.5-architecture model of about 100M parameters; each client has a chat of `--turns` turns, answers of
`--answer` tokens, first prompts and questions of random sizes; greedy, two threads. Then one cold prompt of
3,000 to 5,000 tokens beside three answers that run. Round by round: llamahybrid with as many slots as
clients, with one, and llama-server of the same source with as many; each in a process of its own, since
OpenMP's threads of one subject would stand in the way of the next.
Run: python -m benchmarks.parallel [--clients 4 8] [--rounds N] [--json FILE]
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
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from llamahybrid import Llama
from llamahybrid.engine.progress import display
from llamahybrid.evaluate.tables import machine
from llamahybrid.tiny import make
from tests.lab import server_build
from tests.lab.quiet import silence
from tests.llama_server.llama_server import LlamaServer

PARAMETERS = 100_000_000
AGAINST_ONE = 1.5
"""Tokens a second over those of one slot, at least; those of llama-server are the other bound, and its first
tokens are."""

LONG = (3000, 5000)
"""Tokens of the long prompt."""

BESIDE = 3
"""Answers that run beside it."""

BESIDE_TOKENS = 100_000
"""So many that they run until they are told to stop."""

LONG_FIRST = 1.15
"""Its time to the first token, over that of such a prompt alone, at most."""

Stream = Callable[[list[int], int], Iterator[int]]
"""`stream(prompt, n)`: the answer's tokens, as they come."""


@dataclass
class Run:
    """What one subject did with all chats."""

    seconds: float = 0.0
    tokens: int = 0
    first: list[float] = field(default_factory=list)
    """Seconds to the first token of each answer."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between two tokens."""

    @property
    def rate(self) -> float:
        """Tokens a second, of all clients."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Chats:
    """The same chats for every subject."""

    clients: int
    turns: int
    answer: int
    seed: int

    def play(self, stream: Stream, vocabulary: int) -> Run:
        """All clients at once, each its own chat."""
        run, lock = Run(), threading.Lock()

        def client(number: int) -> None:
            chance = random.Random(f"{self.seed}/{number}")

            def words(low: int, high: int) -> list[int]:
                return [chance.randrange(10, vocabulary - 10) for _ in range(chance.randrange(low, high))]

            history = words(100, 600)
            for _ in range(self.turns):
                history += words(10, 80)
                began = last = time.perf_counter()
                times = []
                for token in stream(history, self.answer):
                    history.append(token)
                    now = time.perf_counter()
                    times.append(now - last)
                    last = now
                with lock:
                    run.first.append(times[0])
                    run.gaps += times[1:]
                    run.tokens += len(times)
                    run.seconds = max(run.seconds, last - start)
                assert last >= began

        threads = [threading.Thread(target=client, args=(number,)) for number in range(self.clients)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return run


@dataclass
class LongRun:
    """A long prompt, alone and beside answers."""

    alone: float = 0.0
    beside: float = 0.0
    """Seconds to its first token."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between two tokens of the answers meanwhile."""


def play_long(stream: Stream, vocabulary: int, seed: int) -> LongRun:
    """A cold prompt alone, then one beside answers that run, then one alone again."""
    chance, run = random.Random(f"long/{seed}"), LongRun()
    length = chance.randrange(*LONG)

    def words(n: int) -> list[int]:
        return [chance.randrange(10, vocabulary - 10) for _ in range(n)]

    def first() -> float:
        began = time.perf_counter()
        answer = stream(words(length), 2)
        next(answer)
        seconds = time.perf_counter() - began
        for _ in answer:
            pass
        return seconds

    before = first()
    over, measured, running = threading.Event(), threading.Event(), threading.Barrier(BESIDE + 1)

    def answer(prompt: list[int]) -> None:
        last = 0.0
        for count, _ in enumerate(stream(prompt, BESIDE_TOKENS)):
            now = time.perf_counter()
            if count == 0:
                running.wait()
            elif measured.is_set():
                run.gaps.append(now - last)
            last = now
            if over.is_set():
                break

    threads = [threading.Thread(target=answer, args=(words(100),)) for _ in range(BESIDE)]
    for thread in threads:
        thread.start()
    running.wait()
    measured.set()
    run.beside = first()
    over.set()
    for thread in threads:
        thread.join()
    run.alone = (before + first()) / 2
    return run


@contextmanager
def ours(model: Path, slots: int, context: int) -> Iterator[Stream]:
    """llamahybrid with so many slots."""
    options: dict[str, Any] = {"n_ctx": context, "n_threads": 2, "n_threads_batch": 2, "verbose": False}
    with closing(Llama(str(model), n_parallel=slots, **options)) as llm:
        yield lambda prompt, n: islice(llm.generate(list(prompt), temp=0.0), n)


@contextmanager
def theirs(program: Path, model: Path, slots: int, context: int) -> Iterator[Stream]:
    """llama-server with so many."""
    shape = ("-np", str(slots), "-t", "2", "-c", str(context), "--kv-unified")
    with LlamaServer(program, model, *shape) as server:

        def stream(prompt: list[int], n: int) -> Iterator[int]:
            body = {"prompt": prompt, "n_predict": n, "temperature": 0, "ignore_eos": True}
            more = {"stream": True, "return_tokens": True, "cache_prompt": True}
            data = json.dumps({**body, **more}).encode()
            url = server._url + "/completion"
            request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=600) as reply:
                for line in reply:
                    if line.startswith(b"data: "):
                        yield from json.loads(line[6:]).get("tokens", ())

        yield stream


VOCABULARY = 200
SUBJECTS = ("ours", "one slot", "llama-server")


def child(arguments: Any) -> int:
    """Be one subject for one round; what it did goes to stdout."""
    silence()
    context = arguments.context
    clients = arguments.clients[0]
    slots = 1 if arguments.child == "one slot" else clients
    with ExitStack() as stack:
        if arguments.child == "llama-server":
            subject = theirs(arguments.program, arguments.model, slots, context)
        else:
            subject = ours(arguments.model, slots, context)
        stream = stack.enter_context(subject)
        if arguments.long:
            result: Any = play_long(stream, VOCABULARY, arguments.seed)
        else:
            chats = Chats(clients, arguments.turns, arguments.answer, arguments.seed)
            result = chats.play(stream, VOCABULARY)
    print(json.dumps(asdict(result)))
    return 0


def played(arguments: Any, files: tuple[Path, Path], name: str, clients: int, seed: int, *more: str) -> Any:
    """One round of one subject, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.parallel", "--child", name, "--clients", str(clients)]
    command += ["--turns", str(arguments.turns), "--answer", str(arguments.answer), "--seed", str(seed)]
    command += ["--model", str(files[0]), "--program", str(files[1]), *more]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def p95(values: list[float]) -> float:
    """Their 95th percentile."""
    return statistics.quantiles(values, n=20)[-1]


def main(arguments: Any) -> int:
    console = Console(width=None if sys.stdout.isatty() else 110)
    with display() as progress:
        program = server_build.make(progress).stock
    missed, results = False, []
    with tempfile.TemporaryDirectory() as folder:
        model = make("qwen35", Path(folder) / "model.gguf", params=PARAMETERS, context=32_768)
        files = (model, program)
        for clients in arguments.clients:
            shape = ("--context", str(clients * 2_048))
            runs: dict[str, list[Run]] = {name: [] for name in SUBJECTS}
            for seed in range(arguments.rounds):
                for name in SUBJECTS:
                    runs[name].append(Run(**played(arguments, files, name, clients, seed, *shape)))
            rate = {name: statistics.median(run.rate for run in some) for name, some in runs.items()}
            first = {n: statistics.median(t for run in some for t in run.first) for n, some in runs.items()}
            gap = {n: p95([t for run in some for t in run.gaps]) for n, some in runs.items()}
            table = Table("", "tokens/s", "first token, s", "gap, 95 %, ms", title=f"{clients} clients")
            for name in SUBJECTS:
                table.add_row(name, f"{rate[name]:.1f}", f"{first[name]:.3f}", f"{1e3 * gap[name]:.0f}")
            console.print(table)
            enough = rate["ours"] >= max(rate["llama-server"], AGAINST_ONE * rate["one slot"])
            missed |= not enough or first["ours"] > first["llama-server"]
            results.append({"clients": clients, "rate": rate, "first": first, "gap": gap})
        long_shape = ("--long", "--context", str(4 * 2 * LONG[1]))
        table = Table("", "alone, s", "beside, s", "gap, 95 %, ms", title=f"long prompts, {BESIDE} answers")
        longs: dict[str, list[LongRun]] = {name: [] for name in ("ours", "llama-server")}
        for seed in range(arguments.rounds):
            for name, some in longs.items():
                some.append(LongRun(**played(arguments, files, name, BESIDE + 1, seed, *long_shape)))
        for name, some in longs.items():
            alone, beside = (
                statistics.median(getattr(run, at) for run in some) for at in ("alone", "beside")
            )
            gap_95 = p95([t for run in some for t in run.gaps])
            table.add_row(name, f"{alone:.2f}", f"{beside:.2f}", f"{1e3 * gap_95:.0f}")
        console.print(table)
        ratio = statistics.median(run.beside / run.alone for run in longs["ours"])
        gaps = {name: p95([t for run in some for t in run.gaps]) for name, some in longs.items()}
        missed |= ratio > LONG_FIRST or gaps["ours"] > gaps["llama-server"]
        console.print(f"a long prompt beside answers: {ratio:.3f} of its time alone (at most {LONG_FIRST})")
        results.append({"long": {name: [asdict(run) for run in some] for name, some in longs.items()}})
    console.print(machine(), style="dim")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": machine(), "runs": results}, indent=1) + "\n")
    return int(missed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--answer", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=SUBJECTS, help="Be one subject, for the rest of these alone.")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--program", type=Path)
    parsed = parser.parse_args()
    sys.exit(child(parsed) if parsed.child else main(parsed))
