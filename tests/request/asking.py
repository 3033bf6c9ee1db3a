"""Helpers for tests of requests: prompts, threads, actions before batches."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from itertools import islice
from typing import Any

import llama_cpp
import numpy as np
import pytest

WORDS: list[int] = np.random.default_rng(3).integers(1, 200, 400).tolist()
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "max_tokens": 8}
ARCHS = [
    "qwen35",
    "gemma3",
    pytest.param("mamba", marks=pytest.mark.full),
    pytest.param("llama", marks=pytest.mark.full),
]
"""An architecture of each kind of memory; CUTS are for tests of cuts."""
CUTS = ["qwen35", "gemma3", "mamba", "llama"]
DEADLINE = 120
"""Seconds after which something that is expected has failed, on a slow machine too."""


def take(llm: Any, prompt: Sequence[int], n: int = 8, **options: Any) -> list[int]:
    """The first n tokens of the greedy answer; the stream is closed."""
    with closing(llm.generate(prompt, **{"temp": 0.0, **options})) as stream:
        return list(islice(stream, n))


def begin(llm: Any, prompt: Sequence[int], n: int = 1) -> tuple[Iterator[int], list[int]]:
    """An open stream, and its first n tokens."""
    stream = llm.generate(prompt, temp=0.0)
    return stream, list(islice(stream, n))


def said(made: Any) -> str:
    """The text of a completion, or of its chunks."""
    if isinstance(made, dict):
        choice = made["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]
    pieces = (chunk["choices"][0] for chunk in made)
    return "".join(p["text"] if "text" in p else p["delta"].get("content") or "" for p in pieces)


def finish(made: Any) -> str | None:
    """The finish reason of a completion, or of its last chunk."""
    last = made if isinstance(made, dict) else list(made)[-1]
    return last["choices"][0]["finish_reason"]


def waits_for_reply(thread: threading.Thread) -> bool:
    """The thread has sent its message: it is in `Reply.get`."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code.co_name == "get" and "llamahybrid" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


class Started(threading.Thread):
    """Work in a thread that keeps no process alive."""

    def __init__(self, work: Callable[..., Any], *args: Any, **options: Any) -> None:
        super().__init__(daemon=True)
        self._work = partial(work, *args, **options)
        self._result: Future[Any] = Future()
        self.start()

    def run(self) -> None:
        try:
            self._result.set_result(self._work())
        except BaseException as error:
            self._result.set_exception(error)

    def result(self) -> Any:
        """What the work returned; its error is raised."""
        try:
            return self._result.result(DEADLINE)
        finally:
            self.join(DEADLINE)


def in_thread(work: Callable[..., Any], *args: Any) -> Any:
    """Return the result of `work(*args)` in another thread, which then ends."""
    return Started(work, *args).result()


def together(*jobs: Callable[[], Any]) -> list[Any]:
    """Run jobs at once, each in a thread; return their results."""
    all_there = threading.Barrier(len(jobs), timeout=DEADLINE)
    threads = [Started(lambda job=job: (all_there.wait(), job())[1]) for job in jobs]
    return [thread.result() for thread in threads]


def each(work: Callable[[Any], Any], over: Iterable[Any]) -> list[Any]:
    """`work` on each at once, in threads of their own."""
    return together(*(lambda one=one: work(one) for one in over))


class Batches:
    """The native batches of a model from now on: how many tokens each has, and what happens around them."""

    def __init__(self, llm: Any) -> None:
        self.sizes: list[int] = []
        self.before: dict[int, Callable[[], Any]] = {}
        """Actions before batches, by the number of the batch, from 0."""
        self.after: dict[int, Callable[[], Any]] = {}
        self._context = llm._ctx
        self._decode = llm._ctx.decode
        llm._ctx.decode = self

    def __call__(self, batch: Any) -> None:
        number = len(self.sizes)
        self.sizes.append(batch.n_tokens())
        self.before.get(number, int)()
        self._decode(batch)
        self.after.get(number, int)()

    def stop(self) -> None:
        """Watch no longer."""
        self._context.decode = self._decode


class Stock:
    """The answer of a fresh context of upstream's, for each prompt."""

    def __init__(self, llm: llama_cpp.Llama) -> None:
        self._llm = llm
        self._lock = threading.Lock()
        self._known: dict[tuple[int, ...], list[int]] = {}

    def __call__(self, prompt: Sequence[int], n: int = 8) -> list[int]:
        with self._lock:
            known = self._known.get(tuple(prompt), [])
            if len(known) < n:
                self._llm.reset()
                known = self._known[tuple(prompt)] = take(self._llm, prompt, n)
            return known[:n]
