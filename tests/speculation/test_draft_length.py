"""The account: drafts pay where they are right and cheap, and cost no more than promised where not."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from llamahybrid.memory.costs import CostMeter
from llamahybrid.speculation.draft_length import Curve, Pace

TOKEN = 0.02
PROMISED = 1.05


@dataclass
class World:
    """Costs in tokens' time, and how often a guessed token is right."""

    more: float = 0.1
    """Each further token of a batch."""
    second: float = 0.0
    """What a batch of more than one token costs beyond that."""
    ask: float = 0.005
    each: float = 0.0
    save: float = 0.02
    load: float = 0.03
    planes: int = 0
    right: Callable[[random.Random, int], bool] = lambda rng, at: True
    offers: int = 10


def answer(
    pace: Pace, meter: CostMeter, world: World, tokens: int, rng: random.Random, prompt: int = 0
) -> tuple[float, int]:
    """Say `tokens` tokens as `Drafts` would, after so many of a prompt: seconds, and batches."""
    pace.begin()
    if prompt:
        pace.prefilled(prompt, prompt * world.more * TOKEN)
    right: list[bool] = []
    """What is left of the guess, by what will become of it."""
    said = gained = pending = owed = batches = 0
    seconds = 0.0
    while True:
        said += 1 + gained
        pace.settled(1 + gained)
        if said >= tokens:
            return seconds, batches
        for _ in range(1 + gained):
            if right:
                pace.chance.saw(right[0])
                right = right[1:] if right[0] else []
        back = pending > gained and pending > world.planes
        owed = gained + 1 if back else 0
        spent, length = 0.0, 0
        if right or pace.due(said):
            length = pace.length(said, world.offers, owed, world.planes)
        if len(right) < max(1, length):
            wanted = length or (pace.due(said) and pace.watch(said))
            if wanted:
                right = [world.right(rng, said + i) for i in range(wanted if world.each else world.offers)]
                spent = (world.ask + len(right) * world.each) * TOKEN
                pace.asked(spent, len(right) if world.each else 0)
        pending = min(length, len(right))
        gained = next((i for i in range(pending) if not right[i]), pending)
        if back:
            pace.loaded(world.load * TOKEN, owed)
            spent += world.load * TOKEN
        if pending > world.planes:
            pace.saved(world.save * TOKEN)
            spent += world.save * TOKEN
        size = 1 + owed + pending
        batch = (1 + (world.second if size > 1 else 0) + world.more * (size - 1)) * TOKEN
        if size > 1:
            pace.decoded(size, batch)
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
    meter.saved(1, world.save * TOKEN)
    pace = Pace(meter)
    for _ in range(7):
        answer(pace, meter, before or world, 100, rng)
    seconds, batches = answer(pace, meter, world, tokens, rng, prompt)
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


@pytest.mark.parametrize("tokens", [1, 10, 30, 50, 400])
@pytest.mark.parametrize("world", HOPELESS.values(), ids=HOPELESS)
def test_drafts_never_cost_more_than_promised(world: World, tokens: int) -> None:
    for seed in range(3):
        assert usual(world, tokens, seed)[0] <= PROMISED


@pytest.mark.parametrize("world", HOPELESS.values(), ids=HOPELESS)
def test_nor_where_they_were_right_until_now(world: World) -> None:
    good = replace(world, right=lambda rng, at: True)
    for tokens in (5, 20, 100):
        assert usual(world, tokens, before=good)[0] <= PROMISED


@pytest.mark.parametrize("world", HOPELESS.values(), ids=HOPELESS)
def test_nor_with_a_head_start(world: World) -> None:
    good = replace(world, right=lambda rng, at: True)
    for prompt in (10, 100, 5000):
        for tokens in (3, 30, 300):
            assert usual(world, tokens, prompt=prompt)[0] <= PROMISED
            assert usual(world, tokens, before=good, prompt=prompt)[0] <= PROMISED


def test_a_head_start_is_made_use_of() -> None:
    quoting = World(right=quoted, more=0.25, second=1.1)
    late, soon = (usual(quoting, 60, prompt=prompt)[1] for prompt in (0, 600))
    assert soon > 1.5 > late


def test_a_request_starts_as_if_the_last_guess_had_been_wrong() -> None:
    pace, _ = measured()
    for right in (False, False, False, True, True, True) * 6:
        pace.chance.saw(right)
    assert pace.chance.next > 0.6
    pace.begin()
    assert pace.chance.next < 0.4


def test_nor_in_the_first_request_ever() -> None:
    for world in HOPELESS.values():
        if world.ask > 1 or world.each:  # nobody knows before it was asked once
            continue
        for tokens in (10, 30, 60, 200):
            meter = CostMeter(512)
            meter.decoded(1, TOKEN)
            meter.saved(1, world.save * TOKEN)
            seconds, _ = answer(Pace(meter), meter, world, tokens, random.Random(3))
            assert seconds <= PROMISED * (tokens - 1) * TOKEN


@pytest.mark.parametrize(
    ("world", "most"),
    [
        (World(), 0.45),
        (World(planes=10), 0.45),
        (World(right=often), 0.75),
        (World(right=often, planes=10), 0.7),
        (World(right=in_stretches), 0.85),
        (World(right=quoted, more=0.25, second=1.1), 0.9),
        (World(each=0.05), 0.6),
    ],
)
def test_drafts_that_are_right_pay(world: World, most: float) -> None:
    ratio, per_batch = usual(world, 200)
    assert ratio <= most
    assert per_batch >= 1.2


def test_nothing_is_drafted_before_a_token_was_measured() -> None:
    assert Pace(CostMeter(512)).length(1000, 8, 0, 8) == 0


def measured(prefill: float = 0.1) -> tuple[Pace, CostMeter]:
    """One that knows what tokens cost, and that guesses were right."""
    meter = CostMeter(512)
    meter.decoded(1, TOKEN)
    meter.decoded(512, 512 * prefill * TOKEN)
    pace = Pace(meter)
    for _ in range(12):
        pace.chance.saw(True)
    return pace, meter


def test_a_draft_is_no_longer_than_there_is_room() -> None:
    pace, _ = measured()
    assert pace.length(10_000, 9, 0, 8) == 9
    assert pace.length(10_000, 3, 0, 8) == 3
    assert pace.length(10_000, 0, 0, 8) == 0


def test_a_draft_that_the_answer_cannot_bear_yet_is_not_made() -> None:
    pace, _ = measured()
    assert pace.length(5, 9, 0, 9) == 0
    assert 0 < pace.length(36, 9, 0, 9) < 9
    assert pace.length(100, 9, 0, 9) == 9


def test_the_prompt_gives_a_head_start() -> None:
    pace, _ = measured()
    pace.prefilled(1000, 1000 * 0.1 * TOKEN)  # a share of 4 tokens
    assert pace.length(1, 9, 0, 9) == 9
    for _ in range(2):
        pace.asked(2.0 * TOKEN, 0)
        pace.settled(0)
    assert pace.length(1, 9, 0, 9) == 0, "it was lost"
    pace.begin()
    assert pace.length(1, 9, 0, 9) == 0, "it was that request's"


def test_a_long_prompt_gives_no_longer_head_start() -> None:
    pace, _ = measured()
    pace.prefilled(100_000, 100_000 * 0.1 * TOKEN)
    assert pace.length(1, 100, 0, 100) < 50
    pace.asked(4.1 * TOKEN, 0)
    pace.settled(0)
    assert pace.length(1, 9, 0, 9) == 0


def test_guesses_are_worth_less_right_after_a_wrong_one() -> None:
    pace, _ = measured()
    for right in (False, True, True, True) * 6:
        pace.chance.saw(right)
    assert pace.chance.next == pace.chance.then > 0.6
    pace.chance.saw(False)
    assert pace.chance.next > pace.chance.then
    for _ in range(24):
        pace.chance.saw(False)
    assert pace.chance.next < 0.2 < pace.chance.then


def test_what_a_busy_machine_measured_is_forgotten() -> None:
    pace, _ = measured()
    for size in range(2, 11):
        pace.decoded(size, 100 * TOKEN)
    assert pace.length(10_000, 9, 0, 9) == 0
    for _ in range(500):
        pace.length(10_000, 9, 0, 9)
    assert pace.length(10_000, 9, 0, 9) == 9


def test_planes_are_bought_once_snapshots_have_cost_as_much() -> None:
    pace, _ = measured()
    pace.length(1000, 8, 0, 0)
    assert not pace.planes_pay()
    for _ in range(100):
        pace.saved(0.2 * TOKEN)
    assert pace.planes_pay()
    pace.bought(TOKEN, True)
    assert not pace.planes_pay(), "paid for, and the account starts anew"
    for _ in range(30):
        pace.saved(0.05 * TOKEN)
    assert not pace.planes_pay(), "the price was measured: two tokens' time"
    for _ in range(20):
        pace.saved(0.05 * TOKEN)
    assert pace.planes_pay()


def test_planes_are_not_bought_for_what_snapshots_cost_before_a_checkpoint() -> None:
    pace, _ = measured()
    pace.length(10_000, 8, 0, 0)
    for end in (pace.checkpointed, pace.begin):
        for _ in range(100):
            pace.saved(0.2 * TOKEN)
        end()
        pace.length(10_000, 8, 0, 0)
        assert not pace.planes_pay()


def test_planes_are_not_bought_on_credit() -> None:
    pace, _ = measured()
    for _ in range(100):
        pace.saved(0.2 * TOKEN)
    pace.length(20, 8, 0, 0)  # a share of twenty tokens' time is less than one
    assert not pace.planes_pay()


def test_planes_that_could_not_be_made_are_not_asked_for_again_in_this_request() -> None:
    pace, _ = measured()
    for attempt in (False, False):
        pace.begin()
        pace.length(10_000, 8, 0, 0)
        for _ in range(100):
            pace.saved(0.2 * TOKEN)
        assert pace.planes_pay()
        pace.bought(0.0, attempt)
        for _ in range(100):
            pace.saved(0.2 * TOKEN)
        assert not pace.planes_pay()


def test_a_draft_model_may_read_the_prompt_on_the_prompts_account() -> None:
    pace, _ = measured()
    pace.asked(0.001 * TOKEN, 0)
    soon = 60
    assert pace.length(soon, 4, 0, 4, behind=0) > 0
    assert pace.length(soon, 4, 0, 4, behind=400) == 0, "as dear as a prompt token, until it was measured"
    pace.prefilled(10_000, 400 * TOKEN / 10 / 0.04)
    assert pace.length(soon, 4, 0, 4, behind=400) > 0
    pace.asked(400 * TOKEN / 10, 4, behind=400)
    assert pace.length(soon, 4, 0, 4, behind=400) == 0, "granted once"


def test_a_curve_is_straight_between_what_was_measured() -> None:
    curve = Curve()
    assert [curve.at(n, 1.0, 0.1) for n in (1, 2, 5)] == pytest.approx([1.0, 2.0, 2.3])
    for seconds in (1.9, 2.0, 9.0):
        curve.add(3, seconds)
    assert [curve.at(n, 1.0, 0.1) for n in (1, 2, 3, 5)] == pytest.approx([1.0, 1.5, 2.0, 2.2])
    curve.add(7, 6.0)
    assert curve.at(5, 1.0, 0.1) == pytest.approx(4.0)
