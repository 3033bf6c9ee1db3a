"""Stock and ours by turns: milliseconds a token, and cold prompts, in two processes that stay open."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from itertools import islice
from typing import Any

from benchmarks.subjects import Result, Subject, streamed, words
from tests.lab.campaign import silence

TURN, TURNS = 16, 6
"""Tokens of an answer that are timed at once, and how often."""

AHEAD = 6
"""Tokens that may be decoded while the reader waits for its turn, and are not timed."""

REST = 0.15
"""Seconds in which the loop comes to its end, so that it is not heard in the other's turn."""


def turn(answer: Iterator[Any]) -> float:
    """Milliseconds of each token of a part of an answer."""
    for _ in islice(answer, AHEAD):
        pass
    began = time.perf_counter()
    count = sum(1 for _ in islice(answer, TURN))
    took = 1e3 * (time.perf_counter() - began) / count
    time.sleep(REST)
    return took


def cold(llm: Any, chance: random.Random, tokens: int) -> float:
    """Seconds to the first token of a new prompt."""
    began = time.perf_counter()
    with closing(llm.generate(words(chance, tokens, tokens + 1), temp=0.0)) as answer:
        next(answer)
        return time.perf_counter() - began


ANSWERS: dict[str, Callable[[Any, list[int]], Iterator[Any]]] = {
    "streamed, ms a token": lambda llm, prompt: streamed(llm)(prompt, (AHEAD + TURN) * (TURNS + 1)),
    "generate, ms a token": lambda llm, prompt: llm.generate(prompt, temp=0.0),
}
COLD = {"cold 1,000 tokens, s": 1000, "cold 3,500 tokens, s": 3500}

_open: list[Any] = []
"""The model of a process that plays `alone`, and its answer."""


def open_here(subject: Subject) -> None:
    silence()
    _open.append(subject.in_process())


def begin(measure: str, seed: int) -> float:
    """Seconds of a cold prompt; or 0 and a new answer, whose parts `go_on` times."""
    llm, chance = _open[0], random.Random(f"{measure}/{seed}")
    if measure in COLD:
        return cold(llm, chance, COLD[measure])
    _open[1:] = [ANSWERS[measure](llm, words(chance, 200, 400))]
    next(_open[1])
    return 0.0


def go_on() -> float:
    return turn(_open[1])


def alone(subjects: Sequence[Subject], rounds: int) -> dict[str, list[Result]]:
    """Play short parts by turns, in one process for each subject.

    A machine's speed changes within seconds by more than the bounds.
    """
    with ExitStack() as stack:
        spawned = multiprocessing.get_context("spawn")
        pools = {
            subject.name: stack.enter_context(ProcessPoolExecutor(1, spawned, open_here, (subject,)))
            for subject in subjects
        }
        runs: dict[str, list[Result]] = {name: [] for name in pools}
        for seed in range(-1, rounds):  # the first round warms up
            found: dict[str, Result] = {name: {} for name in pools}
            for measure in (*ANSWERS, *COLD):
                order = [*pools] if seed % 2 else [*reversed(pools)]
                for name in order:
                    found[name][measure] = pools[name].submit(begin, measure, seed).result()
                for number in range(TURNS if measure in ANSWERS else 0):
                    for name in order if number % 2 else reversed(order):
                        found[name][measure] += pools[name].submit(go_on).result() / TURNS
            for name, result in found.items() if seed >= 0 else ():
                runs[name].append(result)
        return runs
