"""Stream campaigns: many streams of one model on changing threads, given up in every way there is.

``python -m tests.lab.stream_fuzz --seconds 300 [--count 1000] [--seed 1] [--arch qwen35]``

In a round a few streams are begun and advanced by workers of a pool and by threads that die; they are closed,
dropped, left in reference cycles, cancelled through handles, and overtaken by each other, while the collector
runs wherever it likes. What each said must be what a fresh stock context says. A step that takes a minute
prints every thread's stack and ends the process.
"""

from __future__ import annotations

import faulthandler
import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp
import typer

from llamahybrid.errors import RequestCancelled
from llamahybrid.llama import Llama
from llamahybrid.prompt_cache import PromptCache
from tests.lab.campaign import Archs, Count, Seconds, Seed, sweep
from tests.lab.differential import Mismatch
from tests.lab.inside import set_patience
from tests.lab.integrity import check_integrity
from tests.lab.reference import Reference, Setting
from tests.lab.thread_fuzz import shortfall

ARCHITECTURES = ("qwen35", "mamba", "gemma3", "llama")
SETTING = Setting("window", {"swa_full": False, "n_batch": 64, "n_ubatch": 32})
CHATS, LONGEST = 4, 16
DEEDS = 24
"""What is done to streams in a round."""

STUCK_SECONDS = 60


@dataclass
class Stream:
    """One request and what it said."""

    chat: int
    tokens: Iterator[int]
    handle: Any
    said: list[int] = field(default_factory=list)
    cancelled: bool = False


@dataclass
class Campaign:
    """One model, its chats and what a fresh context says to them."""

    llm: Any
    cache: PromptCache
    reference: Reference
    chats: list[list[int]]
    wanted: list[list[int]]
    rng: random.Random
    pool: ThreadPoolExecutor
    deeds: Counter[str] = field(default_factory=Counter)
    streams: list[Stream] = field(default_factory=list)

    def round(self) -> None:
        """Begin, advance and give up streams; then one plain request.

        Raises:
            Mismatch: a stream said what a fresh context does not.
        """
        set_patience(self.llm, self.rng.choice((0.0, 0.01, 0.05)))
        begun: list[Stream] = []
        for _ in range(DEEDS):
            deed = self.rng.choices(
                (self._begin, self._advance, self._give_up, self._cancel, self._collect),
                (3, 12, 2, 1, 1),
            )[0]
            deed()
            self.deeds[deed.__name__.strip("_")] += 1
            begun += [s for s in self.streams if s not in begun]
        self._begin()
        self._do(lambda: self._take(self.streams[-1], 3))
        self.streams.clear()
        gc.collect()
        for stream in begun:
            if stream.said != self.wanted[stream.chat][: len(stream.said)]:
                shortfall(self.reference, self.chats[stream.chat], stream.said)
        check_integrity(self.cache)

    def _begin(self) -> None:
        chat = self.rng.randrange(len(self.chats))
        with self.llm.request() as handle:
            tokens = self.llm.generate(self.chats[chat], temp=0.0)
        self.streams.append(Stream(chat, tokens, handle))

    def _advance(self) -> None:
        if self.streams:
            several = self.rng.sample(self.streams, min(len(self.streams), self.rng.randrange(1, 4)))
            steps = [self._later(lambda s=s: self._take(s, self.rng.randrange(1, 3))) for s in several]  # type: ignore[misc]
            for step in steps:
                step.result(STUCK_SECONDS)

    def _take(self, stream: Stream, n: int) -> None:
        try:
            stream.said += islice(stream.tokens, min(n, LONGEST - len(stream.said)))
        except RequestCancelled:
            if not stream.cancelled:
                raise Mismatch("a stream was stopped that nobody cancelled") from None

    def _give_up(self) -> None:
        if not self.streams:
            return
        stream = self.streams.pop(self.rng.randrange(len(self.streams)))
        tokens, stream.tokens = stream.tokens, iter(())
        how = self.rng.randrange(3)
        if how == 0:
            self._do(tokens.close)  # type: ignore[attr-defined]
        elif how == 1:
            cycle: list[Any] = [tokens]
            cycle.append(cycle)

    def _cancel(self) -> None:
        if self.streams:
            stream = self.rng.choice(self.streams)
            stream.cancelled = True
            stream.handle.cancel()

    def _collect(self) -> None:
        self._do(gc.collect)

    def _do(self, work: Callable[[], Any]) -> None:
        self._later(work).result(STUCK_SECONDS)

    def _later(self, work: Callable[[], Any]) -> Future[Any]:
        """Have something done by a worker, or by a thread that dies afterwards."""
        if self.rng.random() < 0.7:
            return self.pool.submit(work)
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future


def run(model: Path, seed: int, count: int, until: float) -> Counter[str]:
    """At most `count` rounds, until the clock shows `until`; how often each thing was done.

    Raises:
        Mismatch: a stream said what a fresh context does not.
    """
    rng = random.Random(seed)
    chats = [[rng.randrange(1, 200) for _ in range(rng.randrange(20, 150))] for _ in range(CHATS)]
    chats[1] = chats[0][: len(chats[0]) // 2] + chats[1]
    wanted = []
    for chat in chats:
        with closing(SETTING.open(llama_cpp.Llama, model)) as stock:
            wanted.append(list(islice(stock.generate(chat, temp=0.0), LONGEST)))
    cache = PromptCache(4 << 20)
    with (
        closing(Reference(model, SETTING)) as reference,
        closing(SETTING.open(Llama, model, prompt_cache=cache)) as llm,
        ThreadPoolExecutor(2) as pool,
    ):
        campaign = Campaign(llm, cache, reference, chats, wanted, rng, pool)
        rounds = 0
        try:
            while rounds < count and time.monotonic() < until:
                faulthandler.dump_traceback_later(2 * STUCK_SECONDS, exit=True)
                campaign.round()
                rounds += 1
        finally:
            faulthandler.cancel_dump_traceback_later()
    campaign.deeds["rounds"] = rounds
    return campaign.deeds


def main(seconds: Seconds = 60, count: Count = 1000, seed: Seed = 0, arch: Archs = None) -> None:
    """Streams on changing threads, for a bounded time."""
    archs = arch or ARCHITECTURES

    def play(model: Path, way: str, number: int, until: float) -> list[int]:
        deeds = run(model, seed + number, -(-count // len(archs)), until)
        return [deeds[name] for name in ("rounds", "begin", "advance", "give_up", "cancel", "collect")]

    sweep(play, archs, "rounds, begin, advance, give up, cancel, collect", seconds, seed, window=16)


if __name__ == "__main__":
    typer.run(main)
