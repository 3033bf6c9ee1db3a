"""Records for later processes bound the tokens that these decode again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llamahybrid.prompt_cache import Costs, PromptCache
from llamahybrid.prompt_cache.blocks import Why
from llamahybrid.prompt_cache.write_policy import RUNG_FACTOR, RUNG_TOKENS
from tests.lab.disk_fuzz import stored
from tests.lab.fake_engine import FakeEngine, Kind

COSTS = Costs(
    token_seconds=0.05,
    prefill_seconds=0.002,
    snapshot_seconds=0.005,
    restore_seconds=0.005,
    snapshot_bytes=1000,
    segment_seconds=1e-6,
    batch_tokens=512,
    batch_seconds=0.03,
)
"""Of a CPU with a model of a few billion weights: not every cut is affordable."""

ANSWER = list(range(40_000, 40_050))
SYSTEM = 300


def made(total: int) -> list[int]:
    return np.random.default_rng(total).integers(0, 30_000, total).tolist()


def cached(folder: Path, prompt: list[int], kind: Kind) -> int:
    """Tokens that a new process would not decode; nothing of it is written."""
    cache = PromptCache(1 << 28, folder, disk_write_bytes=0)
    plan = cache.plan(np.array(prompt, np.int32), FakeEngine(cache, kind, costs=COSTS).view(), (), COSTS)
    cache.release(plan)
    cache.close()
    return plan.cached


@pytest.mark.parametrize("kind", ["hybrid", "recurrent"])
@pytest.mark.parametrize("chat", [False, True], ids=["raw", "chat"])
@pytest.mark.parametrize("total", [200, 700, 2500, 6000, 12_000])
def test_a_history_that_parts_anywhere_decodes_a_multiple_of_the_distance(
    folder: Path, kind: Kind, total: int, chat: bool
) -> None:
    prompt, cache = made(total), PromptCache(1 << 28, folder)
    starts = [n for n in range(SYSTEM, total, total // 7)] if chat else []
    FakeEngine(cache, kind, costs=COSTS).request(prompt, boundaries=starts, answer=ANSWER)
    assert cache.close()
    history = [*prompt, *ANSWER]
    for distance in (d for d in (1, 7, 30, 60, 150, 300, 500, 900, 1700, 4000, 9000) if d < total):
        common = history[: len(history) - distance]
        again = len(common) - cached(folder, [*common, 50_000, 50_001], kind)
        assert again <= RUNG_FACTOR * distance + RUNG_TOKENS, f"parted {distance} tokens before its end"


@pytest.mark.parametrize("kind", ["hybrid", "recurrent", "window"])
def test_a_new_conversation_starts_at_the_end_of_the_first_message(folder: Path, kind: Kind) -> None:
    prompt, cache = made(900), PromptCache(1 << 28, folder)
    FakeEngine(cache, kind, costs=COSTS).request(prompt, boundaries=[SYSTEM, 880], answer=ANSWER)
    assert cache.close()
    assert cached(folder, [*prompt[:SYSTEM], *range(50_000, 50_100)], kind) == SYSTEM


def test_records_say_why_they_are_kept(folder: Path) -> None:
    prompt, cache = made(3000), PromptCache(1 << 28, folder)
    FakeEngine(cache, "recurrent", costs=COSTS).request(
        prompt, boundaries=[SYSTEM, 2000, 2900], answer=ANSWER
    )
    assert cache.close()
    kept = {item.node.why: item.end for item, _ in stored(folder)[1].values() if item.node is not None}
    assert (kept[Why.TIP], kept[Why.PROMPT], kept[Why.SYSTEM]) == (3050, 2900, SYSTEM)
    assert 1000 < kept[Why.RUNG] < 2900


def test_with_little_room_the_newest_states_of_a_conversation_stay(folder: Path) -> None:
    """A conversation that fills the folder alone lets its own oldest states go."""
    cache = PromptCache(1 << 28, folder, 30_000)
    engine = FakeEngine(cache, "recurrent", costs=COSTS)
    history = made(200)
    for turn in range(12):
        engine.request(history, boundaries=[100], answer=ANSWER)
        assert cache.flush()
        history = [*engine.state, *made(30 + turn)]
    assert cache.close()
    assert cache.stats().extra["disk_evicted"] > 0
    assert cached(folder, history, "recurrent") == len(engine.state)
    assert cached(folder, [*history[:100], 50_000, 50_001], "recurrent") == 100, "its first message"
    assert sum(path.stat().st_size for path in folder.glob("*/*/*.val")) <= 30_000
