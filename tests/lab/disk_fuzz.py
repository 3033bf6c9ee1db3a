"""Campaigns on a folder of the disk tier: killed writers, and several processes.

``python -m tests.lab.disk_fuzz --kills 200 --seconds 60 --processes 2 [--seed 1]``

State is made up: its bytes follow from its tokens alone, so that right and wrong records can be told apart.
Each record that a killed process had reported as written must be there, and each record must be right. Exit
status 1 at the first fault.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
import xxhash
from rich.console import Console
from rich.progress import track

from llamahybrid.errors import RecordError
from llamahybrid.prompt_cache.base import Bytes, Costs, LiveView, Range, Segment, Tokens
from llamahybrid.prompt_cache.block_store import BlockStore
from llamahybrid.prompt_cache.blocks import Item
from llamahybrid.prompt_cache.cache import PromptCache
from llamahybrid.prompt_cache.disk import DiskRows
from llamahybrid.prompt_cache.envelope import sealed
from llamahybrid.prompt_cache.nodes import tokens_of
from llamahybrid.prompt_cache.tier import Tier
from tests.lab.campaign import reported
from tests.lab.integrity import check_integrity

NAMESPACE = "made up"
CHATS = 30
STEMS = 4
"""Prefixes that chats share."""

KILLS_IN_A_FOLDER = 20
RAM_BYTES = 24 << 20
DISK_BYTES = 48 << 20


def content(kind: str, start: int, tokens: Tokens) -> Bytes:
    """A state, sealed: its bytes follow from its tokens alone; some are small, some large."""
    name = xxhash.xxh3_64_intdigest(f"{kind} {start} ".encode() + tokens.tobytes())
    size = random.Random(name).choice((300, 5_000, 70_000, 600_000, 3_000_000))
    payload = np.random.default_rng(name).integers(0, 256, size, np.uint8)
    return sealed(payload, namespace=NAMESPACE, tokens=tokens, start=start)


class MadeUp:
    """Cuts and joins made-up segments. Raises ValueError for one that is not as it should be."""

    def parts(self, segment: Segment, path: Tokens, ranges: Iterable[Range]) -> Iterator[Segment]:
        if not np.array_equal(segment.record, content("attention", segment.start, path)):
            raise ValueError("a segment is damaged or foreign")
        for start, end in ranges:
            yield Segment(start, end, content("attention", start, path[:end]), self)

    def join(self, segments: Sequence[Segment], path: Tokens) -> Segment:
        for segment in segments:
            list(self.parts(segment, path[: segment.end], ()))
        return Segment(segments[0].start, len(path), content("attention", segments[0].start, path), self)


def view_of(tokens: Tokens) -> LiveView:
    return LiveView(NAMESPACE, tokens, len(tokens), True, True, True, split=MadeUp())


def chat(number: int, length: int) -> Tokens:
    """The first tokens of a chat; some chats begin alike."""
    stem = np.random.default_rng(number % STEMS).integers(0, 1000, 60)
    rest = np.random.default_rng(1000 + number).integers(0, 1000, 400)
    return np.concatenate([stem, rest]).astype(np.int32)[:length]


def turn(cache: PromptCache, rng: random.Random) -> str:
    """A turn of one of the chats; where its restore point came from.

    Raises AssertionError when what came is not what belongs to its tokens.
    """
    tokens = chat(rng.randrange(CHATS), rng.randrange(20, 300))
    plan = cache.plan(tokens, view_of(tokens[:0]), (), Costs())
    try:
        if plan.checkpoint is not None:
            own = content("state", plan.cached, tokens[: plan.cached])
            assert np.array_equal(plan.checkpoint.snapshot, own), "a foreign or damaged snapshot"
            reach = 0
            for part in plan.segments:
                assert part.start == reach, "attention with a hole"
                own = content("attention", part.start, tokens[: part.end])
                assert np.array_equal(part.record, own), "foreign or damaged attention"
                reach = part.end
            assert reach == plan.cached, "attention ends too soon"
    finally:
        cache.release(plan)
    view = view_of(tokens)
    for position in sorted({*range(50, len(tokens), 100), len(tokens)}):
        if position > plan.cached:
            cache.admit(view, position, content("state", position, tokens[:position]))
    for start, end in cache.missing(view):
        cache.store_segment(view, Segment(start, end, content("attention", start, tokens[:end]), view.split))
    cache.remember(NAMESPACE, tokens)
    cache.queue_writes(view)
    return plan.source


def work(place: str, seed: int, seconds: float, n_bytes: int) -> None:
    """Take turns for `seconds` in a process of its own; print counts, and each record that is on disk."""
    wrote, remote = Tier.wrote, "://" in place

    def report(tier: Tier, key: bytes, n_bytes: int) -> None:
        wrote(tier, key, n_bytes)
        os.write(1, f"{key.hex()}\n".encode())

    if not remote:
        Tier.wrote = report  # type: ignore[method-assign,assignment]
    cache, rng, sources = opened(place, n_bytes), random.Random(seed), Counter[str]()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if remote and rng.random() < 0.01:  # a new machine knows what the server has, no more
            cache = opened(place, n_bytes)
            sources["new machines"] += 1
        sources[turn(cache, rng)] += 1
    cache.close()
    check_integrity(cache)
    os.write(1, json.dumps({**sources, **cache.stats().extra}).encode() + b"\n")


def opened(place: str, n_bytes: int) -> PromptCache:
    """A cache on the server of a URL, or one in a folder that writes everything, at once."""
    if "://" in place:
        return PromptCache(RAM_BYTES, remote=place, remote_bytes=n_bytes)
    cache = PromptCache(RAM_BYTES, place, n_bytes, 1 << 50)
    assert cache.disk is not None, "the folder cannot be used"
    cache.disk.writer.quiet_seconds = 0.0
    return cache


def start(place: str, seed: int, seconds: float, n_bytes: int) -> subprocess.Popen[str]:
    """`work` in a process of its own."""
    code = f"from tests.lab.disk_fuzz import work; work({place!r}, {seed}, {seconds}, {n_bytes})"
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True)


def counts(process: subprocess.Popen[str]) -> Counter[str]:
    """Return a worker's counts at its end. Raises AssertionError where it has failed."""
    out, err = process.communicate()
    assert process.returncode == 0, err
    return Counter(json.loads(out.splitlines()[-1]))


def stored(folder: Path) -> tuple[BlockStore, dict[bytes, tuple[Item, Tokens]]]:
    """The records that are there, with the tokens that they are of."""
    rows = DiskRows(folder)
    rows.open()
    store = BlockStore(rows)
    sizes = rows.sizes([key for kind in (b"r", b"a") for key in rows.keys(kind)])
    found = ((item, one) for one in store.each() for item in one.items(sizes))
    return store, {item.key: (item, tokens_of(one.ids)[: item.end]) for item, one in found}


def check_record(store: BlockStore, item: Item, tokens: Tokens) -> None:
    """Raise AssertionError unless a record's state is what its tokens say, RecordError if it is damaged."""
    record = store.read(NAMESPACE, tokens, item)
    own = content("state" if item.is_checkpoint else "attention", item.start, tokens)
    assert np.array_equal(record.state, own), f"{item.key.hex()} was accepted, and is wrong"


def kill_one(folder: Path, seed: int) -> tuple[int, int]:
    """Kill a writer at a random moment; (records it had reported, damaged ones found and refused).

    Raises AssertionError when a reported record is lost, or a wrong one accepted.
    """
    rng = random.Random(seed)
    process = start(str(folder), seed, 60, 1 << 40)
    assert process.stdout is not None
    reported = [process.stdout.readline()]  # it is at work
    time.sleep(rng.uniform(0, 0.4))
    process.kill()
    reported += process.stdout.readlines()
    process.communicate()
    keys = [line.strip() for line in reported if line.endswith("\n")]
    assert any(keys), "the writer died by itself"
    store, there = stored(folder)
    damaged = 0
    for key in map(bytes.fromhex, keys):
        assert key in there, f"{key.hex()} was reported written, and is lost"
        check_record(store, *there[key])
    for key in there.keys() - set(map(bytes.fromhex, keys)):
        try:
            check_record(store, *there[key])
        except RecordError:
            damaged += 1
    cache = opened(str(folder), 1 << 40)  # and it goes on without repair
    turn(cache, rng)
    cache.close()
    check_integrity(cache)
    assert not cache.stats().extra["disk_failed"], "the folder cannot be written to any more"
    return len(keys), damaged


def kills(count: int, seed: int, console: Console) -> None:
    """Kill `count` writers, one after the other; each `KILLS_IN_A_FOLDER` share a folder."""
    records = damaged = 0
    for first in track(range(0, count, KILLS_IN_A_FOLDER), "kill -9", console=console, transient=True):
        with tempfile.TemporaryDirectory() as folder:
            for number in range(first, min(count, first + KILLS_IN_A_FOLDER)):
                one = kill_one(Path(folder), seed + number)
                records, damaged = records + one[0], damaged + one[1]
    console.print(
        f"kill -9: {count} writers (seeds {seed} to {seed + count - 1}), {records} records reported written, "
        f"all there and right; {damaged} damaged ones found, none accepted"
    )


def hammer(processes: int, seconds: float, seed: int, console: Console) -> None:
    """Several processes on one folder that is too small for them.

    Raises AssertionError when one of them fails or is given anything wrong.
    """
    with tempfile.TemporaryDirectory() as folder:
        crowd = [start(folder, seed + n, seconds, DISK_BYTES) for n in range(processes)]
        with ThreadPoolExecutor(processes) as pool:  # each pipe is read, or its writer would wait
            every = list(pool.map(counts, crowd))
        for number, told in enumerate(every):
            assert not told["disk_failed"], f"process {number}: {told}"
            console.print(f"process {number} (seed {seed + number}): {dict(told)}", soft_wrap=True)


def main(
    kill: Annotated[int, typer.Option("--kills", help="Writers to kill.")] = 20,
    seconds: Annotated[float, typer.Option(help="How long several share a folder.")] = 20,
    processes: Annotated[int, typer.Option(help="How many.")] = 2,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
) -> None:
    """Kill writers, then let several share a folder."""
    console = Console()
    with reported(console, "failed"):
        kills(kill, seed, console)
        hammer(processes, seconds, seed, console)


if __name__ == "__main__":
    typer.run(main)
