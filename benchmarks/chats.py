"""Chats of several clients at once, and how `benchmarks.parallel` and `benchmarks.served` play them.

A Qwen3.5-architecture model of about 100M parameters, greedy, two threads. Each round of each subject is a
process of its own, since OpenMP's threads of one would stand in the way of the next.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamahybrid import Llama
from llamahybrid.engine.progress import display
from llamahybrid.harness.tables import machine
from llamahybrid.tiny import make
from tests.lab import server_build
from tests.llama_server.llama_server import LlamaServer

PARAMETERS = 100_000_000
VOCABULARY = 200
OPTIONS: dict[str, Any] = {"n_threads": 2, "n_threads_batch": 2, "verbose": False}
"""Of every `Llama`."""

FLASH = ("auto", "on", "off")
"""Flash attention, the same for all subjects; "auto": as each has it by default."""

READY = "ready"
"""What a subject says that is held."""

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

    def play(self, stream: Stream) -> Run:
        """All clients at once, each its own chat."""
        run, lock = Run(), threading.Lock()

        def client(number: int) -> None:
            chance = random.Random(f"{self.seed}/{number}")

            def words(low: int, high: int) -> list[int]:
                return [chance.randrange(10, VOCABULARY - 10) for _ in range(chance.randrange(low, high))]

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


def opened(model: Path, slots: int, context: int, flash: str) -> Llama:
    """llamahybrid with so many slots, which have `context` tokens together."""
    shape: dict[str, Any] = {"n_ctx": context // slots, "n_parallel": slots}
    if flash != "auto":
        shape["flash_attn"] = flash == "on"
    return Llama(str(model), **shape, **OPTIONS)


@contextmanager
def theirs(program: Path, model: Path, slots: int, context: int, flash: str) -> Iterator[Stream]:
    """llama-server with so many."""
    shape = ("-np", str(slots), "-t", "2", "-c", str(context), "-fa", flash)
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


def command(program: str, arguments: Any, name: str, clients: int, seed: int, *more: str) -> list[str]:
    """How one subject of a program, "benchmarks.parallel" say, is run for a round."""
    shape = ["--child", name, "--clients", str(clients), "--turns", str(arguments.turns)]
    shape += ["--answer", str(arguments.answer), "--seed", str(seed), "--flash", arguments.flash]
    files = ["--model", str(arguments.model), "--program", str(arguments.program)]
    return [sys.executable, "-m", program, *shape, *files, *more]


def hold(arguments: Any) -> None:
    """With `--held`, wait to be told to begin."""
    if arguments.held:
        print(READY, flush=True)
        sys.stdin.readline()


def played(program: str, arguments: Any, name: str, clients: int, seed: int, *more: str) -> Any:
    """What one subject of a program did in a round of its own process."""
    run = command(program, arguments, name, clients, seed, *more)
    done = subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def parser_of(text: str | None, subjects: Sequence[str], rounds: int) -> argparse.ArgumentParser:
    """What both programs are told."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--clients", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--answer", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--flash", choices=FLASH, default=FLASH[0], help="Flash attention, of all subjects.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", type=Path, help="One is made without.")
    parser.add_argument("--program", type=Path, help="llama-server; it is built without.")
    parser.add_argument("--child", choices=subjects, help="Be one subject, for the rest of these alone.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held", action="store_true", help="Wait for a line of input before that.")
    return parser


def begin(arguments: Any, child: Callable[[Any], int], main: Callable[[Any], int]) -> int:
    """Be one subject, or play all, once there is a model and a llama-server."""
    if arguments.child:
        return child(arguments)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.program is None:
            with display() as progress:
                arguments.program = server_build.make(progress).stock
        if arguments.model is None:
            made = Path(folder) / "model.gguf"
            arguments.model = make("qwen35", made, params=PARAMETERS, context=32_768)
        return main(arguments)


def write(path: Path | None, results: list[Any]) -> None:
    """Into a file, if there is to be one."""
    if path is not None:
        path.write_text(json.dumps({"machine": machine(), "runs": results}, indent=1) + "\n")
