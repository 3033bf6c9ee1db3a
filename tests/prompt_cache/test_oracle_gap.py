"""Tokens decoded for prompts over the least possible: what an infinite perfect cache would decode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from llamahybrid.prompt_cache import PromptCache
from llamahybrid.prompt_cache.nodes import common_prefix
from tests.lab.fake_engine import FakeEngine, Kind

from .workloads import WORKLOADS, Turn, shortened_answer

SEEDS = range(6)
KINDS: tuple[Kind, ...] = ("recurrent", "hybrid", "window")


def oracle_ratio(workload: Callable[[int], Iterator[Turn]], kind: Kind, ram_bytes: int = 1 << 28) -> float:
    """The ratio over all seeds, each a conversation with a cache of its own."""
    decoded = least = 0
    for seed in SEEDS:
        engine = FakeEngine(PromptCache(ram_bytes), kind)
        known: list[np.ndarray] = []
        for turn in workload(seed):
            prompt = np.array(turn.prompt, np.int32)
            least += len(prompt) - max((common_prefix(prompt, k) for k in known), default=0)
            engine.request(turn.prompt, turn.boundaries, turn.answer)
            known.append(np.array(engine.state, np.int32))
        decoded += engine.prefilled
    return decoded / least


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WORKLOADS)
def test_chats_decode_only_what_is_new(name: str, kind: Kind) -> None:
    assert oracle_ratio(WORKLOADS[name], kind) <= 1.02


@pytest.mark.parametrize("kind", KINDS)
def test_histories_that_keep_part_of_a_long_answer(kind: Kind) -> None:
    assert oracle_ratio(shortened_answer, kind) <= 1.2


def test_raw_prompts_without_message_starts_stay_near() -> None:
    def raw(seed: int) -> Iterator[Turn]:
        for turn in WORKLOADS["thinking_stripped"](seed):
            yield replace(turn, boundaries=[])

    assert oracle_ratio(raw, "hybrid") <= 1.06


def test_a_budget_of_a_few_snapshots_keeps_the_places_where_histories_diverge() -> None:
    """About eight snapshots against some 150 taken: message starts outlive checkpoints within answers."""
    assert oracle_ratio(WORKLOADS["thinking_stripped"], "hybrid", ram_bytes=80_000) <= 1.02
