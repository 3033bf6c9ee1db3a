"""Thread campaigns: several threads on several `Llama` objects that share one prompt cache.

``python -m tests.lab.thread_fuzz --seconds 300 [--seed 1] [--arch qwen35]``

All threads take chats from one pool, go on with them or cut them back, so that what one object stores another
restores; beside them the cache is pinned, squeezed, forgotten from and emptied. Each answer is then compared
with a fresh stock context, and the cache's books with what it holds.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import typer

from llamahybrid.harness.workloads.speech import Speech
from llamahybrid.llama import Llama
from llamahybrid.prompt_cache import PromptCache
from llamahybrid.prompt_cache.envelope import HEADER_BYTES
from tests.lab.campaign import Archs, Seconds, Seed, sweep
from tests.lab.differential import Mismatch
from tests.lab.integrity import check_integrity
from tests.lab.reference import Reference, Setting

ARCHITECTURES = ("qwen35", "jamba", "mamba", "gemma3")
SETTING = Setting("small batches, window", {"n_batch": 64, "n_ubatch": 32, "swa_full": False})
OBJECTS, THREADS = 2, 4
REQUESTS = 12
"""Requests of each thread in a round."""
SNAPSHOTS = 12
"""The budget: fewer than the chats of a round leave behind."""
LONGEST = 400


@dataclass
class Outcome:
    """What the rounds on one model showed."""

    rounds: int = 0
    requests: int = 0
    cached: int = 0
    """Prompt tokens that were not decoded."""
    evictions: int = 0
    worst: float = 0.0
    """Furthest that a chosen token lay under the best one, as a share of the logits' range."""


@dataclass
class _Pool:
    """Chats that every thread may go on with."""

    chats: list[list[int]]
    lock: threading.Lock = field(default_factory=threading.Lock)
    answers: list[tuple[list[int], list[int]]] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)


def _client(llm: Llama, pool: _Pool, speech: Speech, chance: random.Random) -> None:
    """One thread's requests."""
    for _ in range(REQUESTS):
        with pool.lock:
            chat = chance.choice(pool.chats)
        if chance.random() < 0.3:
            chat = chat[: chance.randrange(len(chat) // 2, len(chat) + 1)]
        prompt = chat + speech.message(chance.randrange(3, 50)) + speech.reply()
        stream = llm.generate(prompt, temp=0.0)
        answer = list(islice(stream, chance.randrange(1, 12)))
        stream.close()
        with pool.lock:
            pool.answers.append((prompt, answer))
            if len(prompt) + len(answer) < LONGEST:
                pool.chats.append(prompt + answer)


def _meddler(cache: PromptCache, pool: _Pool, chance: random.Random, done: threading.Event) -> None:
    """What others may ask of the cache at any time."""
    limit = cache.ram_bytes
    while not done.wait(0.002):
        with pool.lock:
            chat = chance.choice(pool.chats)
        deed = chance.randrange(6)
        if deed == 0:
            cache.pin(chat[: len(chat) // 2])
        elif deed == 1:
            cache.unpin(chat[: len(chat) // 2])
        elif deed == 2 and chance.random() < 0.2:
            cache.forget(chat)
        elif deed == 3 and chance.random() < 0.1:
            cache.clear()
        elif deed == 4:
            cache.ram_bytes = chance.randrange(limit // 3, limit)
        check_integrity(cache)
    cache.ram_bytes = limit


def _guarded(pool: _Pool, work: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        try:
            work()
        except BaseException as error:
            pool.errors.append(error)

    return run


def stress(model: Path, seed: int, outcome: Outcome) -> None:
    """One round, in which every answer is compared with a cold one.

    Raises:
        Mismatch: an answer is not that of a fresh context; the message names the prompt.
        Exception: whatever a thread died of.
    """
    cache = PromptCache(1 << 40)
    objects = [SETTING.open(Llama, model, prompt_cache=cache) for _ in range(OBJECTS)]
    reference = Reference(model, SETTING)
    try:
        snapshot = HEADER_BYTES + objects[0].runner.live.profile.snapshot_bytes
        cache.ram_bytes = SNAPSHOTS * max(snapshot, 1 << 17)
        speech = Speech(objects[0], seed)
        pool = _Pool([speech.message(60, "system") for _ in range(2)])
        clients = [
            _guarded(
                pool,
                lambda i=i: _client(  # type: ignore[misc]
                    objects[i % OBJECTS],
                    pool,
                    Speech(objects[0], 100 * seed + i),
                    random.Random(f"{seed} {i}"),
                ),
            )
            for i in range(THREADS)
        ]
        done = threading.Event()
        meddler = threading.Thread(
            target=_guarded(pool, lambda: _meddler(cache, pool, random.Random(seed), done))
        )
        threads = [threading.Thread(target=client) for client in clients]
        for thread in [meddler, *threads]:
            thread.start()
        for thread in threads:
            thread.join()
        done.set()
        meddler.join()
        if pool.errors:
            raise pool.errors[0]
        check_integrity(cache)
        for prompt, answer in pool.answers:
            outcome.worst = max(outcome.worst, shortfall(reference, prompt, answer))
        outcome.rounds += 1
        outcome.requests += len(pool.answers)
        stats = cache.stats()
        outcome.cached += stats.tokens_saved
        outcome.evictions += stats.evictions
    finally:
        for llm in objects:
            llm.close()
        reference.close()


def shortfall(reference: Reference, prompt: list[int], answer: list[int]) -> float:
    """How far greedy tokens lie under a fresh context's best, as a share of the logits' range."""
    rows = reference.logits(prompt, answer[:-1])
    chosen = rows[np.arange(len(answer)), answer]
    worst = float(((rows.max(axis=1) - chosen) / np.ptp(rows, axis=1)).max())
    if worst > SETTING.tolerance:
        raise Mismatch(f"an answer lies {worst:.3f} of the logits' range under the best; prompt {prompt}")
    return worst


def main(seconds: Seconds = 60, seed: Seed = 0, arch: Archs = None) -> None:
    """Several threads and objects on one prompt cache, for a bounded time."""

    def play(model: Path, way: str, number: int, until: float) -> tuple[object, ...]:
        outcome = Outcome()
        while not outcome.rounds or time.monotonic() < until:
            try:
                stress(model, seed + outcome.rounds, outcome)
            except Mismatch as mismatch:
                raise Mismatch(f"round {outcome.rounds}: {mismatch}") from mismatch
        counts = (outcome.rounds, outcome.requests, outcome.cached, outcome.evictions)
        return (*counts, f"{outcome.worst:.1e}")

    sweep(
        play,
        arch or ARCHITECTURES,
        "rounds, requests, tokens cached, evictions, worst",
        seconds,
        seed,
        window=16,
    )


if __name__ == "__main__":
    typer.run(main)
