"""The checkpoint rules by themselves, event by event; and that all who drive them do the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamahybrid import Llama
from llamahybrid.core.schedule import (
    Schedule,
)
from llamahybrid.prompt_cache import Costs, Plan, PromptCache
from llamahybrid.prompt_cache.base import Outline
from llamahybrid.prompt_cache.placement import prefill_cuts
from tests.lab.fake_engine import FakeEngine, Kind

TinyModel = Callable[..., Path]

SLOW = Costs(token_seconds=0.1, prefill_seconds=0.01, snapshot_seconds=1.0, snapshot_bytes=1 << 20)
"""Costs of slow snapshots, of which none is stored for being cheap."""


def planned(total: int = 200, cached: int = 0, **more: object) -> Plan:
    source = "live" if cached else "none"
    return Plan(total, cached, cached, source, None, None, **more)  # type: ignore[arg-type]


def schedule(plan: Plan, costs: Callable[[], Costs] = lambda: SLOW, **more: bool) -> Schedule:
    return Schedule(plan, SLOW, costs, **more)


# -- the prompt ------------------------------------------------------------------------------------


OUTLINE = Outline(total=4000, cached=0, matched=0)
CHEAP = replace(SLOW, snapshot_seconds=1e-6, batch_seconds=1e-4)


def test_cuts_are_chosen_anew_once_costs_are_known() -> None:
    now = [SLOW]
    first = prefill_cuts(OUTLINE, SLOW)
    made = schedule(planned(4000, cuts=first, outline=OUTLINE), lambda: now[0])
    assert not made.recut(1024)
    assert made.cuts == first
    now[0] = CHEAP
    assert made.recut(1024)
    assert made.cuts != first
    assert [c for c in made.cuts if c <= 1024] == [c for c in first if c <= 1024]
    assert [c for c in made.cuts if c > 1040] == [c for c in prefill_cuts(OUTLINE, CHEAP) if c > 1040]
    assert not made.recut(2048), "nothing new was measured"


QUESTION = Outline(total=1573, cached=0, matched=0, boundaries=(40, 1540, 1570))
"""A document and a question, which starts 4 tokens behind the end of a batch of 512."""


def test_a_message_that_starts_right_behind_the_end_of_a_batch_keeps_its_cut() -> None:
    """The end of a batch is no checkpoint that a cut would have to keep its distance from."""
    made = schedule(
        planned(1573, cuts=prefill_cuts(QUESTION, Costs()), outline=QUESTION),
        lambda: replace(SLOW, snapshot_seconds=1e-3),
    )
    assert 1536 not in made.cuts
    assert made.recut(1536)
    assert 1540 in made.cuts


def test_a_cut_that_was_not_planned_keeps_its_distance_from_the_last_one() -> None:
    made = schedule(planned(1573, cuts=(1535,), outline=QUESTION), lambda: CHEAP)
    assert made.recut(1536)
    assert made.cuts[:2] == (1535, 1560)


# -- who drives it ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("arch", "kind"), [("qwen35", "hybrid"), ("mamba", "recurrent")])
def test_fake_engine_stores_the_checkpoints_of_a_model(tiny_model: TinyModel, arch: str, kind: Kind) -> None:
    """The same requests on a context and on tokens: every checkpoint at the same place, in the same order."""
    costs = replace(SLOW, snapshot_seconds=0.01, batch_tokens=64)
    caches = Noting(1 << 28), Noting(1 << 28)
    path = str(tiny_model(arch))
    llm = Llama(path, n_ctx=1024, n_batch=64, n_threads=1, verbose=False, prompt_cache=caches[0])
    with closing(llm):
        llm.runner.meter.costs = lambda: costs  # type: ignore[union-attr, method-assign]
        fake = FakeEngine(caches[1], kind, costs=costs, snapshot_bytes=1 << 16)
        first = [(7 * i + 1) % 200 for i in range(150)]
        chat = [*first, *_both(llm, fake, first, 90), *range(30)]
        for prompt, tokens in ((chat, 40), (first, 3), (chat[:200], 70), ([9, *first], 2), (chat, 20)):
            _both(llm, fake, prompt, tokens)
    assert caches[0].places == caches[1].places
    assert len(set(caches[0].places)) > 10


def _both(llm: Llama, fake: FakeEngine, prompt: list[int], tokens: int) -> list[int]:
    """Run a request on both; return the answer, whose last token is not decoded."""
    with closing(llm.generate(prompt, temp=0.0)) as stream:
        answer = list(itertools.islice(stream, tokens))
    fake.request(prompt, answer=answer[:-1])
    assert fake.state == llm.runner.live.tokens.tolist()  # type: ignore[union-attr]
    return answer[:-1]


class Noting(PromptCache):
    """Notes where checkpoints are admitted, behind how many live tokens."""

    def __init__(self, ram_bytes: int) -> None:
        super().__init__(ram_bytes)
        self.places: list[tuple[int, int]] = []
        admit = self.admit

        def noting(view: Any, position: int, *rest: Any) -> bool:
            self.places.append((len(view.tokens), position))
            return admit(view, position, *rest)

        self.admit = noting
