"""Fuzz campaigns: random histories on every architecture until the time is up.

``python -m tests.lab.fuzz --seconds 600 [--seed 1] [--arch qwen35] [--way restarts | --way one-life]``

Each history takes the next seed and the next setting, with more arguments at random. Exit status 1 on the
first mismatch, with the seed and the shrunk history; the table shows the requests of each architecture and
the worst difference. As ``one-life`` all histories of an architecture use one `Llama`, whose resident memory,
less the bytes that its prompt cache says it holds, must not grow: best with the models of `LARGE`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from llamahybrid import tiny
from llamahybrid.harness.hazards.process import peak_memory
from llamahybrid.harness.targets.base import resident
from llamahybrid.llama import Llama
from llamahybrid.prompt_cache import PromptCache
from tests.lab.campaign import main
from tests.lab.differential import Mismatch, Runner, Verdict, check
from tests.lab.history import Budget, History, random_history, restarted
from tests.lab.reference import SETTINGS, Factory, Reference, crossed, settings_for

LENGTH = 12
"""Operations of a history."""

WARM_UP = 10
"""Histories before memory is first measured: caches and allocators fill."""

ALLOCATORS = 8 << 20
"""Bytes that allocators may keep of what was freed."""

LARGE: Mapping[str, Mapping[str, int]] = {
    "qwen35": {"embd": 256, "heads": 1, "layers": 6},
    "mamba": {"embd": 256, "layers": 8},
    "gemma3": {"embd": 256, "window": 256},
}
"""Sizes of models with large states: what else a process allocates is little beside a snapshot."""


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


@dataclass(frozen=True)
class Life:
    """Histories on one `Llama`: their verdict, and the memory of this process."""

    histories: int
    verdict: Verdict
    budget: int
    """Bytes of the prompt cache."""
    snapshot: int
    grown: int
    """The most by which resident memory grew after the warm-up, what the cache says it holds taken off."""
    held: int
    """The most that the cache said it held."""
    evictions: int

    @property
    def allowed(self) -> int:
        """Growth by chance: a tenth of the budget, a snapshot in flight, and what allocators keep."""
        return self.budget // 10 + self.snapshot + ALLOCATORS


def one_life(model: Path, seed: int, until: float, least: int = 1, snapshots: int = 32) -> Life:
    """Run histories on one `Llama` until the clock shows `until`, `least` of them after the warm-up.

    `snapshots`: the prompt cache has room for so many.

    Raises:
        Mismatch: an answer or a report is wrong; the message names the seed of the history.
    """
    total, setting, done, warm, cache = Verdict(), SETTINGS[1], 0, 0, PromptCache(0)
    grown = held = snapshot = 0
    with (
        closing(Reference(model, setting)) as reference,
        closing(setting.open(Llama, model, prompt_cache=cache)) as llm,
    ):
        while done < WARM_UP + least or time.monotonic() < until:
            number = seed + done
            history = random_history(number, length=LENGTH)
            fixed = tuple(each for each in history.operations if not isinstance(each, Budget))
            try:
                total.add(Runner(llm, reference, setting).run(History(fixed)))
            except Mismatch as mismatch:
                raise Mismatch(f"history of seed {number} on a used Llama: {mismatch}") from mismatch
            done += 1
            taken = int(cache.stats().bytes_ram)
            now = (resident(os.getpid()) or peak_memory()) - taken
            if done <= WARM_UP:
                warm, snapshot = now, max(snapshot, llm.runner.live.snapshot_bytes())
                cache.ram_bytes = snapshots * snapshot if done == WARM_UP else 0
            else:
                grown, held = max(grown, now - warm), max(held, taken)
    return Life(done, total, cache.ram_bytes, snapshot, grown, held, cache.stats().evictions)


def large(model: Path) -> Path:
    """Make a model of `LARGE` states beside a tiny one, with its architecture."""
    return tiny.make(model.stem, model.with_suffix(".large.gguf"), **LARGE.get(model.stem, {}))  # type: ignore[arg-type]


def play(model: Path, way: str, seed: int, count: int, until: float) -> dict[str, object]:
    """Run one trial of the campaign. Raises Mismatch."""
    growth = 0.0
    if way == "one-life":
        life = one_life(large(model), seed, until)
        found, growth = life.verdict, life.grown / 2**20
        if life.grown > life.allowed:
            raise Mismatch(f"memory outside the prompt cache grew: {life}")
    else:
        found = run(model, seed, count, until, Llama, restarts=way == "restarts")
    counts = {"requests": found.requests, "bit-equal": found.bit_equal, "ties": len(found.ties)}
    shares = {"worst difference": f"{found.worst:.1e}", "growth, MiB": f"{growth:.1f}"}
    return {**counts, "from disk": found.from_disk, **shares}


if __name__ == "__main__":
    main(play, generative(), ("histories",))
