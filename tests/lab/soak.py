"""A long chat on one `Llama`: memory must not grow, answers must stay right.

``python -m tests.lab.soak --seconds 300 [--seed 1] [--arch qwen35]``

One random history after the other on the same object (never reopened), each operation compared with fresh
stock contexts as in differential.py; the process' resident memory, less what the prompt cache says it
holds, is sampled after each.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from llamahybrid import tiny
from tests.lab.differential import Mismatch, Runner, Verdict
from tests.lab.fuzz import OURS, load
from tests.lab.history import random_history
from tests.lab.reference import SETTINGS, Factory, Reference

WARM_UP = 10
"""Histories before memory is first looked at: caches and allocators fill."""


@dataclass
class Soak:
    """What a soak showed."""

    histories: int
    verdict: Verdict
    first_bytes: int
    """Resident memory after the warm-up that the prompt cache does not account for."""
    last_bytes: int

    @property
    def growth(self) -> int:
        """Bytes by which that memory grew after the warm-up."""
        return self.last_bytes - self.first_bytes


def resident_bytes() -> int:
    """Resident memory of this process (Linux: /proc; elsewhere its peak so far)."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        import os

        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def cached_bytes(llm: Any) -> int:
    """What the prompt cache of `llm` says it holds in memory; 0 for a stock `Llama`."""
    cache = getattr(llm, "prompt_cache", None)
    return int(cache.stats().bytes_ram) if cache is not None else 0


def soak(model: Path, factory: Factory, seconds: float, seed: int) -> Soak:
    """Histories one after the other on one `Llama` until the time is up (at least the warm-up and one more).

    Raises:
        Mismatch: an answer or a report is wrong; the message names the seed of the history.
    """
    setting = SETTINGS[0]
    reference = Reference(model, setting)
    subject = setting.open(factory, model)
    result = Soak(0, Verdict(), 0, 0)
    start = time.monotonic()
    try:
        while result.histories <= WARM_UP or time.monotonic() - start < seconds:
            number = seed + result.histories
            try:
                result.verdict.add(Runner(subject, reference, setting).run(random_history(number, length=12)))
            except Mismatch as mismatch:
                raise Mismatch(f"history of seed {number} on a used Llama: {mismatch}") from mismatch
            result.histories += 1
            result.last_bytes = resident_bytes() - cached_bytes(subject)
            if result.histories == WARM_UP:
                result.first_bytes = result.last_bytes
    finally:
        subject.close()
        reference.close()
    return result


def main(
    seconds: Annotated[float, typer.Option(help="How long.")] = 60,
    seed: Annotated[int, typer.Option(help="Seed of the first history.")] = 0,
    arch: Annotated[str, typer.Option(help="Architecture of the tiny model.")] = "qwen35",
    subject: Annotated[str, typer.Option(help="The class on trial, module:class.")] = OURS,
    growth_mib: Annotated[int, typer.Option(help="Growth of memory that counts as a leak.")] = 64,
) -> None:
    """One long life of one `Llama`, for a bounded time."""
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.make(arch, Path(folder, f"{arch}.gguf"))
        try:
            result = soak(model, load(subject), seconds, seed)
        except Mismatch as mismatch:
            console.print(str(mismatch), style="red", markup=False, highlight=False)
            raise typer.Exit(1) from mismatch
    console.print(
        f"{result.histories} histories, {result.verdict.requests} requests right "
        f"(worst difference {result.verdict.worst:.1e}), "
        f"memory outside the cache {result.first_bytes / 2**20:.0f} -> {result.last_bytes / 2**20:.0f} MiB"
    )
    if result.growth > growth_mib << 20:
        console.print(f"memory grew by more than {growth_mib} MiB", style="red")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
