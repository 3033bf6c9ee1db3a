"""A shared store that is paused, killed and emptied under load: no wrong state is accepted.

``python -m tests.lab.remote_fuzz --blows 50 [--machines 3] [--seed 1]``

Each machine is a process with a cache of its own on one Redis server. States are made up, so that right and
wrong records can be told apart (`disk_fuzz`); bytes on the server change, too. Exit status 1 at the first
wrong state.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import redis
import typer
from rich.console import Console

from llamahybrid.prompt_cache.remote import PREFIX
from tests.lab.campaign import reported
from tests.lab.disk_fuzz import counts, start
from tests.lab.redis_server import PROGRAM, RedisServer

REMOTE_BYTES = 48 << 20
BLOWS = ("pause", "pause", "kill", "kill", "flush", "damage", "drop")
BLOW_SECONDS = 2.5
"""Longest pause before a blow, and the blow."""


def strike(server: RedisServer, rng: random.Random) -> str:
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


def play(blows: int, machines: int, seed: int) -> Counter[str]:
    """Strike the server `blows` times; the blows and what the machines counted. Raises AssertionError."""
    rng, total = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder), keep=bool(seed % 2))
        seconds = BLOW_SECONDS * blows + 5
        crowd = [start(server.url, 1000 * seed + i, seconds, REMOTE_BYTES) for i in range(machines)]
        for _ in range(blows):
            time.sleep(rng.uniform(0.2, 1.0))
            try:
                total[strike(server, rng)] += 1
            except redis.RedisError:
                total["missed"] += 1
        for machine in crowd:
            total += counts(machine)
        server.kill()
    return total


def main(
    blows: Annotated[int, typer.Option(min=1)] = 50,
    machines: Annotated[int, typer.Option(min=1)] = 3,
    seed: int = 1,
) -> None:
    """Play, and print what happened."""
    console = Console()
    if PROGRAM is None:
        console.print("left out: neither redis-server nor valkey-server is installed")
        return
    with reported(console, f"seed {seed}"):
        console.print(f"seed {seed}:", dict(play(blows, machines, seed)))


if __name__ == "__main__":
    typer.run(main)
