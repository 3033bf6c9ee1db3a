"""Opening a folder of many records: processor time, and memory: what the index keeps, what opening takes.

Conversations on one system prompt, four turns each, with attention, as chats leave them; and single prompts
with logits of a large vocabulary. Limits: 3 s for 20,000 records; 1 KiB a record and 8 bytes a token.
Run: python -m benchmarks.disk_index [--records N]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from llamahybrid.evaluate.tables import machine
from llamahybrid.prompt_cache.base import Logits, Tokens
from llamahybrid.prompt_cache.disk import RecordStore
from llamahybrid.prompt_cache.disk_store import DiskStore
from llamahybrid.prompt_cache.envelope import sealed
from llamahybrid.prompt_cache.records import key_of, pack

SECONDS = 3.0
RECORD_BYTES, TOKEN_BYTES = 1024, 8
VOCABULARY = 152_000
ROUNDS = 3
RANGES = ((0, 250), (250, 500), (500, 750), (750, 1000))


def chats(count: int, rng: np.random.Generator) -> Iterator[tuple[int, Tokens, int, Logits | None]]:
    """(start, prefix, base, logits) of so many records; 8 for each conversation of 1,000 tokens."""
    system = rng.integers(0, VOCABULARY, 200).astype(np.int32)
    for _ in range(count // 8):
        tokens = np.concatenate([system, rng.integers(0, VOCABULARY, 800).astype(np.int32)])
        for start, end in RANGES:
            yield start, tokens[:end], start, None
            yield end, tokens[:end], start, None


def prompts(count: int, rng: np.random.Generator) -> Iterator[tuple[int, Tokens, int, Logits | None]]:
    """So many prompts of 200 tokens with logits."""
    row = np.zeros(VOCABULARY, np.float32)
    for _ in range(count):
        yield 200, rng.integers(0, VOCABULARY, 200).astype(np.int32), 0, row


SHAPES = {"chats": (chats, 1), "prompts with logits": (prompts, 20)}
"""And by what their number is divided: logits take 600 KB."""


def fill(folder: Path, shape: str, count: int) -> int:
    """Write records; how many distinct tokens they have."""
    store, tokens, make = RecordStore(folder), 0, SHAPES[shape][0]
    name, payload = "m" * 32, np.zeros(64, np.uint8)
    for start, path, base, row in make(count, np.random.default_rng(0)):
        key = key_of(name, start, path, logits=row is not None)
        state = sealed(payload, namespace=name, tokens=path, start=start)
        store.write(key, pack(state, path, row, base))
        tokens += (len(path) - base) if start == len(path) else 0
    return tokens


def main(count: int) -> int:
    console, missed = Console(width=110), 0
    table = Table("shape", title="opening a folder, files in the system's memory")
    heads = (
        "records",
        "tokens",
        "seconds",
        "index MiB",
        "at most MiB",
        "bytes a record",
        "offer ms",
        "evict ms",
    )
    for head in (*heads, "holds"):
        table.add_column(head, justify="right")
    for shape, (_, divisor) in SHAPES.items():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "cache"
            n = count // divisor
            tokens = fill(folder, shape, n)
            seconds = min(opening(folder) for _ in range(ROUNDS))
            evict, offer = timed(DiskStore(folder, 1 << 50))
            tracemalloc.start()
            again = DiskStore(folder, 1 << 50)
            kept, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert again.stats()["disk_records"] <= n
            allowed = n * RECORD_BYTES + tokens * TOKEN_BYTES
            holds = (seconds <= SECONDS or n > 20_000) and most <= allowed
            missed += not holds
            each = (kept - 4 * tokens) / n
            figures = (seconds, kept / 2**20, most / 2**20, each, 1e3 * offer, 1e3 * evict)
            table.add_row(
                shape, f"{n:,}", f"{tokens:,}", *(f"{x:.2f}" for x in figures), "yes" if holds else "no"
            )
    console.print(table)
    console.print(machine(), style="dim")
    return 1 if missed else 0


def opening(folder: Path) -> float:
    """Seconds of a processor that it takes to open a folder."""
    clock = time.process_time()
    DiskStore(folder, 1 << 50)
    return time.process_time() - clock


def timed(store: DiskStore) -> tuple[float, float]:
    """Processor seconds to evict a record, and to look a prompt up right after (all is listed again)."""
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, VOCABULARY, (20, 1000)).astype(np.int32)
    clock = time.process_time()
    for _ in range(20):
        store.limit = store.stats()["disk_bytes"] - 1
        store.make_room(0, "", np.empty(0, np.int32), ())
    evict, clock = (time.process_time() - clock) / 20, time.process_time()
    store.limit = 1 << 50
    for prompt in prompts:
        store.offer("m" * 32, prompt, 0, 1000, [(0, 1000)])
    return evict, (time.process_time() - clock) / 20


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=20_000)
    sys.exit(main(parser.parse_args().records))
