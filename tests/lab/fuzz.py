"""Fuzz campaigns: random histories on every architecture until the time is up.

``python -m tests.lab.fuzz --seconds 600 [--seed 1] [--arch qwen35] [--way restarts | --way one-life]``

Each history takes the next seed and the next setting, with more arguments at random. Exit status 1 on the
first mismatch, with the seed and the shrunk history; the table shows the requests of each architecture and
the worst difference. As ``one-life`` all histories of an architecture use one `Llama`, whose resident memory,
less the bytes of its prompt cache, must not grow.
"""

from __future__ import annotations

import os
import time
from contextlib import closing
from pathlib import Path

from llamahybrid import tiny
from llamahybrid.harness.hazards.process import peak_memory
from llamahybrid.harness.targets.base import resident
from llamahybrid.llama import Llama
from tests.lab.campaign import main
from tests.lab.differential import Mismatch, Runner, Verdict, check
from tests.lab.history import random_history, restarted
from tests.lab.reference import SETTINGS, Factory, Reference, crossed, settings_for

LENGTH = 12
"""Operations of a history."""

WARM_UP = 10
"""Histories before memory is first measured: caches and allocators fill."""

LEAK = 64 << 20
"""Bytes of growth that count as a leak."""


def generative() -> tuple[str, ...]:
    return tuple(arch for arch in tiny.architectures() if arch != "bert")  # which makes no tokens


def run(model: Path, seed: int, count: int, until: float, factory: Factory, restarts: bool) -> Verdict:
    """Run `count` histories on `model`, or until the clock shows `until`, each in its seed's setting.

    Raises:
        Mismatch: with the seed and the shrunk history. `restarts`: see `restarted`.
    """
    total, settings = Verdict(), settings_for(model)
    for number in range(seed, seed + count) if settings else ():
        setting = crossed(settings[number % len(settings)], number)
        history = random_history(number, length=LENGTH)
        try:
            total.add(check(restarted(history) if restarts else history, factory, model, setting))
        except Mismatch as mismatch:
            raise Mismatch(f"seed {number}, {mismatch}") from mismatch
        if time.monotonic() >= until:
            break
    return total


def one_life(model: Path, until: float, seed: int) -> tuple[int, Verdict, int]:
    """Run histories on one `Llama` until the clock shows `until`; the warm-up and one more at least.

    Return their number, what they gave, and the bytes by which resident memory, less the prompt cache's, grew
    after the warm-up.

    Raises:
        Mismatch: an answer or a report is wrong; the message names the seed of the history.
    """
    total, setting, done, warm, held = Verdict(), SETTINGS[0], 0, 0, 0
    with closing(Reference(model, setting)) as reference, closing(setting.open(Llama, model)) as llm:
        while done <= WARM_UP or time.monotonic() < until:
            number = seed + done
            try:
                total.add(Runner(llm, reference, setting).run(random_history(number, length=LENGTH)))
            except Mismatch as mismatch:
                raise Mismatch(f"history of seed {number} on a used Llama: {mismatch}") from mismatch
            done += 1
            held = (resident(os.getpid()) or peak_memory()) - int(llm.prompt_cache.stats().bytes_ram)
            warm = held if done <= WARM_UP else warm
    return done, total, held - warm


def play(model: Path, way: str, seed: int, count: int, until: float) -> dict[str, object]:
    """Run one trial of the campaign. Raises Mismatch."""
    growth = 0.0
    if way == "one-life":
        _, found, grown = one_life(model, until, seed)
        growth = grown / 2**20
        if grown > LEAK:
            raise Mismatch(f"memory outside the prompt cache grew by {growth:.1f} MiB")
    else:
        found = run(model, seed, count, until, Llama, restarts=way == "restarts")
    counts = {"requests": found.requests, "bit-equal": found.bit_equal, "ties": len(found.ties)}
    shares = {"worst difference": f"{found.worst:.1e}", "growth, MiB": f"{growth:.1f}"}
    return {**counts, "from disk": found.from_disk, **shares}


if __name__ == "__main__":
    main(play, generative(), ("histories",))
