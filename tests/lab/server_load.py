"""A server under load: conversations, crowds, clients that hang up, embeddings, kill -9, two models in turn.

``python -m tests.lab.server_load [--turns 50] [--requests 2000] [--kills 3] [--rounds 100] [--seed 1]``

A process of `llamahybrid serve` on a tiny model. Each answer, and the beginning of each stream that was left,
is compared with a fresh stock context's: text, tokens and end; a difference must be a tie. Vectors are those
of the text alone. At the end no request is in, and the second half of the requests adds no memory, threads or
files: the first half fills thread pools, malloc's arenas and the cache.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import llama_cpp
import typer
from rich.console import Console

from llamahybrid import tiny
from llamahybrid.harness.targets.base import resident
from tests.lab.campaign import reported, silence
from tests.lab.differential import Mismatch, shortfall
from tests.lab.in_process import heard
from tests.lab.reference import Reference, Setting
from tests.lab.server_clients import (
    CHAT,
    N_CTX,
    NOTES,
    PLAIN,
    TEXT,
    Load,
    ask,
    embed,
    request,
    talk,
    words,
)
from tests.lab.serving import ServerProcess
from tests.lab.waiting import wait_until

SETTING = Setting("server", {"n_ctx": N_CTX})

# -- what must hold ---------------------------------------------------------------------------------


def judge(model: Path, load: Load, every: int = 1) -> None:
    """Compare answers, or one in `every`, with those of fresh stock contexts. Raises Mismatch."""
    with closing(Reference(model, SETTING)) as reference:
        for said in load.answers[::every]:
            with closing(SETTING.open(llama_cpp.Llama, model)) as llm, heard(llm) as calls:
                create = llm.create_completion if said.path == TEXT else llm.create_chat_completion
                made = create(**said.asked, **PLAIN)
                choice, count = made["choices"][0], made["usage"]["completion_tokens"]
                text = choice["text"] if said.path == TEXT else choice["message"]["content"]
                tokens = llm.tokenize(said.text.encode(), add_bos=False, special=True)
                ends = [t for t in range(llm.n_vocab()) if llama_cpp.llama_vocab_is_eog(llm._model.vocab, t)]
            left = not said.finish and text.startswith(said.text)
            if left or (text, count, choice["finish_reason"]) == (said.text, said.tokens, said.finish):
                continue
            if not tokens:
                raise Mismatch(f"no answer, where a fresh context has one: {said.asked}")
            whole = said.asked["max_tokens"]
            wrong = said.tokens != whole if said.finish == "length" else said.tokens >= whole
            if said.finish and (wrong or len(tokens) != said.tokens):
                raise Mismatch(f"{said.tokens} tokens, ended by {said.finish!r}, are not of {said}")
            own = shortfall(reference, list(calls[0].prompt), tokens, ends if said.finish == "stop" else ())
            load.worst = max(load.worst, own)
            load.ties += 1


def settle(server: ServerProcess) -> None:
    """Wait until no request runs or waits. Raises AssertionError."""
    names = ("llamacpp:requests_processing", "llamacpp:requests_deferred", "llamahybrid:slots_busy")

    def free() -> bool:
        told = server.metrics()
        return not any(told[name] for name in names)

    wait_until(free, 30)


@dataclass(frozen=True)
class Footprint:
    """Resources of a server's process."""

    mib: float
    """Of memory, less what its cache says it holds."""
    threads: int
    files: int

    @classmethod
    def of(cls, server: ServerProcess) -> Footprint:
        held = server.metrics()['llamahybrid:cache_bytes{tier="ram"}']
        process, now = Path(f"/proc/{server.process.pid}"), resident(server.process.pid)
        assert now is not None
        return cls((now - held) / 2**20, *(len(os.listdir(process / name)) for name in ("task", "fd")))

    def require_level(self, since: Footprint) -> None:
        """Raise AssertionError where it has grown since then by more than chance."""
        grown = self.mib - since.mib, self.threads - since.threads, self.files - since.files
        assert all(by <= most for by, most in zip(grown, LEVEL, strict=True)), f"grew from {since} to {self}"


LEVEL = (6.0, 8, 4)
"""MiB, threads and files that may come on top by chance."""


def crowd(work: Callable[[int], Any], numbers: Iterable[int], at_once: int) -> list[Any]:
    """`work(number)` in threads."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(work, numbers))


def ended(server: ServerProcess) -> None:
    """End a server. Raises AssertionError where it has printed a traceback."""
    printed = server.end(signal.SIGTERM)
    assert "Traceback" not in printed, printed[printed.index("Traceback") :][:3000]


# -- the campaign -----------------------------------------------------------------------------------


ROUNDS = 100


@dataclass(frozen=True)
class Plan:
    """Sizes of a campaign."""

    clients: int = 8
    turns: int = 50
    connections: int = 64
    requests: int = 2000
    kills: int = 3
    judge_every: int = 1


def campaign(model: Path, folder: Path, plan: Plan, seed: int, say: Callable[[str], None] = print) -> Load:
    """All of it on one model. Raises Mismatch, AssertionError."""
    kept = ("--ram-bytes", str(64 << 20), "--disk-dir", str(folder / "kept"))
    options = ("--n-ctx", str(N_CTX), "--n-parallel", "4", "--max-queue", "32", "--embedding", "True", *kept)
    server, load = ServerProcess(model, folder / "log", *options), Load()
    try:
        clock = time.monotonic()
        crowd(lambda i: talk(server.client, load, i, plan.turns, seed), range(plan.clients), plan.clients)
        settle(server)
        say(
            f"{plan.clients} clients, {plan.turns} turns: {len(load.answers)} answers, {load.hangups} hung "
            f"up on, {load.known()} cached, {time.monotonic() - clock:.0f} s"
        )

        asked = {"prompt": "Once upon a time", "max_tokens": 8}
        crowd(lambda _: ask(server.client, load, TEXT, asked), range(plan.connections), plan.connections)
        settle(server)
        say(f"{plan.connections} connections at once: {load.refused} told to come later")

        vectors = {note: embed(server.client, [note])[0] for note in NOTES}
        held = [Footprint.of(server)]
        for half in (range(plan.requests // 2), range(plan.requests // 2, plan.requests)):
            crowd(lambda i: request(server.client, load, vectors, i, seed), half, 16)
            settle(server)
            held.append(Footprint.of(server))
        say(f"{plan.requests} requests of all kinds: {', '.join(map(str, held))}")
        if plan.requests >= Plan.requests:  # fewer are all warm-up
            held[2].require_level(held[1])

        for number in range(plan.kills):
            talks = killed(server, plan, folder / "kept", seed + number)
            server = ServerProcess(model, folder / "log", *options)
            go_on(server, load, talks, say)
    finally:
        ended(server)
    assert not load.errors, load.errors[:5]
    judge(model, load, plan.judge_every)
    say(
        f"{len(load.answers[:: plan.judge_every])} answers are a fresh context's, "
        f"{load.ties} of them by a tie of {load.worst:.1e} of the logits' range at most"
    )
    return load


def in_turn(models: list[Path], folder: Path, rounds: int, seed: int, say: Callable[[str], None]) -> None:
    """Two models, of which one is open at a time, each with a conversation that goes on. Raises Mismatch."""
    common = {"n_ctx": N_CTX, "n_threads": 1, "n_threads_batch": 1, "n_parallel": 2}
    settings = [{"model": str(path), "model_alias": path.stem, **common} for path in models]
    loads = {path.stem: Load() for path in models}
    chats = {name: [{"role": "system", "content": words(random.Random(name), 60)}] for name in loads}
    server, held = ServerProcess({"models": settings, "models_bytes": 1}, folder / "log"), list[Footprint]()
    try:
        for number in range(rounds):
            for name, messages in chats.items():
                question = words(random.Random(f"{seed} {number} {name}"), 12)
                messages.append({"role": "user", "content": question})
                said = ask(
                    server.client,
                    loads[name],
                    CHAT,
                    {"model": name, "messages": [*messages], "max_tokens": 8},
                )
                messages.append({"role": "assistant", "content": said or ""})
                if len(messages) > 21:
                    del messages[1:]
            if number % (rounds // 4) == rounds // 4 - 1:
                settle(server)
                held.append(Footprint.of(server))
    finally:
        ended(server)
    say(f"{rounds} rounds of two models: {held}")
    for path in models:
        load = loads[path.stem]
        assert not load.errors, load.errors[:5]
        for answer in load.answers:
            answer.asked.pop("model")
        judge(path, load)
    if rounds >= ROUNDS:  # fewer are all warm-up
        held[3].require_level(held[1])


def wait_for_writes(folder: Path, quiet: float = 3.5, most: float = 40.0) -> None:
    """Return once a folder has not grown for `quiet` seconds: idle paths are then written."""
    seen, since, end = -1, time.monotonic(), time.monotonic() + most
    while time.monotonic() < min(since + quiet, end):
        size = sum(file.stat().st_size for file in folder.rglob("*.val"))
        if size != seen:
            seen, since = size, time.monotonic()
        time.sleep(0.1)


def killed(server: ServerProcess, plan: Plan, folder: Path, seed: int) -> list[list[dict[str, str]]]:
    """Kill -9 while clients talk; conversations that stood still by then."""
    turns, load, clients = max(2, plan.turns // 10), Load(), range(plan.clients)
    talks = crowd(lambda i: talk(server.client, load, i, turns, 1000 + seed), clients, plan.clients)
    wait_for_writes(folder)
    with ThreadPoolExecutor(plan.clients) as pool:
        others = [pool.submit(talk, server.client, load, 50 + i, 50, seed) for i in clients]
        time.sleep(1.0)
        server.process.kill()
        for other in others:
            other.exception()
    server.process.wait()
    server.client.close()
    return talks


def go_on(
    server: ServerProcess, load: Load, talks: list[list[dict[str, str]]], say: Callable[[str], None]
) -> None:
    """Go on with conversations after a restart. Raises AssertionError where most of them is not known."""
    warm = Load()
    for messages in talks:
        if len(messages) > 1:
            more = [*messages, {"role": "user", "content": "go on"}]
            ask(server.client, warm, CHAT, {"messages": more, "max_tokens": 4})
    load.answers += warm.answers
    load.errors += warm.errors
    say(f"killed and restarted: {warm.known()} were known")
    assert warm.cached_tokens > warm.prompt_tokens / 2, "conversations are cold after a restart"


def main(
    clients: Annotated[int, typer.Option(help="That talk at once.")] = Plan.clients,
    turns: Annotated[int, typer.Option(help="Of each.")] = Plan.turns,
    connections: Annotated[int, typer.Option(help="Opened at once.")] = Plan.connections,
    requests: Annotated[int, typer.Option(help="Of all kinds; half of them hang up.")] = Plan.requests,
    kills: Annotated[int, typer.Option(help="Times that the server is killed.")] = Plan.kills,
    rounds: Annotated[int, typer.Option(help="That two models take turns.")] = ROUNDS,
    seed: Annotated[int, typer.Option(help="Of what clients say and do.")] = 1,
) -> None:
    """A server under load."""
    silence()
    plan = Plan(clients, turns, connections, requests, kills)
    with tempfile.TemporaryDirectory() as name, reported(Console(), f"seed {seed}"):
        folder = Path(name)
        models = [tiny.make(arch, folder / f"{arch}.gguf") for arch in ("qwen35", "gemma3")]
        campaign(models[0], folder, plan, seed)
        in_turn(models, folder, rounds, seed, print)


if __name__ == "__main__":
    typer.run(main)
