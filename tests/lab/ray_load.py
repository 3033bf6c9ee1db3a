"""Chats of agents on replicas, and how much of them was decoded; with replicas that are killed meanwhile.

``python -m tests.lab.ray_load --replicas 2 --router ours --clients 8 --turns 10 [--kills 20] [--remote URL]``

Needs Ray Serve. Each router is measured in a cluster of its own: "ours", "random" (Ray's power of two
choices) and "hash" (its ConsistentHashRouter, whose session header half of the clients send). The oracle
ratio is prompt tokens decoded over those that one infinite cache for all replicas would have to decode. A
request that fails is asked again, twice at most. With kills, agents begin new chats until the last one, and
each kill waits until all replicas run; its ratio is that of every agent's first answer after it.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

SYSTEM = "You are an agent that answers with the tools it has, step by step, and says why. " * 4
WORDS = ("river", "stone", "crow", "bridge", "winter", "letter", "engine", "garden", "window")
SLOTS = 4

REPLICA = re.compile(r"ray::ServeReplica:default:llamahybrid(?!-)")
RESTART_SECONDS = 120.0


@dataclass
class Tally:
    """What was asked, and what it cost."""

    prompt: int = 0
    decoded: int = 0
    least: int = 0
    failed: int = 0
    lost: int = 0
    """Asked twice without an answer."""
    after_kill: list[float] = field(default_factory=list)
    """Ratios of each agent's first answer after each kill."""
    back: list[float] = field(default_factory=list)
    """Seconds from each kill until all replicas ran again."""
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class Mark:
    """One answer that went on with a chat."""

    at: float
    agent: int
    decoded: int
    least: int


class Agent(threading.Thread):
    """One agent: its history grows turn by turn; chat after chat, or one."""

    def __init__(self, url: str, number: int, turns: int, tally: Tally, marks: list[Mark]):
        super().__init__(daemon=True)
        self._client = httpx.Client(base_url=url, timeout=120, trust_env=False)
        self._random = random.Random(number)
        self._number, self._turns, self._tally, self._marks = number, turns, tally, marks
        self.last_chat = threading.Event()
        """Set: the chat that runs is the last one."""

    def _say(self, n: int) -> str:
        return " ".join(self._random.choices(WORDS, k=n))

    def run(self) -> None:
        for chat in itertools.count():
            self._chat(f"{self._number}.{chat}")
            if self.last_chat.is_set():
                break

    def _chat(self, name: str) -> None:
        headers = {"x-session-id": name} if self._number % 2 else {}
        history = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self._say(40)}]
        known = 0
        for _ in range(self._turns):
            answer = self._ask(history, headers)
            if answer is None:
                continue
            usage = answer["usage"]
            total, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
            least = max(1, total - known)
            with self._tally.lock:
                self._tally.prompt += total
                if known:  # the first turn is cold, or shares a system prompt with whoever came first
                    self._tally.decoded += total - cached
                    self._tally.least += least
                    self._marks.append(Mark(time.monotonic(), self._number, total - cached, least))
            known = total
            # Not what a random model said: its text comes back as other tokens.
            history += [{"role": "assistant", "content": self._say(12)}]
            history += [{"role": "user", "content": self._say(12)}]
            time.sleep(self._random.uniform(0.0, 0.3))

    def _ask(self, messages: list[dict[str, str]], headers: dict[str, str]) -> dict[str, Any] | None:
        body = {"messages": messages, "max_tokens": 12, "temperature": 0}
        for _ in range(3):
            try:
                reply = self._client.post("/v1/chat/completions", json=body, headers=headers)
                if reply.status_code == 200:
                    answer: dict[str, Any] = reply.json()
                    return answer
            except httpx.HTTPError:
                pass
            with self._tally.lock:
                self._tally.failed += 1
            time.sleep(0.5)
        with self._tally.lock:
            self._tally.lost += 1
        return None


def router_of(name: str) -> Any:
    """The router's class; None: ours."""
    if name == "random":
        from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter

        return PowerOfTwoChoicesRequestRouter
    if name == "hash":
        from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

        return ConsistentHashRouter
    return None


def replica_processes() -> list[int]:
    """Processes of this cluster's replicas: descendants of this one, by the name that Ray gives them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if REPLICA.match((folder / "cmdline").read_text()) and _is_ours(int(folder.name)):
                found.append(int(folder.name))
    return found


def _is_ours(pid: int) -> bool:
    while pid > 1 and pid != os.getpid():
        pid = int(re.findall(r"^PPid:\s*(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[0])
    return pid == os.getpid()


def all_run(replicas: int, within: float) -> None:
    """Wait until so many replicas answer. Raises AssertionError where they do not come back."""
    from ray import serve

    end = time.monotonic() + within
    while time.monotonic() < end:
        states = serve.status().applications["default"].deployments["llamahybrid"].replica_states
        # Both: a process may still start, and one that is gone runs until Serve looks after it.
        if states == {"RUNNING": replicas} and len(replica_processes()) == replicas:
            return
        time.sleep(0.2)
    raise AssertionError("a replica that was killed does not come back")


def ratio_after(kill: float, marks: Sequence[Mark]) -> float | None:
    """Of each agent's first answer since then; None: nobody was answered."""
    first: dict[int, Mark] = {}
    for mark in marks:
        if mark.at > kill:
            first.setdefault(mark.agent, mark)
    least = sum(each.least for each in first.values())
    return sum(each.decoded for each in first.values()) / least if least else None


def play(
    model: Path, replicas: int, router: str, clients: int, turns: int, kills: int, remote: str | None
) -> Tally:
    """A cluster, so many chats, and what they cost."""
    import ray
    from ray import serve

    import llamahybrid.ray

    rng, tally, marks = random.Random(7), Tally(), list[Mark]()
    ray.init(num_cpus=8, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        app = llamahybrid.ray.app(
            str(model),
            replicas,
            n_parallel=SLOTS,
            router=router_of(router),
            ray_actor_options={"num_cpus": 0.5},
            n_ctx=4096,
            n_threads=1,
            n_threads_batch=1,
            chat_format="chatml",
            remote=remote,
        )
        port = free_port()
        serve.start(http_options={"port": port})
        serve.run(app)
        url = f"http://127.0.0.1:{port}"
        agents = [Agent(url, i, turns, tally, marks) for i in range(clients)]
        for agent in agents:
            if not kills:
                agent.last_chat.set()
            agent.start()
            time.sleep(0.2)  # the first one's system prompt is known to the others
        all_run(replicas, RESTART_SECONDS)
        for _ in range(kills):
            time.sleep(rng.uniform(1.0, 4.0))
            killed = time.monotonic()
            os.kill(rng.choice(replica_processes()), signal.SIGKILL)
            all_run(replicas, RESTART_SECONDS)
            tally.back.append(time.monotonic() - killed)
            ratio = ratio_after(killed, list(marks))
            tally.after_kill += [] if ratio is None else [ratio]
            said = "nobody was answered" if ratio is None else f"ratio {ratio:.2f}"
            typer.echo(f"{said}, {tally.failed} failed, all ran again after {tally.back[-1]:.0f} s", err=True)
        for agent in agents:
            agent.last_chat.set()
        for agent in agents:
            agent.join()
    finally:
        serve.shutdown()
        ray.shutdown()
    return tally


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def main(
    replicas: int = 2,
    router: Annotated[str, typer.Option(help="ours, random or hash")] = "ours",
    clients: int = 8,
    turns: int = 10,
    kills: int = 0,
    remote: str | None = None,
    arch: str = "qwen35",
    params: Annotated[int | None, typer.Option(help="the model's weights; None: as few as it takes")] = None,
) -> None:
    """Play, and print the oracle ratio.

    A read of the store is waited for no longer than what it saves takes to decode: of a tiny model, while a
    replica starts on the same cores, some are not. With `params` decoding takes as long as it does for users.
    """
    from llamahybrid import tiny

    with tempfile.TemporaryDirectory() as folder:
        model = tiny.make(arch, Path(folder) / "model.gguf", params=params)
        tally = play(model, replicas, router, clients, turns, kills, remote)
    ratio = tally.decoded / max(1, tally.least)
    print(f"{router}, {replicas} replicas, {clients} chats of {turns} turns: ratio {ratio:.3f}", end="")
    print(f", {tally.failed} failed, {tally.lost} lost", end="")
    if tally.after_kill:
        ratios = sorted(tally.after_kill)
        print(
            f", {len(tally.back)} kills, {len(tally.after_kill)} with answers before all ran again:", end=""
        )
        print(f" ratios {' '.join(f'{ratio:.2f}' for ratio in ratios)}", end="")
        print(f"; all ran again after {statistics.median(tally.back):.0f} s", end="")
    print()


if __name__ == "__main__":
    typer.run(main)
