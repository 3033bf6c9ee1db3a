"""The account: drafts pay where they are right and cheap, and stop where they cost more than they save."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from llamahybrid.memory.costs import CostMeter
from llamahybrid.speculation.draft_length import DraftLengthPolicy

pytestmark = pytest.mark.usefixtures("measured_costs")

TOKEN = 0.02
BEARABLE = 1.08


@dataclass
class World:
    """Costs in tokens' time, and how often a guessed token is right."""

    more: float = 0.1
    """Each further token of a batch."""
    second: float = 0.0
    """Beyond that: each batch of more than one token."""
    ask: float = 0.005
    each: float = 0.0
    save: float = 0.02
    load: float = 0.03
    planes: int = 0
    right: Callable[[random.Random, int], bool] = lambda rng, at: True
    offers: int = 10


def answer(
    policy: DraftLengthPolicy,
    meter: CostMeter,
    world: World,
    tokens: int,
    rng: random.Random,
    prompt: int = 0,
) -> tuple[float, int]:
    """Say `tokens` tokens as `Drafts` would, behind `prompt` tokens of a prompt: seconds, and batches."""
    policy.begin()
    policy.prefilled(prompt * world.more * TOKEN)
    said = gained = pending = batches = 0
    seconds = 0.0
    while True:
        said += 1 + gained
        policy.account(1 + gained, pending)
        if said >= tokens:
            return seconds, batches
        back = pending > gained and pending > world.planes
        owed = gained + 1 if back else 0
        spent, length = 0.0, policy.length(world.offers)
        right = [world.right(rng, said + i) for i in range(length)]
        if length:
            spent = (world.ask + length * world.each) * TOKEN
            policy.asked(spent, 0)
        pending = length
        gained = next((i for i in range(pending) if not right[i]), pending)
        if back:
            policy.undone(world.load * TOKEN)
            spent += world.load * TOKEN
        if pending > world.planes:
            policy.undone(world.save * TOKEN)
            spent += world.save * TOKEN
        size = 1 + owed + pending
        batch = (1 + (world.second if size > 1 else 0) + world.more * (size - 1)) * TOKEN
        if size > 1:
            policy.decoded(batch)
        else:
            meter.decoded(1, batch)
        seconds += spent + batch
        batches += 1


def usual(
    world: World, tokens: int, seed: int = 1, before: World | None = None, prompt: int = 0
) -> tuple[float, float]:
    """Time over that of no drafts, and tokens per batch, in the 8th request on this context."""
    meter, rng = CostMeter(512), random.Random(seed)
    meter.decoded(1, TOKEN)
    meter.decoded(512, 512 * world.more * TOKEN)
    policy = DraftLengthPolicy(meter)
    for _ in range(7):
        answer(policy, meter, before or world, 100, rng)
    seconds, batches = answer(policy, meter, world, tokens, rng, prompt)
    prefill = prompt * world.more * TOKEN
    plain = max(1, tokens - 1)
    return (prefill + seconds) / (prefill + plain * TOKEN), plain / max(1, batches)


def never(rng: random.Random, at: int) -> bool:
    return False


def often(rng: random.Random, at: int) -> bool:
    return rng.random() < 0.8


def in_stretches(rng: random.Random, at: int) -> bool:
    return at // 40 % 2 == 0 and rng.random() < 0.95


def quoted(rng: random.Random, at: int) -> bool:
    return at % 25 > 1


HOPELESS = {
    "never right": World(right=never),
    "never right, planes": World(right=never, planes=10),
    "never right, batches as dear as single tokens": World(right=never, more=1.0),
    "right, but batches gain nothing": World(more=1.0),
    "a slow draft model": World(right=never, ask=2.0),
    "a slow draft model that is right": World(ask=20.0),
    "tokens guessed one by one, wrong": World(right=never, each=0.4),
    "snapshots as dear as tokens": World(right=never, save=1.0, load=1.0),
    "right now and then": World(right=lambda rng, at: rng.random() < 0.2, more=0.5),
    "right in stretches": World(right=in_stretches, more=0.4),
    "right in stretches, batches that cost first": World(right=in_stretches, more=0.25, second=1.1),
}
GOOD = [
    (World(), 0.45),
    (World(planes=10), 0.45),
    (World(right=often), 0.75),
    (World(right=often, planes=10), 0.7),
    (World(right=in_stretches), 0.85),
    (World(right=quoted, more=0.25, second=1.1), 0.9),
    (World(each=0.05), 0.6),
]


@pytest.mark.parametrize("world", HOPELESS.values(), ids=HOPELESS)
def test_unprofitable_drafts_stop(world: World) -> None:
    ratios = [usual(world, 400, seed)[0] for seed in range(4)]
    assert sum(ratios) / len(ratios) <= BEARABLE


@pytest.mark.parametrize(("world", "most"), GOOD)
def test_drafts_that_are_right_pay(world: World, most: float) -> None:
    ratio, per_batch = usual(world, 200)
    assert ratio <= most
    assert per_batch >= 1.2


def test_nothing_is_drafted_before_a_token_was_measured() -> None:
    assert DraftLengthPolicy(CostMeter(512)).length(8) == 0
