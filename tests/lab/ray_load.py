"""Chats of agents on replicas, and how much of them was decoded.

``python -m tests.lab.ray_load --replicas 2 --clients 8 --turns 10 [--remote URL]``

Needs Ray Serve. Half of the clients name their session. The oracle ratio is prompt tokens decoded over those
that one infinite cache for all replicas would have to decode. A request that fails is asked again, twice at
most.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from tests.lab.waiting import free_port

SYSTEM = "You are an agent that answers with the tools it has, step by step, and says why. " * 4
WORDS = ("river", "stone", "crow", "bridge", "winter", "letter", "engine", "garden", "window")
SLOTS = 4


@dataclass
class Tally:
    """A request and its cost."""

    decoded: int = 0
    least: int = 0
    failed: int = 0
    lost: int = 0
    """Asked twice without an answer."""
    lock: threading.Lock = field(default_factory=threading.Lock)


class Agent(threading.Thread):
    """An agent: the history of its chat grows turn by turn."""

    def __init__(self, url: str, number: int, turns: int, tally: Tally):
        super().__init__(daemon=True)
        self._client = httpx.Client(base_url=url, timeout=120, trust_env=False)
        self._random = random.Random(number)
        self._number, self._turns, self._tally = number, turns, tally

    def _say(self, n: int) -> str:
        return " ".join(self._random.choices(WORDS, k=n))

    def run(self) -> None:
        headers = {"x-session-id": str(self._number)} if self._number % 2 else {}
        history = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self._say(40)}]
        known = 0
        for _ in range(self._turns):
            answer = self._ask(history, headers)
            if answer is None:
                continue
            usage = answer["usage"]
            total, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
            with self._tally.lock:
                if known:  # the first turn is cold, or shares a system prompt with whoever came first
                    self._tally.decoded += total - cached
                    self._tally.least += max(1, total - known)
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


def play(model: Path, replicas: int, clients: int, turns: int, remote: str | None = None) -> Tally:
    """Run chats on a cluster and print their cost."""
    import ray
    from ray import serve

    import llamahybrid.ray

    tally = Tally()
    ray.init(num_cpus=8, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        app = llamahybrid.ray.app(
            str(model),
            replicas,
            n_parallel=SLOTS,
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
        agents = [Agent(url, i, turns, tally) for i in range(clients)]
        for agent in agents:
            agent.start()
            time.sleep(0.2)  # the first one's system prompt is known to the others
        for agent in agents:
            agent.join()
    finally:
        serve.shutdown()
        ray.shutdown()
    return tally


def main(
    replicas: int = 2,
    clients: int = 8,
    turns: int = 10,
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
        tally = play(model, replicas, clients, turns, remote)
    ratio = tally.decoded / max(1, tally.least)
    print(f"{replicas} replicas, {clients} chats of {turns} turns: ratio {ratio:.3f}", end="")
    print(f", {tally.failed} failed, {tally.lost} lost")


if __name__ == "__main__":
    typer.run(main)
