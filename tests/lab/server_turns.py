"""A server for a long day: thousands of requests, embeddings beside chats, models in turn, a full disk.

``python -m tests.lab.server_turns [--requests 5000] [--rounds 200] [--disk FOLDER] [--seed 1]``

A process of `llamahybrid serve` on tiny models. Each answer is compared with that of a fresh stock context,
each vector with that of the same text alone, and what the process holds must stay level (see `server_load`).
`--disk`: a folder on a small disk of its own, which conversations then fill; without it that is left out.
"""

from __future__ import annotations

import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from llamahybrid import tiny
from tests.lab.differential import Mismatch
from tests.lab.quiet import silence
from tests.lab.server_clients import CHAT, N_CTX, TEXT, Load, ask, hang_up, words
from tests.lab.server_load import Footprint, crowd, judge, settle
from tests.lab.serving import ServerProcess

AT_ONCE = 64
WARM_REQUESTS, WARM_ROUNDS = 4000, 100
"""Fewer are all warm-up."""
PROMPTS = 300
"""That there are: what the cache remembers of paths, beyond what it counts, is level once it knows all."""
NOTES = [f"a note of {what}" for what in ("rivers", "stones", "light", "trees and what lies under them")]
ERRORS = "llamahybrid:cache_disk_errors_total"

Say = Callable[[str], None]


@contextmanager
def running(model: Path | dict[str, Any], folder: Path, *options: str) -> Iterator[ServerProcess]:
    """A server, which prints no traceback until it ends."""
    server = ServerProcess(model, folder / "log", *options)
    try:
        yield server
        settle(server)
    finally:
        printed = server.end(signal.SIGTERM)
    assert "Traceback" not in printed, printed[printed.index("Traceback") :][:3000]


def embed(server: ServerProcess, texts: list[str]) -> list[Any]:
    """The vectors of texts. Raises AssertionError."""
    answer = server.client.post("/v1/embeddings", json={"input": texts})
    assert answer.status_code == 200, answer.text
    return [each["embedding"] for each in answer.json()["data"]]


def many(model: Path, folder: Path, requests: int, seed: int, say: Say) -> None:
    """Chats, completions, embeddings and clients that leave, on 64 connections."""
    options = (
        "--n-ctx",
        str(N_CTX),
        "--n-parallel",
        "4",
        "--embedding",
        "True",
        "--ram-bytes",
        str(32 << 20),
    )
    load, held, clock = Load(), list[Footprint](), time.monotonic()
    with running(model, folder, *options, "--max-queue", str(AT_ONCE)) as server:
        wanted = {note: embed(server, [note])[0] for note in NOTES}

        def one(number: int) -> None:
            chance = random.Random(f"{seed} {number}")
            said = chance.choices(("chat", "stream", "text", "embed", "leave"), (4, 2, 2, 2, 1))[0]
            system = {"role": "system", "content": words(random.Random(number % 5), 40)}
            pool = random.Random(chance.randrange(PROMPTS))
            question = {"role": "user", "content": words(pool, pool.randrange(1, 20))}
            chat = {"messages": [system, question], "max_tokens": chance.randrange(1, 12)}
            text = {"prompt": words(pool, pool.randrange(1, 60)), "max_tokens": chance.randrange(1, 12)}
            if said == "embed":
                texts = chance.sample(NOTES, chance.randrange(1, len(NOTES)))
                if embed(server, texts) != [wanted[each] for each in texts]:
                    load.failed(f"other vectors of {texts}")
            elif said == "leave":
                hang_up(server.port, CHAT, {**chat, "max_tokens": 200, "stream": True}, chance)
            elif said == "text":
                ask(server.client, load, TEXT, text)
            else:
                ask(server.client, load, CHAT, chat, stream=said == "stream")

        for quarter in range(4):
            first = quarter * requests // 4
            crowd(lambda n, first=first: one(first + n), requests // 4, AT_ONCE)  # type: ignore[misc]
            settle(server)
            held.append(Footprint.of(server))
    say(f"{requests} requests, {time.monotonic() - clock:.0f} s: {', '.join(map(str, held))}")
    _judge(model, load, max(1, len(load.answers) // 500), say)
    if requests >= WARM_REQUESTS:
        held[3].require_level(held[1])


def in_turn(models: list[Path], folder: Path, rounds: int, seed: int, say: Say) -> None:
    """Two models, of which one is open at a time, each with a conversation that goes on."""
    common = {"n_ctx": N_CTX, "n_threads": 1, "n_threads_batch": 1, "n_parallel": 2, "embedding": True}
    settings = [{"model": str(path), "model_alias": path.stem, **common} for path in models]
    loads = {path.stem: Load() for path in models}
    chats = {name: [{"role": "system", "content": words(random.Random(name), 60)}] for name in loads}
    held, clock = list[Footprint](), time.monotonic()
    with running({"models": settings, "models_bytes": 1}, folder) as server:
        for number in range(rounds):
            for name, messages in chats.items():
                chance = random.Random(f"{seed} {number} {name}")
                messages.append({"role": "user", "content": words(chance, 12)})
                asked = {"model": name, "messages": list(messages), "max_tokens": 8}
                said = ask(server.client, loads[name], CHAT, asked)
                messages.append({"role": "assistant", "content": said or ""})
                if len(messages) > 21:
                    del messages[1:]
            if number % (rounds // 4) == rounds // 4 - 1:
                settle(server)
                held.append(Footprint.of(server))
    decoded = {name: each.prompt_tokens - each.cached_tokens for name, each in loads.items()}
    say(f"{rounds} rounds of two models, {time.monotonic() - clock:.0f} s, decoded {decoded}: {held}")
    for path in models:
        load = loads[path.stem]
        for answer in load.answers:
            answer.asked.pop("model")
        _judge(path, load, 1, say)
    if rounds >= WARM_ROUNDS:
        held[3].require_level(held[1])


def full_disk(model: Path, folder: Path, disk: Path, seed: int, say: Say) -> None:
    """Conversations until the disk is full and further; then a restart on what lies there."""
    options = ("--n-ctx", str(N_CTX), "--n-parallel", "2", "--disk-dir", str(disk / "kept"))
    load, errors = Load(), 0.0
    for number in range(2):
        with running(model, folder, *options, "--disk-bytes", str(1 << 30)) as server:
            for asked in range(60):
                chance = random.Random(f"{seed} {number} {asked}")
                ask(server.client, load, TEXT, {"prompt": words(chance, 500), "max_tokens": 4})
            errors += server.metrics()[ERRORS]
    say(f"full disk: {len(load.answers)} answers, {errors:.0f} errors counted")
    assert errors, "the disk was never full: give a smaller one"
    _judge(model, load, 4, say)


def _judge(model: Path, load: Load, every: int, say: Say) -> None:
    assert not load.errors, load.errors[:5]
    judge(model, load, every)
    ties = f"{load.ties} of them by a tie of {load.worst:.1e} of the logits' range at most"
    say(f"{len(load.answers)} answers, {load.refused} refused; each {every}th is a fresh context's, {ties}")


def main(
    requests: Annotated[int, typer.Option(help="Of the crowd.")] = 5000,
    rounds: Annotated[int, typer.Option(help="That the two models take turns.")] = 200,
    disk: Annotated[Path | None, typer.Option(help="A folder on a small disk.")] = None,
    seed: Annotated[int, typer.Option(help="Of what clients say and do.")] = 1,
) -> None:
    """A server for a long day."""
    silence()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = [tiny.make(arch, folder / f"{arch}.gguf") for arch in ("qwen35", "gemma3")]
        try:
            many(models[0], folder, requests, seed, print)
            in_turn(models, folder, rounds, seed, print)
            if disk is not None:
                full_disk(models[0], folder, disk, seed, print)
        except (Mismatch, AssertionError) as error:
            Console().print(f"seed {seed}: {error}", style="red", markup=False)
            raise typer.Exit(1) from error


if __name__ == "__main__":
    typer.run(main)
