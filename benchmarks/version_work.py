"""One measurement in whichever llamahybrid is on the path: `benchmarks.versions` starts it in each checkout.

`python version_work.py CASE FOLDER`: prepares, then runs once for each line on stdin and prints the seconds.
`python version_work.py CASE FOLDER --count N`: runs N times and ends, for callgrind, with costs that no clock
measured: what is decided by them is decided alike then.
FOLDER holds model.gguf; what a case writes goes there, too. It keeps to names that versions share; where one
was renamed, both stand here.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from llamahybrid import Llama, PromptCache

# isort: split
import numpy as np
import numpy.typing as npt

Work = Iterator[float]
"""Seconds of one run after another."""


def renamed(value: Any, *names: str) -> Any:
    """The first of these attributes that there is."""
    return next(getattr(value, name) for name in names if hasattr(value, name))


class Texts:
    """Prompts that nobody has seen, the same in each version."""

    def __init__(self, llm: Llama) -> None:
        self._rng, self._words = np.random.default_rng(0), llm.n_vocab()

    def __call__(self, length: int) -> list[int]:
        return [int(token) for token in self._rng.integers(1, self._words, length)]


def opened(folder: Path, n_ctx: int, **options: Any) -> Llama:
    return Llama(
        str(folder / "model.gguf"), n_ctx=n_ctx, n_threads=1, n_threads_batch=1, verbose=False, **options
    )


def take(llm: Llama, prompt: list[int], tokens: int) -> list[int]:
    """Generate so many tokens."""
    stream = llm.generate(list(prompt), temp=0.0)
    taken = list(islice(stream, tokens))
    stream.close()
    return taken


COSTS = {
    "token_seconds": 15e-3,
    "prefill_seconds": 2.5e-3,
    "batch_seconds": 15e-3,
    "snapshot_seconds": 2e-3,
    "restore_seconds": 1e-3,
    "segment_seconds": 2e-6,
}
"""Of a model of 0.1 billion parameters on two cores: what stands for measured costs where work is counted."""

COUNTED = "--count" in sys.argv
"""Callgrind counts; no clock is asked."""

COUNTING = "LLAMAHYBRID_COUNTING"
"""In the environment: the library that has it begin and end."""


def fix_costs() -> None:
    """Nothing that is measured counts any more: all costs are what `COSTS` says."""
    names = ("llamahybrid.memory.costs", "llamahybrid.live.cost")
    found = next(name for name in names if importlib.util.find_spec(name.rpartition(".")[0]))
    meter = importlib.import_module(found).CostMeter
    said = meter.costs

    meter.costs = lambda self: replace(said(self), **COSTS)


def watched(work: Callable[[], Any]) -> None:
    """`work()` while callgrind counts."""
    toggle = ctypes.CDLL(os.environ[COUNTING]).toggle
    toggle()
    try:
        work()
    finally:
        toggle()


def clocked(work: Callable[[], Any]) -> float:
    gc.collect()
    started = time.perf_counter()
    if COUNTED:
        watched(work)
    else:
        work()
    return time.perf_counter() - started


def prompts(prepared: int, length: int, generated: int) -> Callable[[Path], Work]:
    """Generate behind a prompt of `length`, of which the first `prepared` tokens are there already."""

    def case(folder: Path) -> Work:
        with closing(opened(folder, 2048)) as llm:
            text = Texts(llm)
            while True:
                prompt = text(length)
                if prepared:
                    take(llm, prompt[:prepared], 1)
                yield clocked(partial(take, llm, prompt, generated))

    return case


def saves(what: str) -> Callable[[Path], Work]:
    """Save the state, or the attention, of 2,000 tokens ten times, into touched buffers."""

    def case(folder: Path) -> Work:
        with closing(opened(folder, 2048, flash_attn=True)) as llm:
            llm.eval(Texts(llm)(2000))
            live = renamed(llm, "runner", "_keeper").live
            buffers: dict[int, npt.NDArray[np.uint8]] = {}

            def buffer(size: int) -> npt.NDArray[np.uint8]:
                return buffers.setdefault(size, np.ones(size, np.uint8))

            def save() -> None:
                for _ in range(10):
                    if what == "snapshot":
                        saved = live.snapshot(buffer, deep=False)
                    else:
                        saved = live.page_out(0, live.n, buffer, deep=False)
                    assert saved is not None, "the state was not saved"

            while True:
                yield clocked(save)

    return case


def switch(folder: Path) -> Work:
    """Go from one chat of 2,000 tokens to the other, by the request's report: plan and restore.

    What is counted is all up to the first token: the decode of five tokens, too. Answers are long enough for
    a checkpoint at their end where that takes a few tokens' time: the end of a shorter one is stored when it
    is left, which would count here.
    """
    with closing(opened(folder, 4096, flash_attn=True, prompt_cache=PromptCache(2 << 30))) as llm:
        text = Texts(llm)
        chats = [text(2000) for _ in range(2)]
        for turn in range(sys.maxsize):
            chat = chats[turn % 2]
            chat += text(4)
            stream, answer = llm.generate(list(chat), temp=0.0), list[int]()
            clocked(lambda stream=stream, answer=answer: answer.append(next(stream)))
            chat += [*answer, *islice(stream, 23)]
            stream.close()
            if turn > 5:
                report = llm.last_request
                assert report is not None
                assert report.left < 32, report
                yield report.plan_seconds + report.restore_seconds
            if len(chat) > 3900:
                chats = [chat[:2000] for chat in chats]


def lookup(_: Path) -> Work:
    """Ten plans in a tree of 1,000,000 tokens and 2,000 branches, as in `benchmarks.lookup`."""
    from llamahybrid.prompt_cache import Costs, LiveView

    rng, cache = np.random.default_rng(0), PromptCache(1 << 30)
    trunk = rng.integers(0, 150_000, 32_000, dtype=np.int32)
    for at in rng.integers(0, len(trunk), 2000):
        cache.remember("model", np.concatenate([trunk[:at], rng.integers(0, 150_000, 484, dtype=np.int32)]))
    cache.remember("model", trunk)
    view = LiveView("model", trunk[:100].copy(), 100, True, True, False)
    prompt = np.concatenate([trunk[:-1], trunk[:1]])

    def plans() -> None:
        for _ in range(10):
            cache.release(cache.plan(prompt, view, (), Costs()))

    while True:
        yield clocked(plans)


def restart(folder: Path) -> Work:
    """The first token of a new `Llama` whose conversation of 2,000 tokens lies on disk."""
    with closing(opened(folder, 2304, prompt_cache=PromptCache(None, folder / "cache"))) as llm:
        text = Texts(llm)
        prompt = text(2000)
        take(llm, prompt, 1)
    while True:
        with closing(opened(folder, 2304, prompt_cache=PromptCache(None, folder / "cache"))) as llm:
            asked = prompt + text(3)
            yield clocked(partial(take, llm, asked, 1))
            assert llm.last_request is not None
            assert llm.last_request.cached == len(prompt), llm.last_request


CASES: dict[str, Callable[[Path], Work]] = {
    "first prefill": prompts(0, 1000, 1),
    "suffix prefill": prompts(1000, 1100, 1),
    "decode": prompts(300, 301, 100),
    "save snapshot": saves("snapshot"),
    "save segment": saves("segment"),
    "switch": switch,
    "lookup": lookup,
    "restart": restart,
}


def main(case: str, folder: Path, count: int | None) -> None:
    work = CASES[case](folder)
    if count is not None:
        fix_costs()
        list(islice(work, count))
        return
    next(work)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for _ in sys.stdin:
        sys.stdout.write(f"{next(work)!r}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int)
    arguments = parser.parse_args()
    main(arguments.case, arguments.folder, arguments.count)
