"""A server under load: conversations, crowds, clients that hang up, and kill -9.

``python -m tests.lab.server_load [--turns 50] [--hangups 1000] [--kills 3] [--arch qwen35] [--seed 1]``

A process of `llamahybrid serve` on a tiny model. Each whole answer is compared with that of a fresh stock
context; then nobody may be in, and memory may not have grown.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import llama_cpp
import typer
from rich.console import Console

from llamahybrid import tiny
from tests.lab.differential import Mismatch
from tests.lab.quiet import silence
from tests.lab.reference import Reference, Setting
from tests.lab.serving import ServerProcess, wait_until
from tests.lab.thread_fuzz import shortfall

N_CTX = 4096
SETTING = Setting("server", {"n_ctx": N_CTX})
PLAIN: dict[str, Any] = {"temperature": 0.0, "repeat_penalty": 1.0}
WORDS = [
    "the",
    "a",
    "some",
    "tree",
    "river",
    "stone",
    "light",
    "and",
    "or",
    "but",
    "sees",
    "takes",
    "gives",
    "leaves",
    "under",
    "over",
    "when",
]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESET = struct.pack("ii", 1, 0)
"""Has a socket say so when it is closed (SO_LINGER)."""


@dataclass
class Load:
    """What was seen."""

    answers: list[tuple[str, dict[str, Any], str]] = field(default_factory=list)
    """(path, what was asked, what was answered), whole ones."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    hangups: int = 0
    refused: int = 0
    errors: list[str] = field(default_factory=list)
    worst: float = 0.0
    """Furthest that a token lay under a fresh context's best, as a share of the logits' range."""
    ties: int = 0
    """Answers with another text than a fresh context's, within the tolerance."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answered(self, path: str, asked: dict[str, Any], text: str, usage: dict[str, Any]) -> None:
        """One more."""
        with self.lock:
            self.answers.append((path, asked, text))
            self.prompt_tokens += usage["prompt_tokens"]
            self.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]

    def failed(self, what: str) -> None:
        """An error."""
        with self.lock:
            self.errors.append(what)


def words(chance: random.Random, n: int) -> str:
    """So many."""
    return " ".join(chance.choice(WORDS) for _ in range(n))


# -- what clients do --------------------------------------------------------------------------------


def talk(client: httpx.Client, load: Load, number: int, turns: int, seed: int) -> list[dict[str, str]]:
    """One client's conversation: whole, streamed, and hung up on in between; its messages."""
    chance = random.Random(f"{seed} {number}")
    system = "You are a " + words(random.Random(number % 2), 30)
    messages = [{"role": "system", "content": system}]
    for _ in range(turns):
        messages.append({"role": "user", "content": words(chance, chance.randrange(3, 25))})
        asked = {"messages": list(messages), "max_tokens": chance.randrange(2, 16)}
        how = chance.choice(("whole", "whole", "stream", "stream", "hang up"))
        if how == "hang up":
            hang_up(int(client.base_url.port or 0), CHAT, {**asked, "stream": chance.random() < 0.5}, chance)
            with load.lock:
                load.hangups += 1
        said = ask(client, load, CHAT, asked, stream=how == "stream")
        if said is None:
            return messages
        messages.append({"role": "assistant", "content": said})
        if sum(len(m["content"]) for m in messages) > N_CTX // 4 - 200:
            messages = messages[:1]
    return messages


def ask(
    client: httpx.Client, load: Load, path: str, asked: dict[str, Any], stream: bool = False
) -> str | None:
    """The text of an answer; None where there was none, which is noted."""
    try:
        if stream:
            text, usage = read(client, path, {**asked, **PLAIN, "stream_options": {"include_usage": True}})
        else:
            response = client.post(path, json={**asked, **PLAIN})
            if response.status_code == 429:
                assert int(response.headers["retry-after"]) > 0
                with load.lock:
                    load.refused += 1
                return None
            assert response.status_code == 200, response.text
            made = response.json()
            choice, usage = made["choices"][0], made["usage"]
            text = choice["text"] if path == TEXT else choice["message"]["content"]
    except (AssertionError, httpx.HTTPError, KeyError) as error:
        load.failed(repr(error))
        return None
    load.answered(path, asked, text, usage)
    return text


def read(client: httpx.Client, path: str, asked: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A stream's text and usage."""
    pieces, usage = list[str](), dict[str, Any]()
    with client.stream("POST", path, json={**asked, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    for chunk in map(json.loads, lines):
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            pieces.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return "".join(pieces), usage


def hang_up(port: int, path: str, asked: dict[str, Any], chance: random.Random) -> None:
    """Ask, and go at a random moment, politely or not: in the headers, the body, the prompt or the answer."""
    body = json.dumps({**asked, **PLAIN}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    said = (head + f"Content-Length: {len(body)}\r\n\r\n").encode() + body
    if chance.random() < 0.1:
        said = said[: chance.randrange(len(said))]
    with socket.create_connection(("127.0.0.1", port)) as connection:
        if chance.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        connection.sendall(said)
        time.sleep(chance.random() ** 3 * 0.3)


# -- what must hold ---------------------------------------------------------------------------------


def judge(model: Path, load: Load, every: int = 1) -> None:
    """Compare answers, or each so many'th, with those of fresh stock contexts. Raises Mismatch."""
    reference = Reference(model, SETTING)
    try:
        for path, asked, text in load.answers[::every]:
            with closing(SETTING.open(llama_cpp.Llama, model)) as llm:
                prompts = watched(llm)
                create = llm.create_completion if path == TEXT else llm.create_chat_completion
                choice = create(**asked, **PLAIN)["choices"][0]
                if (choice["text"] if path == TEXT else choice["message"]["content"]) == text:
                    continue
                tokens = llm.tokenize(text.encode(), add_bos=False, special=True)
            if not tokens:
                raise Mismatch(f"no answer, where a fresh context has one: {asked}")
            load.worst = max(load.worst, shortfall(reference, prompts[0], tokens))
            load.ties += 1
    finally:
        reference.close()


def watched(llm: Any) -> list[list[int]]:
    """The prompts that this model is about to be given."""
    prompts: list[list[int]] = []
    inner = llm.generate

    def generate(tokens: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        prompts.append(list(tokens))
        return inner(tokens, *args, **kwargs)

    llm.generate = generate
    return prompts


def settle(server: ServerProcess) -> None:
    """Nobody is in and nobody waits, soon. Raises AssertionError."""
    names = ("llamacpp:requests_processing", "llamacpp:requests_deferred", "llamahybrid:slots_busy")

    def free() -> bool:
        told = server.metrics()
        return not any(told[name] for name in names)

    wait_until(free, 30)


def resident(server: ServerProcess) -> float:
    """MiB of the server's memory, less what its cache says it holds."""
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    held = server.metrics()['llamahybrid:cache_bytes{tier="ram"}']
    return (pages * os.sysconf("SC_PAGE_SIZE") - held) / 2**20


def crowd(work: Callable[[int], Any], n: int, at_once: int) -> list[Any]:
    """`work(i)` in threads."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(work, range(n)))


# -- the campaign -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """How much of each."""

    clients: int = 8
    turns: int = 50
    connections: int = 64
    hangups: int = 1000
    kills: int = 3
    judge_every: int = 1


def campaign(model: Path, folder: Path, plan: Plan, seed: int, say: Callable[[str], None] = print) -> Load:
    """All of it on one model. Raises Mismatch, AssertionError."""
    kept = ("--ram-bytes", str(64 << 20), "--disk-dir", str(folder / "kept"))
    options = ("--n-ctx", str(N_CTX), "--n-parallel", "4", "--max-queue", "32", *kept)
    server, load = ServerProcess(model, folder / "log", *options), Load()
    try:
        clock = time.monotonic()
        crowd(lambda i: talk(server.client, load, i, plan.turns, seed), plan.clients, plan.clients)
        settle(server)
        before = resident(server)
        share = load.cached_tokens / max(1, load.prompt_tokens)
        say(
            f"{plan.clients} clients, {plan.turns} turns: {len(load.answers)} answers, "
            f"{load.hangups} hung up on, {share:.0%} of {load.prompt_tokens:,} prompt tokens cached, "
            f"{time.monotonic() - clock:.0f} s"
        )

        asked = {"prompt": "Once upon a time", "max_tokens": 8}
        crowd(lambda i: ask(server.client, load, TEXT, asked), plan.connections, plan.connections)
        settle(server)
        say(f"{plan.connections} connections at once: {load.refused} told to come later")

        chances = [random.Random(f"{seed} hang up {i}") for i in range(plan.hangups)]

        def leave(i: int) -> None:
            chance = chances[i]
            prompt = {"prompt": words(chance, chance.randrange(1, 400)), "max_tokens": 200}
            hang_up(server.port, TEXT, {**prompt, "stream": chance.random() < 0.5}, chance)

        crowd(leave, plan.hangups, 16)
        settle(server)
        assert ask(server.client, load, TEXT, {"prompt": "And then", "max_tokens": 8}) is not None
        say(f"{plan.hangups} hung up at random moments: memory {before:.0f} to {resident(server):.0f} MiB")

        for number in range(plan.kills):
            talks = killed(server, plan, folder / "kept", seed + number)
            server = ServerProcess(model, folder / "log", *options)
            go_on(server, load, talks, say)
    finally:
        server.end(signal.SIGTERM)
    printed = server.log.read_text()
    assert "Traceback" not in printed, printed[printed.index("Traceback") :][:3000]
    assert not load.errors, load.errors[:5]
    judge(model, load, plan.judge_every)
    say(
        f"{len(load.answers[:: plan.judge_every])} answers are a fresh context's, "
        f"{load.ties} of them by a tie of {load.worst:.1e} of the logits' range at most"
    )
    return load


def wait_for_writes(folder: Path, quiet: float = 3.5, most: float = 40.0) -> None:
    """Until nothing has been added to a folder for so many seconds: a path that stands still is written."""
    seen, since, end = -1, time.monotonic(), time.monotonic() + most
    while time.monotonic() < min(since + quiet, end):
        size = sum(file.stat().st_size for file in folder.rglob("*.val"))
        if size != seen:
            seen, since = size, time.monotonic()
        time.sleep(0.1)


def killed(server: ServerProcess, plan: Plan, folder: Path, seed: int) -> list[list[dict[str, str]]]:
    """Kill -9 while clients talk; conversations that stood still by then."""
    turns, ended = max(2, plan.turns // 10), Load()
    talks = crowd(lambda i: talk(server.client, ended, i, turns, 1000 + seed), plan.clients, plan.clients)
    wait_for_writes(folder)
    with ThreadPoolExecutor(plan.clients) as pool:
        others = [pool.submit(talk, server.client, ended, 50 + i, 50, seed) for i in range(plan.clients)]
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
    share = warm.cached_tokens / max(1, warm.prompt_tokens)
    say(f"killed and restarted: {share:.0%} of {warm.prompt_tokens:,} prompt tokens were known")
    assert share > 0.5, "conversations are cold after a restart"


def main(
    clients: Annotated[int, typer.Option(help="That talk at once.")] = Plan.clients,
    turns: Annotated[int, typer.Option(help="Of each.")] = Plan.turns,
    connections: Annotated[int, typer.Option(help="Opened at once.")] = Plan.connections,
    hangups: Annotated[int, typer.Option(help="Clients that leave at random moments.")] = Plan.hangups,
    kills: Annotated[int, typer.Option(help="Times that the server is killed.")] = Plan.kills,
    arch: Annotated[str, typer.Option(help="Architecture.")] = "qwen35",
    seed: Annotated[int, typer.Option(help="Of what clients say and do.")] = 1,
) -> None:
    """A server under load."""
    silence()
    plan = Plan(clients, turns, connections, hangups, kills)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.make(arch, Path(folder, "model.gguf"))
        try:
            campaign(model, Path(folder), plan, seed)
        except (Mismatch, AssertionError) as error:
            Console().print(f"{arch}, seed {seed}: {error}", style="red", markup=False)
            raise typer.Exit(1) from error


if __name__ == "__main__":
    typer.run(main)
