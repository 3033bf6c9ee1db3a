"""Fuzz campaigns: random histories on every architecture until the time is up.

``python -m tests.lab.fuzz --seconds 600 [--seed 1] [--arch qwen35] [--restarts | --one-life]``

Each history takes the next seed and the next setting. Exit status 1 on the first mismatch, with the seed and
the shrunk history; the table shows the requests of each architecture and the worst difference. With
``--one-life`` all histories of an architecture use one `Llama`, whose resident memory, less the bytes of its
prompt cache, must not grow.
"""

from __future__ import annotations

import itertools
import os
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from llamahybrid import tiny
from llamahybrid.llama import Llama
from tests.lab.campaign import Archs, Seconds, Seed, sweep
from tests.lab.differential import Mismatch, Runner, Verdict, check
from tests.lab.history import random_history, restarted
from tests.lab.reference import SETTINGS, Factory, Reference, settings_for

WARM_UP = 10
"""Histories before memory is first measured: caches and allocators fill."""

LEAK = 64 << 20
"""Bytes of growth that count as a leak."""


def generative() -> tuple[str, ...]:
    """The architectures that can make tokens (bert cannot)."""
    return tuple(arch for arch in tiny.architectures() if arch != "bert")


def run(
    model: Path,
    seed: int,
    until: float,
    factory: Factory,
    length: int = 12,
    first: int = 0,
    restarts: bool = False,
) -> Verdict:
    """Run histories on `model` until the clock shows `until`, one at least, each in the next setting.

    Raises:
        Mismatch: with the seed and the shrunk history. `restarts`: see `restarted`.
    """
    total, settings = Verdict(), settings_for(model)
    for number in itertools.count():
        setting = settings[(number + first) % len(settings)]
        history = random_history(seed + number, length=length)
        try:
            total.add(check(restarted(history) if restarts else history, factory, model, setting))
        except Mismatch as mismatch:
            raise Mismatch(f"seed {seed + number}, {mismatch}") from mismatch
        if time.monotonic() >= until:
            break
    return total


@dataclass
class Life:
    """The histories of one `Llama`."""

    histories: int = 0
    verdict: Verdict = field(default_factory=Verdict)
    warm_bytes: int = 0
    """Resident memory after the warm-up, less the bytes of the prompt cache."""
    growth: int = 0
    """Bytes by which that memory grew since."""


def resident_bytes() -> int:
    """Resident memory of this process (Linux: /proc; elsewhere its peak so far)."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def one_life(model: Path, until: float, seed: int, length: int = 12) -> Life:
    """Run histories on one `Llama` until the clock shows `until`; the warm-up and one more at least.

    Raises:
        Mismatch: an answer or a report is wrong; the message names the seed of the history.
    """
    life, setting = Life(), SETTINGS[0]
    with closing(Reference(model, setting)) as reference, closing(setting.open(Llama, model)) as llm:
        while life.histories <= WARM_UP or time.monotonic() < until:
            number = seed + life.histories
            try:
                life.verdict.add(Runner(llm, reference, setting).run(random_history(number, length=length)))
            except Mismatch as mismatch:
                raise Mismatch(f"history of seed {number} on a used Llama: {mismatch}") from mismatch
            life.histories += 1
            held = resident_bytes() - int(llm.prompt_cache.stats().bytes_ram)
            if life.histories == WARM_UP:
                life.warm_bytes = held
            life.growth = held - life.warm_bytes
    return life


def main(
    seconds: Seconds = 60,
    seed: Seed = 0,
    arch: Archs = None,
    length: Annotated[int, typer.Option(help="Operations in a history.")] = 12,
    restarts: Annotated[bool, typer.Option(help="A new process' model and cache before everything.")] = False,
    one: Annotated[bool, typer.Option("--one-life", help="All histories on one model.")] = False,
) -> None:
    """Random histories against fresh stock contexts, for a bounded time."""

    def play(model: Path, way: str, number: int, until: float) -> tuple[object, ...]:
        found, grown = Verdict(), ""
        if one:
            life = one_life(model, until, seed, length)
            found, grown = life.verdict, f"{life.growth / 2**20:.1f} MiB"
            if life.growth > LEAK:
                raise Mismatch(f"memory outside the prompt cache grew by {grown}")
        else:
            found = run(model, seed, until, Llama, length, number, restarts)
        return found.requests, found.bit_equal, f"{found.worst:.1e}", len(found.ties), found.from_disk, grown

    columns = "requests, bit-equal, worst difference, ties, from disk, growth"
    sweep(play, arch or (("qwen35",) if one else generative()), columns, seconds, seed)


if __name__ == "__main__":
    typer.run(main)
