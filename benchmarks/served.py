"""Through HTTP: tokens a second and the time to the first token, beside the same in process and llama-server.

Chats of `benchmarks.chats`: a Qwen3.5-architecture model of about 100M parameters, each client a chat,
greedy, two threads. Of what the model says each token is a byte or "</think>": a stream's text tells them.
Subjects in turn, each in a process of its own: a program that streams `create_completion` in threads, the
same asked of `llamahybrid serve`, and llama-server of the same source; medians of the rounds' ratios count.
Run: python -m benchmarks.served [--clients 4 8] [--rounds N] [--model FILE] [--program FILE] [--json FILE]
Exits with 1 where a target is missed.
"""

from __future__ import annotations

import json
import re
import statistics
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

from benchmarks.chats import Chats, Run, Stream, begin, hold, opened, parser_of, played, theirs, write
from llamahybrid.harness.tables import machine
from llamahybrid.tiny.vocab import vocabulary
from tests.lab.quiet import silence
from tests.lab.serving import ServerProcess

OF_IN_PROCESS = 0.95
"""Tokens a second over those in process, at least; those of llama-server are the other bound."""

ASKED: dict[str, Any] = {"temperature": 0.0, "repeat_penalty": 1.0, "stream": True}
NAME = "benchmarks.served"
SUBJECTS = ("in process", "served", "llama-server")

THOUGHT = "</think>"
THOUGHT_TOKEN = cast("list[str]", vocabulary("tiny").metadata["tokenizer.ggml.tokens"]).index(THOUGHT)


def tokens_of(text: str) -> Iterator[int]:
    """The tokens that a piece of an answer was."""
    for part in re.split(f"({THOUGHT})", text):
        yield from [THOUGHT_TOKEN] if part == THOUGHT else part.encode()


@contextmanager
def in_process(model: Path, slots: int, context: int, flash: str) -> Iterator[Stream]:
    """A program that has the model itself."""
    with closing(opened(model, slots, context, flash)) as llm:

        def stream(prompt: list[int], n: int) -> Iterator[int]:
            for chunk in llm.create_completion(list(prompt), max_tokens=n, **ASKED):
                yield from tokens_of(chunk["choices"][0]["text"])

        yield stream


@contextmanager
def served(model: Path, slots: int, context: int, flash: str) -> Iterator[Stream]:
    """`llamahybrid serve`."""
    threads = ("--n_threads", "2", "--n_threads_batch", "2")
    flashing = () if flash == "auto" else ("--flash_attn", str(flash == "on"))
    with tempfile.NamedTemporaryFile() as log:
        shape = ("--n_parallel", str(slots), "--n_ctx", str(context // slots), *threads, *flashing)
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
    shape = (clients, clients * 2_048, arguments.flash)
    if arguments.child == "llama-server":
        subject = theirs(arguments.program, arguments.model, *shape)
    else:
        subject = (served if arguments.child == "served" else in_process)(arguments.model, *shape)
    with subject as stream:
        hold(arguments)
        chats = Chats(clients, arguments.turns, arguments.answer, arguments.seed)
        run = chats.play(stream)
        assert run.tokens == clients * arguments.turns * arguments.answer, "each token is told once"
        print(json.dumps(asdict(run)))
    return 0


def main(arguments: Any) -> int:
    console = Console(width=None if sys.stdout.isatty() else 110)
    results, missed = [], False
    for clients in arguments.clients:
        runs: dict[str, list[Run]] = {name: [] for name in SUBJECTS}
        for seed in range(arguments.rounds):
            for name in SUBJECTS if seed % 2 else SUBJECTS[::-1]:
                runs[name].append(Run(**played(NAME, arguments, name, clients, seed)))
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
    write(arguments.json, results)
    return int(missed)


if __name__ == "__main__":
    sys.exit(begin(parser_of(__doc__, SUBJECTS, rounds=4).parse_args(), child, main))
