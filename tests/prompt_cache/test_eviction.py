"""What goes first: worth as it is learned, the guards around it, and policies side by side on traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from llamahybrid.prompt_cache import Checkpoint, PromptCache, eviction, value
from llamahybrid.prompt_cache.base import Segment
from llamahybrid.prompt_cache.eviction import Tail, ValueEviction
from llamahybrid.prompt_cache.nodes import Entry
from llamahybrid.prompt_cache.tree import Tree
from llamahybrid.prompt_cache.value import ReuseValue, freed
from tests.lab import offline
from tests.lab.contest import Cell, SmallTree
from tests.lab.integrity import check_integrity
from tests.lab.policies import Lru
from tests.lab.replay import LARGE, RECURRENT, SCALE, SMALL, Player, Sizes
from tests.lab.traces import FAMILIES, Ask

from .test_budget import NO_COSTS, SIZE, fill, kept, view

STATE = 100 * SIZE


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def put(tree: Tree, path: Sequence[int], position: int, marked: bool = False) -> Entry:
    """A checkpoint of `STATE` bytes on a path."""
    match = tree.insert("m", ids(*path))
    return tree.attach(match, Checkpoint("m", position, np.zeros(STATE, np.uint8)), marked)


def ask(tree: Tree, learned: ReuseValue, *tokens: int) -> None:
    """A request comes along, as the cache tells of it."""
    match = tree.match("m", ids(*tokens))
    learned.learn(tree, match, match.entries())
    tree.visit(match, match.entries())
    tree.insert("m", ids(*tokens))


def test_a_poor_checkpoint_of_the_live_path_goes_before_another_chats_only_one() -> None:
    cache = PromptCache(3 * SIZE + 4 * 250)
    other, live = [1] * 100, list(range(1000, 1100))
    fill(cache, other, 100)
    fill(cache, live, 96, 98, 100)
    assert kept(cache, other, 100) == [100]
    assert len(kept(cache, live, 96, 98, 100)) == 2


def test_what_saves_more_tokens_over_the_one_above_is_worth_more() -> None:
    tree, learned = Tree(), ReuseValue()
    path = range(100)
    near, far = put(tree, path, 10), put(tree, path, 90)
    assert learned.of(far, 0) > learned.of(near, 0)
    put(tree, path, 88)
    assert learned.of(far, 0) < learned.of(near, 0)


def test_bytes_are_those_that_go_with_it() -> None:
    tree = Tree()
    shared, one, two = (put(tree, [1, 2, 3, *tail], n) for tail, n in (((), 3), ((4, 5), 5), ((6, 7), 5)))
    for path, start, end in (((1, 2, 3), 0, 3), ((1, 2, 3, 4, 5), 3, 5), ((1, 2, 3, 6, 7), 3, 5)):
        assert tree.store(tree.match("m", ids(*path)), Segment(start, end, np.zeros(end * 10, np.uint8)))
    assert (freed(shared), freed(one), freed(two)) == (STATE, STATE + 50, STATE + 50)
    tree.detach(shared)
    assert freed(one) == STATE + 50  # both of them need what lies above
    tree.detach(two)
    assert freed(one) == STATE + 80
    put(tree, [1, 2, 3], 3)
    assert freed(one) == STATE + 50


def test_bytes_on_one_edge_are_those_behind_the_checkpoint_above() -> None:
    tree = Tree()
    first, second = put(tree, [1, 2, 3, 4], 2), put(tree, [1, 2, 3, 4], 4)
    for start in (0, 2):
        assert tree.store(tree.match("m", ids(1, 2, 3, 4)), Segment(start, start + 2, np.zeros(7, np.uint8)))
    assert (freed(first), freed(second)) == (STATE, STATE + 7)
    tree.detach(first)
    assert freed(second) == STATE + 14


def test_a_path_is_worth_as_much_as_long_as_its_kind_still_comes_back() -> None:
    """Twelve chats take turns: one that is silent for ten requests is due, for a hundred it is over."""
    tree, learned = Tree(), ReuseValue()
    for turn in range(240):
        ask(tree, learned, *[turn % 12] * (5 + turn // 12))
    fresh, due, over = (learned.rates.at(age) for age in (0, 10, 100))
    assert due > 0.9 * fresh
    assert over < due / 5


def test_a_visitor_who_shares_a_prompt_is_no_chat_that_came_back() -> None:
    tree, learned = Tree(), ReuseValue()
    for turn in range(50):
        ask(tree, learned, 1, 2, 3, 100 + turn)
    assert sum(learned.rates.returns) <= 1


def test_places_where_requests_end_up_are_told_from_those_they_pass() -> None:
    tree, learned = Tree(), ReuseValue()
    for chat in range(30):
        start, inside = (put(tree, [chat] * 20, at, marked=at == 10) for at in (10, 20))
        ask(tree, learned, *[chat] * 10, 500)
        assert (start.hits, inside.abandoned) == (1, True)
    fresh, passed = put(tree, [99] * 20, 10, marked=True), put(tree, [99] * 20, 20)
    assert learned.chance(fresh) > 0.9
    assert learned.chance(passed) < 0.15


def test_what_a_returning_chat_left_behind_goes_first() -> None:
    cache = PromptCache(4 * SIZE + 4 * 400)
    fill(cache, [5] * 50, 50)
    fill(cache, [1] * 100, 40, 100)
    assert kept(cache, [1] * 40, 40) == [40]
    fill(cache, [2] * 60, 60)
    fill(cache, [3] * 60, 60)
    assert kept(cache, [1] * 100, 40, 100) == [40]


def test_a_place_known_well_goes_by_its_own_history() -> None:
    """Two of one kind: twenty requests end up at one, and two pass it; with the other it is the opposite."""
    tree, learned = Tree(), ReuseValue()
    often, seldom = put(tree, [1] * 10, 10), put(tree, [2] * 10, 10)
    put(tree, [1] * 20, 20), put(tree, [2] * 20, 20)
    for turn in range(22):
        ends, passes = (1, 2) if turn < 20 else (2, 1)
        ask(tree, learned, *[ends] * 10, 100 + turn)
        ask(tree, learned, *[passes] * 20, 100 + turn)
    assert value.kind(often) == value.kind(seldom)
    assert learned.chance(often) > 0.7
    assert learned.chance(seldom) < 0.3


def test_what_a_deeper_checkpoint_served_comes_to_the_one_above() -> None:
    cache = PromptCache(1 << 20)
    fill(cache, range(100), 50, 80)
    entry = next(e for e in cache.ram.tree.oldest_entries() if e.position == 50)
    before = cache.ram.store.eviction.value.of(entry, 0)  # type: ignore[attr-defined]
    deeper = next(iter(entry.below))
    cache.drop(deeper.checkpoint)
    assert cache.ram.store.eviction.value.of(entry, 0) > before  # type: ignore[attr-defined]
    assert entry.deeper_gone
    assert value.first_guess(value.kind(entry)) > value.first_guess((False, False, 0, 0, False, False, False))
    cache.plan(ids(*range(60)), view([]), (), NO_COSTS)
    assert not entry.deeper_gone


def test_a_cache_tells_its_eviction_of_every_request() -> None:
    order = ValueEviction()
    cache = PromptCache(1 << 20, eviction=order)
    fill(cache, range(50), 20)
    assert kept(cache, range(50), 20) == [20]
    assert order.value.rates.requests == cache.ram.tree.requests == 1
    assert list(order.value.places.values()) == [(1.0, 1.0)]


def test_a_checkpoint_taken_again_keeps_its_history() -> None:
    cache = PromptCache(1 << 20)
    fill(cache, range(50), 20, 50)
    assert kept(cache, range(50), 50) == [50]
    fill(cache, range(50), 50)
    above, entry = sorted(cache.ram.tree.oldest_entries(), key=lambda e: e.position)
    assert (entry.hits, above.deeper_gone) == (1, False)


def test_what_was_counted_long_ago_fades(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value, "FADE_AFTER", 50)
    tree, learned = Tree(), ReuseValue()
    for turn in range(49):
        ask(tree, learned, turn, 0)
        ask(tree, learned, turn, 0, 0)
    entry = put(tree, [200] * 10, 10)
    for _ in range(49):
        ask(tree, learned, *[200] * 10)
    assert learned.rates.requests <= 51
    assert sum(learned.rates.returns) <= 51
    assert sum(all_ for _, all_ in learned.places.values()) < 60
    assert entry.hits == 49


def test_every_checkpoint_has_its_turn_to_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst of 200 goes within 200 / LOOKS evictions, wherever it stands in line."""
    monkeypatch.setattr(eviction, "LOOKS", 20)
    monkeypatch.setattr(eviction, "WORST", 5)
    tree, order = Tree(), ValueEviction()
    for n in range(200):
        put(tree, [n] * 50, 50)
    worst = put(tree, [9999], 1)
    gone = 0
    while worst.node is not None:
        victim = order.victim(tree, None, (), None, True)
        assert isinstance(victim, Entry)
        tree.detach(victim)
        gone += 1
    assert gone <= 15


def test_a_long_line_of_live_and_pinned_checkpoints_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "LOOKS", 20)
    monkeypatch.setattr(eviction, "WORST", 5)
    tree, order = Tree(), ValueEviction()
    live = [put(tree, range(59), n) for n in range(1, 60)]
    for n in range(60):
        put(tree, [500 + n], 1).pins = 1
    other = put(tree, [400] * 9000, 9000)
    victim = order.victim(tree, None, live, None, False)
    assert victim in live  # for it is worth least, and something else could go
    other.pins = 1
    assert order.victim(tree, None, live, None, False) is None


def test_a_cache_of_a_few_is_looked_at_whole() -> None:
    tree, order = Tree(), ValueEviction()
    entries = [put(tree, [n] * (10 + n), 10 + n) for n in range(30)]
    for entry in entries:
        assert order.victim(tree, None, (), None, True) is entry
        tree.detach(entry)


def test_tokens_of_paths_stay_while_they_are_few() -> None:
    tree, order = Tree(), ValueEviction()
    tree.insert("m", ids(*[7] * 50))
    entry = put(tree, [1] * 50, 50)
    tree.insert("m", ids(*[8] * 10))
    assert order.victim(tree, None, (), None, True) is entry
    tree.insert("m", ids(*[9] * 2000))
    victim = order.victim(tree, None, (), None, True)
    assert isinstance(victim, Tail)
    assert victim.node.tokens[0] == 7


def test_a_segment_is_not_stored_once_the_checkpoint_behind_it_had_to_go() -> None:
    def attention(start: int, end: int) -> Segment:
        return Segment(start, end, np.zeros(900, np.uint8))

    cache = PromptCache(2 * SIZE + 4 * 250)
    paged = view(range(100), needs_attention=True)
    fill(cache, [7] * 100, 100)
    fill(cache, range(100), 5)
    cache.store_segment(paged, attention(0, 5))
    check_integrity(cache)
    assert cache.stats().segments == 0
    assert kept(cache, [7] * 100, 100) == [100]


def test_eviction_is_deterministic() -> None:
    trace = FAMILIES[0].trace(3, 8, 40)

    def played() -> tuple[float, int, list[int]]:
        player = Player(PromptCache((2 << 30) // SCALE), LARGE)
        rate = player.play(trace)
        return (
            rate,
            player.cache.stats().evictions,
            [e.position for e in player.cache.ram.tree.oldest_entries()],
        )

    assert played() == played()


@pytest.mark.parametrize("sizes", [LARGE, SMALL, RECURRENT], ids=lambda s: s.name)
def test_traces_stay_within_the_budget_and_whole(sizes: Sizes) -> None:
    cache = PromptCache(int(0.5 * (1 << 30)) // SCALE)
    player = Player(cache, sizes)
    for request in FAMILIES[1].trace(0, 4, 25):
        player.ask(request)
        check_integrity(cache)
        assert cache.stats().bytes_ram <= cache.ram_bytes
    assert 0 < player.cached < player.total


@pytest.mark.parametrize("family", range(len(FAMILIES)), ids=lambda n: FAMILIES[n].name)
def test_token_hit_rate_beats_lru_and_marconi(family: int) -> None:
    """A short sample of benchmarks/eviction.py."""
    cell = Cell(family, LARGE, 4, requests=60)
    policies: dict[str, Callable[[], eviction.Eviction]] = {
        "worth": ValueEviction,
        "marconi": lambda: cell.marconi(4.0),
        "lru": Lru,
    }
    mean = {name: np.mean([cell.hit_rate(make(), s) for s in range(3)]) for name, make in policies.items()}
    assert mean["worth"] > mean["lru"] + 0.1
    assert mean["worth"] > mean["marconi"] - 0.01


@pytest.mark.parametrize("family", range(len(FAMILIES)), ids=lambda n: FAMILIES[n].name)
def test_tokens_reused_come_near_the_offline_optimum(family: int) -> None:
    tokens = SmallTree(family, 12).contest(range(6))
    assert all(a <= b for a, b in zip(tokens["worth"], tokens["optimum"], strict=True))
    assert sum(tokens["worth"]) >= 0.87 * sum(tokens["optimum"])


def tiny_trace(seed: int) -> list[Ask]:
    """Six requests of two conversations."""
    return FAMILIES[seed % len(FAMILIES)].trace(seed, 2, 6)


@pytest.mark.parametrize("sizes", [LARGE, RECURRENT], ids=lambda s: s.name)
@pytest.mark.parametrize("seed", range(6))
def test_the_optimum_is_what_brute_force_finds(seed: int, sizes: Sizes) -> None:
    trace = tiny_trace(seed)
    found = []
    for slots in (1.5, 2.5, 4.5):
        budget = int(slots * sizes.snapshot)
        found.append(offline.optimum(trace, sizes, budget))
        assert found[-1] == offline.brute_force(trace, sizes, budget)
    assert found == sorted(found)
    assert found[-1] > 0
