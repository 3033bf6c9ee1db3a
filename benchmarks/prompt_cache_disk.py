"""What the disk tier takes: opening, look-ups, a large record beside a plain file.

``python -m benchmarks.prompt_cache_disk [--records 20000] [--folder /somewhere]``

Records are made up and small, but for one of 150 MiB. Of 20,000 records 2,500 conversations of 1,000 tokens
share their first 200; one has 32,000 tokens. What is read was written just now, so that the system has it in
memory."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from llamahybrid.prompt_cache.base import Bytes, Tokens
from llamahybrid.prompt_cache.block_store import BlockStore
from llamahybrid.prompt_cache.blocks import Kind, Why
from llamahybrid.prompt_cache.disk import DiskRows
from llamahybrid.prompt_cache.envelope import sealed
from llamahybrid.prompt_cache.records import pack
from llamahybrid.prompt_cache.writer import item_of

NAMESPACE = "m" * 32
LONG = 32_000
VOCABULARY = 152_000
LARGE_MIB = 150


def tokens(seed: int, count: int) -> Tokens:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).astype(np.int32)


def opened(folder: Path) -> BlockStore:
    """The store of a folder."""
    rows = DiskRows(folder)
    rows.open()
    return BlockStore(rows)


def put(store: BlockStore, path: Tokens, start: int | None, payload: Bytes) -> None:
    """Write a record."""
    kind = Kind.STATE if start is None else Kind.ATTENTION
    state = sealed(payload, namespace=NAMESPACE, tokens=path, start=start)
    parts = pack(state, None)
    item = item_of(NAMESPACE, path, start, sum(map(len, parts)), kind, Why.TIP)
    store.rows.write(item.key, parts)
    store.link(NAMESPACE, path, item)


def fill(folder: Path, records: int) -> float:
    """Write so many records; seconds for each."""
    store, payload, system = opened(folder), np.zeros(64, np.uint8), tokens(0, 200)
    started = time.perf_counter()
    for number in range(records // 8):
        path = np.concatenate([system, tokens(number + 1, 800)])
        for end in (250, 500, 750, 1000):
            put(store, path[:end], end - 250, payload)
            put(store, path[:end], None, payload)
    path, at = tokens(-1 % 2**31, LONG), 0
    for end in (2_000, 8_000, 16_000, 24_000, LONG):
        put(store, path[:end], at, payload)
        put(store, path[:end], None, payload)
        at = end
    return (time.perf_counter() - started) / records


def timed(work: Callable[[], Any], times: int = 30) -> float:
    """Milliseconds, the median."""
    took = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        took.append(time.perf_counter() - started)
    return 1e3 * statistics.median(took)


def look(folder: Path) -> list[tuple[str, float, str]]:
    """Rows of the table: what opening and looking up take, in a process of its own."""
    warm = tempfile.mkdtemp()
    opened(Path(warm))  # imports and the like
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    store = opened(folder)
    took = 1e3 * (time.perf_counter() - started)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    prompt = np.append(tokens(-1 % 2**31, LONG), np.array([1, 2], np.int32))
    first = timed(lambda: store.look(NAMESPACE, prompt), 1)
    seen = store.look(NAMESPACE, prompt)
    assert seen.length == LONG
    assert len(seen.items) == 10
    miss = tokens(99, LONG)
    return [
        ("open", took, "ms"),
        ("memory that opening takes", grown, "MiB"),
        ("first look-up of 32k tokens", first, "ms"),
        ("look-up of 32k tokens", timed(lambda: store.look(NAMESPACE, prompt)), "ms"),
        ("look-up of 32k unknown tokens", timed(lambda: store.look(NAMESPACE, miss)), "ms"),
        ("mark 32k tokens as used", timed(lambda: store.used(NAMESPACE, prompt, seen), 10), "ms"),
    ]


def large(folder: Path) -> list[tuple[str, float, str]]:
    """Rows of the table: a large record beside a plain file of the same bytes."""
    store, path = opened(folder), tokens(5, 1000)
    state = sealed(np.zeros(LARGE_MIB << 20, np.uint8), namespace=NAMESPACE, tokens=path)
    parts = pack(state, None)
    item = item_of(NAMESPACE, path, None, sum(map(len, parts)), Kind.STATE, Why.TIP)
    plain = folder / "plain"

    def write_plain() -> None:
        plain.unlink(missing_ok=True)
        with open(plain, "wb", buffering=0) as out:
            for part in parts:
                view = memoryview(part).cast("B")
                while len(view):
                    view = view[out.write(view) :]

    def read_plain() -> None:
        buffer = np.empty(item.nbytes, np.uint8)
        with open(plain, "rb", buffering=0) as file:
            file.readinto(buffer.data)

    def turns(works: list[Callable[[], Any]]) -> list[float]:
        took = [[timed(work, 1) for work in works] for _ in range(7)]
        return [min(column) for column in zip(*took, strict=True)]  # others use the machine, too

    plainly, ours = turns([write_plain, lambda: store.rows.write(item.key, parts)])
    rows = [(f"write {LARGE_MIB} MiB, over a plain file", ours / plainly, "")]
    plainly, ours = turns([read_plain, lambda: store.rows.read(item.key)])
    return [*rows, (f"read and check {LARGE_MIB} MiB, over a plain file", ours / plainly, "")]


def main(
    records: Annotated[int, typer.Option(min=8)] = 20_000,
    folder: Annotated[Path | None, typer.Option(help="filled already, or to be kept")] = None,
) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary) / "cache" if folder is None else folder
        table = Table("", "", title=f"{records:,} records")
        if not place.exists():
            table.add_row("write a record", f"{1e3 * fill(place, records):.2f} ms")
        code = f"from benchmarks.prompt_cache_disk import *; print(json.dumps(look(Path({str(place)!r}))))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for name, value, unit in [*json.loads(done.stdout), *large(place)]:
            table.add_row(name, f"{value:.2f} {unit}")
        Console().print(table)
        os.sync()


if __name__ == "__main__":
    typer.run(main)
