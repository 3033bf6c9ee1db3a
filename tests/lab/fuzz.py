"""Fuzz campaigns: random histories on every architecture until the time is up.

``python -m tests.lab.fuzz --seconds 600 [--seed 1] [--arch qwen35]``

Each history takes the next seed and the next setting. Exit status 1 on the first mismatch, with the seed and
the shrunk history; the table shows the requests of each architecture and the worst difference seen.
"""

from __future__ import annotations

import importlib
import itertools
import time
from pathlib import Path
from typing import Annotated

import typer

from llamahybrid import tiny
from tests.lab.campaign import Archs, Seconds, Seed, sweep
from tests.lab.differential import Mismatch, Verdict, check
from tests.lab.history import random_history, restarted
from tests.lab.reference import Factory, settings_for

OURS = "llamahybrid.llama:Llama"


def load(name: str) -> Factory:
    """The class behind "module:class"."""
    module, _, attribute = name.partition(":")
    factory: Factory = getattr(importlib.import_module(module), attribute)
    return factory


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
    """One history or more on `model` until the clock shows `until`; settings take turns from `first` on.

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


def main(
    seconds: Seconds = 60,
    seed: Seed = 0,
    arch: Archs = None,
    length: Annotated[int, typer.Option(help="Operations in a history.")] = 12,
    subject: Annotated[str, typer.Option(help="The class on trial, module:class.")] = OURS,
    restarts: Annotated[bool, typer.Option(help="A new process' model and cache before everything.")] = False,
) -> None:
    """Random histories against fresh stock contexts, for a bounded time."""
    factory = load(subject)

    def play(model: Path, way: str, number: int, until: float) -> tuple[object, ...]:
        found = run(model, seed, until, factory, length, number, restarts)
        return found.requests, found.bit_equal, f"{found.worst:.1e}", len(found.ties), found.from_disk

    columns = "requests, bit-equal, worst difference, ties, from disk"
    sweep(play, arch or generative(), columns, seconds, seed)


if __name__ == "__main__":
    typer.run(main)
