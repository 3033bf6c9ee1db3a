"""A shared store that is paused, killed and emptied under load: no wrong state is accepted.

``python -m tests.lab.remote_fuzz --blows 50 [--machines 3] [--seed 1]``

Each machine is a thread with a cache of its own on one Redis server. States are made up, so that right and
wrong records can be told apart (`disk_fuzz`); bytes on the server change, too. Exit status 1 at the first
wrong state.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import redis
import typer
from rich.console import Console

from llamahybrid.prompt_cache.cache import PromptCache
from llamahybrid.prompt_cache.remote import PREFIX
from tests.lab.disk_fuzz import turn
from tests.lab.integrity import check_integrity
from tests.lab.redis_server import PROGRAM, RedisServer

RAM_BYTES = 12 << 20
REMOTE_BYTES = 48 << 20


class Machine(threading.Thread):
    """Takes turns on a cache of its own until `stop` is set."""

    def __init__(self, url: str, seed: int) -> None:
        super().__init__(daemon=True)
        self.rng = random.Random(seed)
        self.url = url
        self.cache = self._opened()
        self.sources: Counter[str] = Counter()
        self.restarts = 0
        self.wrong: BaseException | None = None
        self.stop = threading.Event()

    def _opened(self) -> PromptCache:
        return PromptCache(RAM_BYTES, remote=self.url, remote_bytes=REMOTE_BYTES)

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                if self.rng.random() < 0.01:  # a machine is new: it knows what the server has, no more
                    self.cache, self.restarts = self._opened(), self.restarts + 1
                self.sources[turn(self.cache, self.rng)] += 1
            check_integrity(self.cache)
        except BaseException as error:
            self.wrong = error


BLOWS = ("pause", "pause", "kill", "kill", "flush", "damage", "drop")


def strike(server: RedisServer, rng: random.Random) -> str:
    """Do something to the server."""
    client: Any = server.client()
    how = rng.choice(BLOWS)
    if how == "pause":
        server.pause()
        time.sleep(rng.uniform(0.05, 1.5))
        server.resume()
    elif how == "kill":
        server.kill()
        time.sleep(rng.uniform(0.0, 1.0))
        server.start()
    elif how == "flush":
        client.flushall()
    else:
        for key in rng.sample(keys := client.keys(PREFIX + b"*"), min(5, len(keys))):
            if how == "drop":
                client.delete(key)
            elif size := client.strlen(key):
                client.setrange(key, rng.randrange(size), bytes([rng.randrange(256)]))
    return how


def play(blows: int, machines: int, seed: int, most_seconds: float) -> dict[str, Any]:
    """Strike the server `blows` times, for `most_seconds` at most; return counts. Raises AssertionError."""
    rng, blow = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder), keep=bool(seed % 2))
        all_ = [Machine(server.url, 1000 * seed + i) for i in range(machines)]
        for machine in all_:
            machine.start()
        end = time.monotonic() + most_seconds
        for _ in range(blows):
            if time.monotonic() > end:
                break
            time.sleep(rng.uniform(0.2, 1.5))
            try:
                blow[strike(server, rng)] += 1
            except redis.RedisError:
                blow["missed"] += 1
        while time.monotonic() < end and not any(m.sources["remote"] or m.wrong for m in all_):
            time.sleep(0.05)  # a slow machine, which has played few turns between the blows
        for machine in all_:
            machine.stop.set()
        for machine in all_:
            machine.join(60)
            assert not machine.is_alive(), "a machine hangs"
            if machine.wrong is not None:
                raise machine.wrong
        server.kill()
    extra: Counter[str] = sum((Counter(m.cache.stats().extra) for m in all_), Counter())
    return {
        "blows": dict(blow),
        "turns": dict(sum((m.sources for m in all_), Counter())),
        "new machines": sum(m.restarts for m in all_),
        "damaged": extra["remote_damaged"],
        "refused": extra["remote_errors"],
    }


def main(
    blows: Annotated[int, typer.Option(min=1)] = 50,
    machines: Annotated[int, typer.Option(min=1)] = 3,
    seed: int = 1,
    seconds: Annotated[float, typer.Option(help="at most")] = 600.0,
) -> None:
    """Play, and print what happened."""
    console = Console()
    if PROGRAM is None:
        console.print("left out: neither redis-server nor valkey-server is installed")
        return
    console.print(f"seed {seed}:", play(blows, machines, seed, seconds))


if __name__ == "__main__":
    typer.run(main)
