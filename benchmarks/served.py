"""Through HTTP: tokens a second and the time to the first token, beside the same in process and llama-server.

The chats of `benchmarks.parallel`: a Qwen3.5-architecture model of about 100M parameters, each client a chat,
greedy, two threads. Of what the model says each token is a byte or "</think>": a stream's text tells them.
Subjects in turn, each in a process of its own: a program that streams `create_completion` in threads, the
same asked of `llamahybrid serve`, and llama-server of the same source; medians of the rounds' ratios count.
Run: python -m benchmarks.served [--clients 4 8] [--rounds N] [--model FILE] [--program FILE] [--json FILE]
Exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from benchmarks.parallel import PARAMETERS, VOCABULARY, Chats, Run, Stream, theirs
from llamahybrid import Llama
from llamahybrid.engine.progress import display
from llamahybrid.evaluate.tables import machine
from llamahybrid.tiny import make
from llamahybrid.tiny.vocab import vocabulary
from tests.lab import server_build
from tests.lab.quiet import silence
from tests.lab.serving import ServerProcess

OF_IN_PROCESS = 0.95
"""Tokens a second over those in process, at least; those of llama-server are the other bound."""

ASKED: dict[str, Any] = {"temperature": 0.0, "repeat_penalty": 1.0, "stream": True}
SUBJECTS = ("in process", "served", "llama-server")

THOUGHT = "</think>"
THOUGHT_TOKEN = cast("list[str]", vocabulary("tiny").metadata["tokenizer.ggml.tokens"]).index(THOUGHT)


def tokens_of(text: str) -> Iterator[int]:
    """The tokens that a piece of an answer was."""
    for part in re.split(f"({THOUGHT})", text):
        yield from [THOUGHT_TOKEN] if part == THOUGHT else part.encode()


@contextmanager
def in_process(model: Path, slots: int, context: int) -> Iterator[Stream]:
    """A program that has the model itself."""
    options: dict[str, Any] = {"n_ctx": context, "n_threads": 2, "n_threads_batch": 2, "verbose": False}
    with closing(Llama(str(model), n_parallel=slots, **options)) as llm:

        def stream(prompt: list[int], n: int) -> Iterator[int]:
            for chunk in llm.create_completion(list(prompt), max_tokens=n, **ASKED):
                yield from tokens_of(chunk["choices"][0]["text"])

        yield stream


@contextmanager
def served(model: Path, slots: int, context: int) -> Iterator[Stream]:
    """`llamahybrid serve`."""
    threads = ("--n_threads", "2", "--n_threads_batch", "2")
    with tempfile.NamedTemporaryFile() as log:
        shape = ("--n_parallel", str(slots), "--n_ctx", str(context), *threads)
        server = ServerProcess(model, Path(log.name), *shape)
        try:

            def stream(prompt: list[int], n: int) -> Iterator[int]:
                data = json.dumps({"prompt": prompt, "max_tokens": n, **ASKED}).encode()
                url = f"http://127.0.0.1:{server.port}/v1/completions"
                request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
                with urllib.request.urlopen(request, timeout=600) as reply:
                    for line in reply:
                        if line.startswith(b"data: {"):
                            yield from tokens_of(json.loads(line[6:])["choices"][0]["text"])

            yield stream
        finally:
            server.process.kill()
            server.process.wait()


def child(arguments: Any) -> int:
    """Be one subject for one round; what it did goes to stdout."""
    silence()
    clients = arguments.clients[0]
    shape = (clients, clients * 2_048)
    if arguments.child == "llama-server":
        subject = theirs(arguments.program, arguments.model, *shape)
    else:
        subject = (served if arguments.child == "served" else in_process)(arguments.model, *shape)
    with subject as stream:
        chats = Chats(clients, arguments.turns, arguments.answer, arguments.seed)
        run = chats.play(stream, VOCABULARY)
        assert run.tokens == clients * arguments.turns * arguments.answer, "each token is told once"
        print(json.dumps(asdict(run)))
    return 0


def played(arguments: Any, name: str, clients: int, seed: int) -> Run:
    """One round of one subject, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.served", "--child", name, "--clients", str(clients)]
    command += ["--turns", str(arguments.turns), "--answer", str(arguments.answer), "--seed", str(seed)]
    command += ["--model", str(arguments.model), "--program", str(arguments.program)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def main(arguments: Any) -> int:
    console = Console(width=None if sys.stdout.isatty() else 110)
    results, missed = [], False
    for clients in arguments.clients:
        runs: dict[str, list[Run]] = {name: [] for name in SUBJECTS}
        for seed in range(arguments.rounds):
            for name in SUBJECTS if seed % 2 else SUBJECTS[::-1]:
                runs[name].append(played(arguments, name, clients, seed))
        table = Table(
            "", "tokens/s", "first token, s", "tokens/s, served's share", title=f"{clients} clients"
        )
        told = {}
        for name in SUBJECTS:
            rate = statistics.median(run.rate for run in runs[name])
            first = statistics.median(seconds for run in runs[name] for seconds in run.first)
            share = statistics.median(
                mine.rate / run.rate for mine, run in zip(runs["served"], runs[name], strict=True)
            )
            told[name] = {"rate": rate, "first": first, "share": share}
            table.add_row(name, f"{rate:.1f}", f"{first:.3f}", f"{share:.3f}")
        console.print(table)
        missed |= told["in process"]["share"] < OF_IN_PROCESS or told["llama-server"]["share"] < 1
        missed |= told["served"]["first"] > told["in process"]["first"] / OF_IN_PROCESS
        missed |= told["served"]["first"] > told["llama-server"]["first"]
        results.append({"clients": clients, **told})
    console.print(machine(), style="dim")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": machine(), "runs": results}, indent=1) + "\n")
    return int(missed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--answer", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", type=Path, help="As benchmarks.parallel makes it.")
    parser.add_argument("--program", type=Path, help="llama-server.")
    parser.add_argument("--child", choices=SUBJECTS, help="Be one subject.")
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args()
    if parsed.child:
        sys.exit(child(parsed))
    with tempfile.TemporaryDirectory() as folder:
        if parsed.program is None:
            with display() as progress:
                parsed.program = server_build.make(progress).stock
        if parsed.model is None:
            made = Path(folder) / "model.gguf"
            parsed.model = make("qwen35", made, params=PARAMETERS, context=32_768)
        sys.exit(main(parsed))
