"""Several clients at once: tokens a second and the time to the first token, beside llama-server's slots.

A Qwen3.5-architecture model of about 100M parameters; each client has a chat of `--turns` turns, answers of
`--answer` tokens, first prompts and questions of random sizes; greedy, two threads. In one run: llamahybrid
with as many slots as clients, with one, and llama-server of the same source with as many.
Run: python -m benchmarks.parallel [--clients 4 8] [--rounds N] [--json FILE]
Exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from llamahybrid import Llama
from llamahybrid.engine.progress import display
from llamahybrid.evaluate.quiet import silence
from llamahybrid.evaluate.tables import machine
from llamahybrid.tiny import make
from tests.lab import server_build
from tests.server.llama_server import LlamaServer

PARAMETERS = 100_000_000
AGAINST_ONE = 1.5
"""Tokens a second over those of one slot, at least; those of llama-server are the other bound, and its first
tokens are."""

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


@contextmanager
def ours(model: Path, slots: int, context: int) -> Iterator[Stream]:
    """llamahybrid with so many slots."""
    options = {"n_ctx": context, "n_threads": 2, "n_threads_batch": 2, "verbose": False}
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


def main(arguments: Any) -> int:
    silence()
    console = Console(width=None if sys.stdout.isatty() else 110)
    with display() as progress:
        program = server_build.make(progress).stock
    missed, results = False, []
    with tempfile.TemporaryDirectory() as folder:
        model = make("qwen35", Path(folder) / "model.gguf", params=PARAMETERS, context=32_768)
        for clients in arguments.clients:
            context = clients * 2_048
            with ExitStack() as stack:
                subjects = {
                    "ours": stack.enter_context(ours(model, clients, context)),
                    "one slot": stack.enter_context(ours(model, 1, context)),
                    "llama-server": stack.enter_context(theirs(program, model, clients, context)),
                }
                vocabulary = 200
                runs: dict[str, list[Run]] = {name: [] for name in subjects}
                for number in range(arguments.rounds):
                    chats = Chats(clients, arguments.turns, arguments.answer, number)
                    for name, stream in subjects.items():
                        runs[name].append(chats.play(stream, vocabulary))
            rate = {name: statistics.median(run.rate for run in some) for name, some in runs.items()}
            first = {n: statistics.median(t for run in some for t in run.first) for n, some in runs.items()}
            gap = {
                n: statistics.quantiles([t for run in some for t in run.gaps], n=20)[-1]
                for n, some in runs.items()
            }
            table = Table("", "tokens/s", "first token, s", "gap, 95 %, ms", title=f"{clients} clients")
            for name in subjects:
                table.add_row(name, f"{rate[name]:.1f}", f"{first[name]:.3f}", f"{1e3 * gap[name]:.0f}")
            console.print(table)
            enough = rate["ours"] >= max(rate["llama-server"], AGAINST_ONE * rate["one slot"])
            missed |= not enough or first["ours"] > first["llama-server"]
            results.append({"clients": clients, "rate": rate, "first": first, "gap": gap})
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
    sys.exit(main(parser.parse_args()))
