"""Memory over many conversations: what a prompt cache really takes is what its budget says.

``python -m tests.lab.footprint [--conversations 500] [--seed 1] [--arch qwen35 ...]``

In a fresh process each: chats warm the process up with a budget of nothing, then a budget is set and many
more chats come, old ones among them. The highest resident memory may be above the warm one by the budget,
10 %, and one snapshot in flight. The C library keeps some MiB of what was freed, so budgets are larger than
that. Linux only (/proc/self/status tells the peak, clear_refs resets it).
"""

from __future__ import annotations

import multiprocessing
import os
import random
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from llamahybrid import Llama, PromptCache, tiny
from llamahybrid.harness.hazards.process import peak_memory
from llamahybrid.harness.targets.base import resident
from llamahybrid.harness.workloads.speech import Speech
from tests.lab.campaign import silence
from tests.lab.integrity import check_integrity

ALLOWED_SHARE = 1.10
WARM_UP = 60
"""Requests before the budget is set."""
SNAPSHOTS = (32, 96, 192)
"""Budgets that are tried, in snapshots: from starving to moderate."""
MODELS: Mapping[str, Mapping[str, int]] = {
    "qwen35": {"embd": 256, "heads": 1, "layers": 6},
    "mamba": {"embd": 512, "layers": 8},
    "gemma3": {"embd": 512, "window": 256},
}
"""Small models with large states: what else a process allocates is then little beside a snapshot."""
OPEN = 12
"""Chats that may be gone on with."""


@dataclass(frozen=True)
class Footprint:
    """Resident bytes of one run."""

    budget: int
    snapshot: int
    warm: int
    """Resident after the warm-up."""
    peak: int
    counted: int
    """The most that the cache said it held after a request."""
    requests: int
    evictions: int

    @property
    def grown(self) -> int:
        """Growth of resident memory under the budget, at most."""
        return self.peak - self.warm

    @property
    def allowed(self) -> int:
        """Growth that the budget allows."""
        return int(self.budget * ALLOWED_SHARE) + self.snapshot


def chats(llm: Llama, seed: int) -> Iterator[int]:
    """Chats that are begun, gone on with in any order, and dropped: after each request, how many so far."""
    speech, chance, begun = Speech(llm, seed), random.Random(seed), 0
    system, histories = speech.message(60, "system"), list[list[int]]()
    while True:
        if histories and chance.random() < 0.5:
            history = histories.pop(chance.randrange(len(histories)))
        else:
            history = list(system if chance.random() < 0.5 else speech.message(60, "system"))
            begun += 1
        history += speech.message(chance.randrange(10, 120)) + speech.reply()
        with closing(llm.generate(history, temp=0.0)) as stream:
            history += islice(stream, chance.randrange(2, 40))
        histories = [h for h in [*histories, history] if len(h) < 700][-OPEN:]
        yield begun


def run(model: Path, snapshots: int, conversations: int, seed: int) -> Footprint:
    """Run in this process, a fresh one, until `conversations` chats were held under the budget."""
    silence()
    cache = PromptCache(0)
    llama = partial(Llama, n_ctx=1024, n_batch=128, n_ubatch=64, swa_full=False, verbose=False)
    with closing(llama(str(model), prompt_cache=cache, n_threads=1, n_threads_batch=1)) as llm:
        runner = llm.runner
        assert runner is not None
        turns = chats(llm, seed)
        snapshot = counted = requests = begun = 0
        for _ in range(WARM_UP):
            begun = next(turns)
            snapshot = max(snapshot, runner.live.snapshot_bytes())
        warm = resident(os.getpid())
        assert warm is not None
        cache.ram_bytes = snapshots * snapshot
        Path("/proc/self/clear_refs").write_text("5")
        last = begun + conversations
        while begun < last:
            begun, requests = next(turns), requests + 1
            counted = max(counted, cache.stats().bytes_ram)
        check_integrity(cache)
        evictions = cache.stats().evictions
        return Footprint(cache.ram_bytes, snapshot, warm, peak_memory(), counted, requests, evictions)


def in_a_process(model: Path, snapshots: int, conversations: int, seed: int) -> Footprint:
    """`run` in a fresh process, on the engine of this one."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run, model, snapshots, conversations, seed).result()


def made(arch: str, folder: Path) -> Path:
    return tiny.make(arch, folder / f"{arch}.gguf", **MODELS[arch])  # type: ignore[arg-type]


def main(
    conversations: Annotated[int, typer.Option(help="Chats begun after the warm-up.")] = 500,
    seed: Annotated[int, typer.Option(help="Seed of the chats.")] = 1,
    arch: Annotated[list[str] | None, typer.Option(help="Architecture; may be repeated.")] = None,
) -> None:
    """Resident memory against the budget, each run in a process of its own."""
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        for name in arch or MODELS:
            model = made(name, Path(folder))
            for snapshots in SNAPSHOTS:
                found = in_a_process(model, snapshots, conversations, seed)
                print(f"{name}: {found}, grown {found.grown} of {found.allowed} bytes allowed", flush=True)
                missed |= found.grown > found.allowed
    raise typer.Exit(missed)


if __name__ == "__main__":
    typer.run(main)
