"""Conversations of random sizes, played with tokens alone: no length is the one the schedule was made for."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import pytest

from llamahybrid.evaluate.conversation import Record
from llamahybrid.prompt_cache import Costs
from tests.lab.draws import SHAPES, Draw, named, ratio, warm
from tests.lab.pretend import Ours, PretendSpeech, Scale, play
from tests.lab.server_rules import Sizes

pytestmark = [pytest.mark.full]
LARGE = Scale(Sizes(1536 << 10, 4 << 10), Costs(18.6e-3, 4.4e-3, 1e-3, 1e-3), vocabulary=256, divisor=8)
"""About 100M parameters on one core of a CPU."""
SEEDS = range(20_000, 20_250)
LONGEST = 2048
"""Longer prompts are cut closer still, and take their time here."""


def played(draw: Draw) -> Sequence[Record]:
    speech = PretendSpeech(seed=draw.seed, marked=False)
    return list(play(draw.start(speech), speech, Ours(LARGE, 4 << 30)))


@pytest.fixture(scope="module")
def ratios() -> dict[int, float]:
    return {seed: ratio(played(Draw(seed, LONGEST))) for seed in SEEDS}


def test_any_sizes_lose_little(ratios: dict[int, float]) -> None:
    ranked = sorted(ratios.values())
    assert fmean(ranked) <= 1.06
    assert ranked[int(0.95 * len(ranked))] <= 1.15


def test_no_shape_of_use_is_paid_for_by_the_others(ratios: dict[int, float]) -> None:
    for number, shape in enumerate(SHAPES):
        assert fmean(r for seed, r in ratios.items() if seed % len(SHAPES) == number) <= 1.09, shape.__name__


def test_draws_cover_the_sizes_they_promise() -> None:
    speech = PretendSpeech(marked=False)
    firsts, counts = [], []
    for seed in range(100):
        records = [next(Draw(seed).start(speech))]
        firsts.append(len(records[0].tokens))
        counts.append(len(warm(played(Draw(seed, 256)))))
    assert min(firsts) < 128
    assert max(firsts) > 16_384
    assert max(counts) <= 15


def test_a_draw_is_the_same_for_the_same_seed() -> None:
    assert [r.prompt for r in played(Draw(3, 256))] == [r.prompt for r in played(Draw(3, 256))]


@pytest.mark.parametrize("number", range(4))
def test_sizes_that_were_once_lost_on(number: int) -> None:
    name, start = list(named())[number]
    speech = PretendSpeech(marked=False)
    assert ratio(list(play(start(speech), speech, Ours(LARGE, 4 << 30)))) <= 1.06, name
