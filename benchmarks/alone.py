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

STRETCH = 60
"""Tokens of an answer that is timed."""


def milliseconds_a_token(answer: Iterator[Any]) -> float:
    """Milliseconds of each token of an answer behind the first one."""
    next(answer)
    began = time.perf_counter()
    count = sum(1 for _ in islice(answer, STRETCH))
    return 1e3 * (time.perf_counter() - began) / count


def cold(llm: Any, chance: random.Random, tokens: int) -> float:
    """Seconds to the first token of a new prompt."""
    began = time.perf_counter()
    with closing(llm.generate(words(chance, tokens, tokens + 1), temp=0.0)) as answer:
        next(answer)
        return time.perf_counter() - began


ALONE: dict[str, Callable[[Any, random.Random], float]] = {
    "streamed, ms a token": lambda llm, chance: milliseconds_a_token(
        streamed(llm)(words(chance, 200, 400), STRETCH + 1)
    ),
    "generate, ms a token": lambda llm, chance: milliseconds_a_token(
        llm.generate(words(chance, 200, 400), temp=0.0)
    ),
    "cold 1,000 tokens, s": lambda llm, chance: cold(llm, chance, 1000),
    "cold 3,500 tokens, s": lambda llm, chance: cold(llm, chance, 3500),
}

_open: list[Any] = []
"""The model of a process that plays `alone`."""


def open_here(subject: Subject) -> None:
    silence()
    _open.append(subject.in_process())


def stretch(measure: str, seed: int) -> float:
    return ALONE[measure](_open[0], random.Random(f"{measure}/{seed}"))


def alone(subjects: Sequence[Subject], rounds: int) -> dict[str, list[Result]]:
    """Play stretches of a few seconds by turns, in one process for each subject.

    A machine's speed changes within minutes by more than the bounds.
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
            for measure in ALONE:
                for name in pools if seed % 2 else reversed(pools):
                    found[name][measure] = pools[name].submit(stretch, measure, seed).result()
            for name, result in found.items() if seed >= 0 else ():
                runs[name].append(result)
        return runs
