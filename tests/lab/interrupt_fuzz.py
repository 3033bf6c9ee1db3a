"""Interrupt campaigns: a KeyboardInterrupt at every line of the prompt cache, and at random moments.

``python -m tests.lab.interrupt_fuzz --seconds 300 [--seed 1] [--every 1]``

First each line that a workload runs is interrupted by a trace hook when it runs for the first, second and
seventh time; then a timer's signal comes at random moments, for `seconds`. After each interrupt the cache's
lock is free, its books are right, nothing is pinned or lent, and later requests are served from it.
"""

from __future__ import annotations

import functools
import gc
import logging
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from llamahybrid import prompt_cache
from llamahybrid.prompt_cache import PromptCache
from tests.lab.campaign import silence
from tests.lab.fake_engine import CHEAP, FakeEngine, Kind
from tests.lab.integrity import check_integrity

ROOT = str(Path(prompt_cache.__file__).parent)
FILES = (
    *("base", "cache", "eviction", "guard", "ladder", "nodes", "placement", "ram"),
    *("room", "selection", "store", "tree"),
)
"""Modules whose lines are interrupted: what happens in RAM."""

TIMES = (1, 2, 7)
"""Which time that a line runs it is interrupted."""

BUDGET = 20_000
"""Bytes: several chats are evicted."""

STUCK_SECONDS = 20

CHAT, CODE, POEM = list(range(100, 220)), list(range(500, 580)), list(range(700, 760))
PROMPTS = (CHAT, [*CHAT[:60], *CODE], POEM, CHAT[:80], [*CHAT[:60], *CODE[:30], *POEM], [*POEM[:40], *CHAT])
LATER = (*PROMPTS, list(range(2000, 2150)), list(range(3000, 3150)), CHAT)

Line = tuple[str, int]


class Stuck(BaseException):
    """A request did not come back."""


@dataclass
class Outcome:
    """Results of a campaign."""

    interrupted: int = 0
    restarts: int = 0
    """Times that the cache gave up what it held."""
    broken: Counter[str] = field(default_factory=Counter)
    """Faults after interrupts, by place and kind."""

    def judge(self, cache: PromptCache, where: str) -> None:
        """Count an interrupt, and its fault if it left any."""
        self.interrupted += 1
        if wrong := verdict(cache):
            self.broken[f"{where}: {wrong}"] += 1
        else:
            self.restarts += cache.stats().extra["restarts"]


def requests(cache: PromptCache, prompts: tuple[list[int], ...], kind: Kind = "hybrid") -> int:
    """Chats with an engine whose state shows every wrong restore; tokens that were not decoded."""
    engine = FakeEngine(cache, kind, costs=CHEAP, snapshot_tokens=16)
    saved = 0
    for prompt in prompts:
        saved += engine.prefill(prompt, [20, 60]).cached
        engine.generate(range(9000, 9020))
    return saved


def work(cache: PromptCache) -> None:
    """All that may be asked of a cache, by requests and by its user."""
    requests(cache, PROMPTS)
    cache.pin(CHAT[:60])
    requests(cache, PROMPTS[:4], "recurrent")
    engine = FakeEngine(cache, "hybrid", costs=CHEAP)
    engine.prefill(CHAT)
    cache.buffer(400)
    cache.peek(engine.view().tokens, engine.view(), CHEAP)
    plan = cache.plan(engine.view().tokens[:-3], FakeEngine(cache).view(), (), CHEAP)
    for segment in plan.segments[:1]:
        cache.drop_segment(segment)
    if plan.checkpoint is not None:
        cache.drop(plan.checkpoint)
    cache.release(plan)
    cache.forget(CHAT[:70])
    engine.generate(range(10))
    engine.prefill(CHAT)
    cache.unpin(CHAT[:60])
    cache.ram_bytes = BUDGET // 2
    cache.ram_bytes = BUDGET
    cache.stats()
    check_integrity(cache)
    if cache.flush(5):  # what is on disk comes back into an empty RAM
        cache.ram_bytes = 0
        cache.ram_bytes = BUDGET
    requests(cache, PROMPTS[:3])
    cache.clear()
    requests(cache, PROMPTS[:1])


def verdict(cache: PromptCache, seconds: float = STUCK_SECONDS) -> str | None:
    """Return the fault of a cache after an interrupt, in words; None for a sound one."""
    seen: list[object] = []
    asking = threading.Thread(target=lambda: seen.append(cache.stats()), daemon=True)
    asking.start()
    asking.join(seconds)
    if not seen:
        return "its lock is held"
    try:
        with raised_after(seconds, Stuck):
            cache.ram_bytes = BUDGET
            check_integrity(cache)
            cache.flush(seconds)  # what is being written is in use
            gc.collect()
            pinned, lent = len(cache.held() - cache.kept), cache.account.nbytes
            if pinned or lent:
                return f"{pinned} checkpoints pinned and {lent} bytes lent for nobody"
            requests(cache, LATER)
            check_integrity(cache)
            if requests(cache, (CHAT, CHAT)) < len(CHAT):
                return "it serves nothing"
    except Stuck:
        return "a request does not come back"
    except BaseException as error:
        return f"a later request fails: {type(error).__name__} {error}"
    return None


@contextmanager
def raised_after(seconds: float, error: type[BaseException]) -> Iterator[None]:
    """Raise an error in the main thread when the body takes longer."""

    def stop(*_: object) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)


def interrupted_after(seconds: float, job: Callable[[], object]) -> bool:
    """Run a job in the main thread with a KeyboardInterrupt after `seconds`; return whether it came."""
    try:
        with raised_after(seconds, KeyboardInterrupt):
            job()
    except KeyboardInterrupt:
        return True
    return False


def traced(job: Callable[[], object], wanted: Callable[[CodeType], bool], at: Callable[[Line], None]) -> None:
    """Run a job; `at` hears of each line of the wanted code of `FILES` before it runs in this thread."""

    @functools.cache
    def name_of(code: CodeType) -> str | None:
        path = Path(code.co_filename)
        ours = str(path.parent) == ROOT and path.stem in FILES
        return path.stem if ours and wanted(code) else None

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        name = name_of(frame.f_code)
        if name is not None and event == "line":
            at((name, frame.f_lineno))
        return name and trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        job()
    finally:
        sys.settrace(before)


def interrupted(job: Callable[[], object], line: Line, times: int) -> bool:
    """Run a job, with a KeyboardInterrupt before a line runs for the given time; False if it did not."""
    left = times

    def at(here: Line) -> None:
        nonlocal left
        if here == line:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    try:
        traced(job, lambda code: any(number == line[1] for *_, number in code.co_lines()), at)
    except KeyboardInterrupt:
        return True
    return False


def opened(folder: str | None) -> PromptCache:
    """A cache that has served some requests."""
    cache = PromptCache(BUDGET, folder, disk_bytes=1 << 22)
    requests(cache, PROMPTS[:3])
    return cache


def at_line(line: Line, times: int, outcome: Outcome, *, disk: bool) -> bool:
    """Interrupt a line once and check the cache; return False for a line that runs less often."""
    with tempfile.TemporaryDirectory() as folder:
        cache = opened(folder if disk else None)
        hit = interrupted(lambda: work(cache), line, times)
        if hit:
            outcome.judge(cache, f"{line[0]}.py:{line[1]}, time {times}")
        if disk:
            cache.close()
    return hit


def all_lines(*, disk: bool) -> list[Line]:
    """The lines that `work` runs; with a disk only those of what joins the tiers, and those it adds."""
    without, found = set(all_lines(disk=False)) if disk else set(), set[Line]()
    with tempfile.TemporaryDirectory() as folder:
        cache = opened(folder if disk else None)
        traced(lambda: work(cache), lambda code: True, found.add)
        cache.close()
    return [line for line in sorted(found) if line not in without or line[0] == "cache"]


def by_timer(chance: random.Random, outcome: Outcome) -> None:
    """Interrupt the workload by a signal at a random moment."""
    cache = opened(None)

    def work_on() -> None:
        while True:  # until the signal comes, on any machine
            work(cache)

    interrupted_after(10 ** chance.uniform(-4, -1.5), work_on)
    outcome.judge(cache, "at a random moment")


def main(
    seconds: Annotated[float, typer.Option(help="How long interrupts come at random moments.")] = 60,
    seed: Annotated[int, typer.Option(help="Seed of these moments.")] = 0,
    every: Annotated[int, typer.Option(help="Take one in so many lines.")] = 1,
) -> None:
    """Interrupt the prompt cache wherever it can be; fails if one leaves it broken."""
    silence()
    logging.getLogger("llamahybrid").setLevel(logging.ERROR)  # each interrupt may say what it cost
    console = Console()
    swept, timed = Outcome(), Outcome()
    for disk in (False, True):
        lines = all_lines(disk=disk)[::every]
        for line in track(lines, f"lines{' with a disk' * disk}", console=console, transient=True):
            for times in TIMES:
                if not at_line(line, times, swept, disk=disk):
                    break
        console.print(f"{len(lines)} lines{' with a disk' * disk}")
    chance, end = random.Random(seed), time.monotonic() + seconds
    while time.monotonic() < end:
        by_timer(chance, timed)
    for name, outcome in (("at lines", swept), ("at random moments", timed)):
        console.print(
            f"{name}: {outcome.interrupted} interrupts, {outcome.restarts} cost what RAM held, "
            f"{outcome.broken.total()} left the cache broken"
        )
        for what, count in outcome.broken.most_common():
            console.print(f"  {count} x {what}", style="red", markup=False)
    raise typer.Exit(bool(swept.broken or timed.broken))


if __name__ == "__main__":
    typer.run(main)
