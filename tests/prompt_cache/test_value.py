"""Values of checkpoints, learned from requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from llamahybrid.prompt_cache import Checkpoint, eviction
from llamahybrid.prompt_cache.base import Segment
from llamahybrid.prompt_cache.eviction import Eviction, ReturnRates, freed
from llamahybrid.prompt_cache.nodes import Entry
from llamahybrid.prompt_cache.tree import Tree

from .test_budget import SIZE

STATE = SIZE


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def put(tree: Tree, path: Sequence[int], position: int, marked: bool = False) -> Entry:
    """A checkpoint of `STATE` bytes on a path."""
    match = tree.insert("m", ids(*path))
    return tree.attach(match, Checkpoint("m", position, np.zeros(STATE, np.uint8)), marked)


def ask(tree: Tree, learned: Eviction, *tokens: int) -> None:
    """A request comes along, as the cache tells of it."""
    match = tree.match("m", ids(*tokens))
    learned.learn(tree, match, match.entries())
    tree.visit(match, match.entries())
    tree.insert("m", ids(*tokens)).end_prompt(len(tokens))


def returned(rates: ReturnRates) -> float:
    """Paths that came back, as far as they count."""
    return sum(sum(silences.returns) for silences in rates.kinds.values())


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


def test_a_mark_without_a_snapshot_is_worth_the_attention_it_keeps() -> None:
    tree, learned = Tree(), Eviction()
    path = ids(*range(100))
    shallow, deep = (
        tree.attach(tree.insert("m", path), Checkpoint("m", n, np.empty(0, np.uint8))) for n in (40, 100)
    )
    assert tree.store(tree.match("m", path), Segment(0, 40, np.zeros(500, np.uint8)))
    assert learned.worth(deep, 0) == 0, "its attention is not there"
    assert learned.worth(shallow, 0) > 1, "it shares all it has"
    assert tree.store(tree.match("m", path), Segment(40, 100, np.zeros(500, np.uint8)))
    assert 0 < learned.worth(deep, 0) < learned.worth(shallow, 0)


def test_a_path_is_worth_as_much_as_long_as_its_kind_still_comes_back() -> None:
    """Twelve chats take turns: one that is silent for ten requests is due, for a hundred it is over."""
    tree, learned = Tree(), Eviction()
    for turn in range(240):
        ask(tree, learned, *[turn % 12] * (5 + turn // 12))
    fresh, due, over = (learned.rates.at(age, lives=True) for age in (0, 10, 100))
    assert due > 0.9 * fresh
    assert over < due / 5


def test_a_path_is_worth_no_more_the_longer_it_is_silent() -> None:
    rates = ReturnRates()
    for turn in range(20):
        before = [rates.at(age, lives=True) for age in range(0, 300, 7)]
        for age in (250, 250, None, 3):
            rates.learn(age, lived=turn > 0)
        after = [rates.at(age, lives=True) for age in range(0, 300, 7)]
        assert after == sorted(after, reverse=True)
        assert after != before, "what was learned is not seen"


def test_a_prompt_seen_once_is_expected_less_than_a_conversation_of_its_age() -> None:
    """Between the turns of a chat come prompts that nobody repeats."""
    tree, learned = Tree(), Eviction()
    for turn in range(60):
        ask(tree, learned, *[1] * (5 + turn))
        ask(tree, learned, 100 + turn)
    lives, once = put(tree, [2] * 10, 10), put(tree, [3] * 10, 10)
    lives.turns = 1
    assert learned.rate(lives, tree.requests) > 3 * learned.rate(once, tree.requests)


@pytest.mark.parametrize("short", [True, False])
def test_visitors_who_share_a_prompt_are_no_chat_that_came_back(short: bool) -> None:
    """Their own part may be as short as what asks for an answer."""
    tree, learned = Tree(), Eviction()
    for turn in range(50):
        ask(tree, learned, 1, 2, 3, *[100 + turn] * (5 if short else 50))
    assert returned(learned.rates) <= 1 + short


def test_places_where_requests_end_up_are_told_from_those_they_pass() -> None:
    tree, learned = Tree(), Eviction()
    for chat in range(30):
        start, inside = (put(tree, [chat] * 20, at, marked=at == 10) for at in (10, 20))
        ask(tree, learned, *[chat] * 10, 500)
        assert (start.hits, inside.abandoned) == (1, True)
    fresh, passed = put(tree, [99] * 20, 10, marked=True), put(tree, [99] * 20, 20)
    assert learned.chance(fresh) > 0.9
    assert learned.chance(passed) < 0.15


def test_a_place_known_well_goes_by_its_own_history() -> None:
    """Two of one kind: twenty requests end up at one, and two pass it; with the other it is the opposite."""
    tree, learned = Tree(), Eviction()
    often, seldom = put(tree, [1] * 10, 10), put(tree, [2] * 10, 10)
    put(tree, [1] * 20, 20), put(tree, [2] * 20, 20)
    for turn in range(22):
        ends, passes = (1, 2) if turn < 20 else (2, 1)
        ask(tree, learned, *[ends] * 10, 100 + turn)
        ask(tree, learned, *[passes] * 20, 100 + turn)
    assert eviction.kind(often) == eviction.kind(seldom)
    assert learned.chance(often) > 0.7
    assert learned.chance(seldom) < 0.3


def test_old_counts_fade(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "FADE_AFTER", 50)
    tree, learned = Tree(), Eviction()
    for turn in range(49):
        ask(tree, learned, turn, 0)
        ask(tree, learned, turn, 0, 0)
    entry = put(tree, [200] * 10, 10)
    for _ in range(49):
        ask(tree, learned, *[200] * 10)
    assert learned.rates.requests <= 51
    assert returned(learned.rates) <= 51
    assert sum(all_ for _, all_ in learned.places.values()) < 60
    assert entry.hits == 49
