"""What goes first: worth as it is learned, the guards around it, and policies side by side on traces."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from llamahybrid.prompt_cache import Checkpoint, Costs, PromptCache, eviction
from llamahybrid.prompt_cache.base import Segment
from llamahybrid.prompt_cache.envelope import HEADER_BYTES
from llamahybrid.prompt_cache.eviction import (
    LIKELY_WORTH,
    LivePath,
    Spare,
    Tail,
    Thinning,
    ValueEviction,
    bytes_to_stay,
    spare_segments,
)
from llamahybrid.prompt_cache.nodes import Entry
from llamahybrid.prompt_cache.ram import Account
from llamahybrid.prompt_cache.ram_store import RamStore
from llamahybrid.prompt_cache.tree import Tree
from llamahybrid.prompt_cache.value import ReuseValue
from tests.lab import offline
from tests.lab.contest import Cell, SmallTree
from tests.lab.fake_engine import FakeAttention, FakeEngine
from tests.lab.integrity import check_integrity
from tests.lab.policies import Lru
from tests.lab.replay import LARGE, RECURRENT, SCALE, SMALL, Player, Sizes
from tests.lab.traces import FAMILIES, Ask

from .asking import SLOW
from .test_budget import SIZE, fill, kept, view
from .test_value import STATE, ids, put


def test_a_poor_checkpoint_of_the_live_path_goes_before_another_chats_only_one() -> None:
    cache = PromptCache(3 * SIZE + 4 * 250)
    other, live = [1] * 100, list(range(1000, 1100))
    fill(cache, other, 100)
    fill(cache, live, 96, 98, 100)
    assert kept(cache, other, 100) == [100]
    assert len(kept(cache, live, 96, 98, 100)) == 2


def test_what_a_returning_chat_left_behind_goes_first() -> None:
    cache = PromptCache(4 * SIZE + 4 * 400)
    fill(cache, [5] * 50, 50)
    fill(cache, [1] * 100, 40, 100)
    assert kept(cache, [1] * 40, 40) == [40]
    fill(cache, [2] * 60, 60)
    fill(cache, [3] * 60, 60)
    assert kept(cache, [1] * 100, 40, 100) == [40]


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


# -- what stays ------------------------------------------------------------------------------------

ATTENTION = FakeAttention(8)


def attend(tree: Tree, path: list[int], start: int, end: int) -> None:
    assert tree.store(tree.match("m", ids(*path)), ATTENTION.of(path[:start], path[start:end]))


def test_attention_before_what_the_user_pinned_is_not_spare() -> None:
    tree, path = Tree(), list(range(1, 101))
    live = [put(tree, path, n) for n in (40, 100)]
    attend(tree, path, 0, 40), attend(tree, path, 40, 100)
    live[0].user_pinned = True
    spare = spare_segments(tree, live)
    assert spare is not None
    assert spare.keep == 0
    tree.shorten(spare.node)
    assert [(s.start, s.end) for s in spare.node.segments] == [(0, 40)]
    assert spare_segments(tree, live) is None
    live[0].user_pinned = False
    assert spare_segments(tree, live) == Spare(spare.node)


def test_attention_that_goes_on_behind_what_the_user_pinned_is_spare_from_there() -> None:
    tree, path = Tree(), list(range(1, 101))
    live = [put(tree, path, n) for n in (40, 100)]
    attend(tree, path, 0, 100)
    live[0].user_pinned = True
    assert spare_segments(tree, live) is None, "nobody knows how it is cut"
    tree.splitters["m"] = ATTENTION.split
    spare = spare_segments(tree, live)
    assert spare is not None
    assert spare.keep == 40


def test_a_pinned_beginning_serves_whatever_became_of_its_own_chat() -> None:
    """The attention of a live path goes first where it is the only one; not what was promised to stay."""
    cache = PromptCache(20_000)
    system, chat = list(range(100, 400)), FakeEngine(cache, "hybrid", costs=SLOW)
    chat.request(system, answer=[1, 2, 3])
    assert cache.pin(system) > 0
    for turn in range(12):
        chat.request([*chat.state, *range(5000 + 100 * turn, 5090 + 100 * turn)], answer=range(7000, 7040))
        check_integrity(cache)
    new = FakeEngine(cache, "hybrid", costs=SLOW)
    assert new.prefill([*system, 9]).cached == len(system)
    assert cache.stats().bytes_ram <= cache.ram_bytes


@pytest.mark.parametrize("seed", range(40))
def test_what_was_said_to_stay_is_what_is_left(seed: int) -> None:
    """Some paths with checkpoints and attention, some of it pinned or in use; all goes that may."""
    chance, store = random.Random(seed), RamStore(Account(1 << 20), ValueEviction())
    store.tree.splitters["m"] = ATTENTION.split
    paths = [[chance.randrange(2) for _ in range(chance.randrange(1, 40))] for _ in range(5)]
    users = []
    for path in paths:
        match = store.tree.insert("m", ids(*path))
        for position in chance.sample(range(1, len(path) + 1), min(3, len(path))):
            if any(e.position == position for e in match.entries()):
                continue
            snapshot = np.zeros(100, np.uint8)
            snapshot.flags.writeable = False
            entry = store.put(match, Checkpoint("m", position, snapshot), ids(*path[:position]))
            if chance.random() < 0.15:
                users.append(Costs())
                store.pins.use(users[-1], entry)
    for path in paths:
        match = store.tree.match("m", ids(*path))
        for start, end in match.missing(max((e.position for e in match.entries()), default=0)):
            attend(store.tree, path, start, end)
    for path in chance.sample(paths, chance.randrange(3)):
        store.pin(ids(*path[: chance.randrange(1, len(path) + 1)]))
    live = store.tree.match("m", ids(*chance.choice(paths)))
    store.live = LivePath(live.entries())
    needed = None if chance.random() < 0.5 else store.tree.match("m", ids(*paths[0]))
    stays = store.staying(needed)
    store.account.limit = 0
    assert store.make_room(0, needed) == (not stays)
    check_integrity(store.tree)
    rounded = (8 + HEADER_BYTES) * len(store.kept)  # what a cut leaves is not exactly its tokens' share
    assert stays <= store.used() <= stays + rounded


def test_what_a_path_and_its_checkpoints_share_is_counted_once() -> None:
    tree = Tree()
    entries = [put(tree, [1] * 50, n) for n in (20, 50)]
    other = put(tree, [*[1] * 20, 2, 2], 22)
    match = tree.match("m", ids(*[1] * 30))
    assert bytes_to_stay(entries[:1], None, ()) == STATE + 4 * 20
    assert bytes_to_stay([*entries, other], match, ()) == 3 * STATE + 4 * 52
    assert bytes_to_stay([], match, ()) == 4 * 30


def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[Entry]:
    """Whose value is worked out from now on."""
    seen: list[Entry] = []
    of = ReuseValue.of
    monkeypatch.setattr(ReuseValue, "of", lambda self, e, now: seen.append(e) or of(self, e, now))  # type: ignore[func-returns-value]
    return seen


def test_thousands_that_go_at_once_are_looked_at_a_few_times_each(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PromptCache(1 << 24)
    for n in range(1500):
        fill(cache, [n, n], 2, size=50)
    seen = looked_at(monkeypatch)
    cache.ram_bytes = 2000
    assert cache.stats().evictions > 1400
    assert len(seen) < 4 * 1500


@pytest.mark.parametrize("seed", range(8))
def test_a_value_that_is_kept_is_the_value(seed: int) -> None:
    """What goes, is cut or joins changes others' values: no other may be left standing."""
    random_, paged = random.Random(seed), seed % 2 > 0
    cache, paths = PromptCache(20_000), list[list[int]]()
    order = cache.ram.store.eviction
    assert isinstance(order, ValueEviction)

    def attention(start: int, end: int) -> Segment:
        return Segment(start, end, np.zeros(3 * (end - start), np.uint8))

    def split(segment: Segment, _: np.ndarray, at: int) -> tuple[Segment, Segment]:
        return attention(segment.start, at), attention(at, segment.end)

    def check() -> None:
        tree = cache.ram.tree
        for entry in tree.oldest_entries():
            if entry.worth is not None and entry.worth[0] == tree.changes:
                assert entry.worth[1] == order.value.of(entry, tree.requests)

    for _ in range(60):
        known = random_.choice(paths) if paths and random_.random() < 0.7 else []
        path = known[: random_.randrange(len(known) + 1)]
        path += [random_.randrange(30) for _ in range(random_.randrange(1, 50))]
        paths.append(path)
        here = replace(view(path, paged), split=split if paged else None)
        cache.release(cache.plan(here.tokens, replace(here, tokens=here.tokens[:0]), (), Costs()))
        for position in sorted(random_.sample(range(1, len(path) + 1), min(len(path), 6))):
            cache.admit(here, position, np.zeros(random_.choice((10, 500, 2000)), np.uint8))
            check()
        for start, end in cache.missing(here):
            cache.store_segment(here, attention(start, end))
            check()
        store = cache.ram.store
        while random_.random() < 0.8 and (entry := order.victim(store.tree, None, store.live, None, True)):
            if isinstance(entry, Entry):
                store.remove(entry)
            elif isinstance(entry, Tail):
                store.tree.trim(entry.node)
            else:
                store.tree.shorten(entry.node)
            check()


def ladder_victim(live: Sequence[Entry], incoming: int | None) -> Entry | None:
    """The checkpoint of a path that is missed least, worked out anew."""
    free = [e for e in live if not e.pins]
    positions = sorted({*(e.position for e in live), incoming or live[-1].position + 1})
    before = dict(zip(positions, [0, *positions], strict=False))
    after = dict(pairwise(positions))

    def loss(entry: Entry) -> float:
        worth = LIKELY_WORTH if entry.marked else 1.0
        return worth * (after[entry.position] - before[entry.position]) / (positions[-1] - entry.position)

    middle = [e for e in free if positions[0] < e.position < positions[-1]]
    return min(middle, key=loss) if middle else next(iter(free), None)


@pytest.mark.parametrize("seed", range(20))
def test_a_path_that_is_thinned_out_again_and_again_is_as_one_looked_at_anew(seed: int) -> None:
    random_, tree, order = random.Random(seed), Tree(), ValueEviction()
    positions = sorted(random_.sample(range(1, 300), 60))
    live = LivePath(put(tree, range(300), p, marked=random_.random() < 0.2) for p in positions)
    whole = tree.match("m", ids(*range(300)))
    incoming = random_.choice((None, random_.randrange(1, 300), 300))
    while live:
        for entry in live:
            entry.pins = int(random_.random() < 0.05)
        victim = order.victim(tree, whole, live, incoming, True)
        assert victim is ladder_victim(live, incoming)
        if isinstance(victim, Entry) and random_.random() < 0.9:
            tree.detach(victim)
            live.discard(victim)
        if live and random_.random() < 0.05:
            tree.detach(gone := random_.choice(live))
            live.discard(gone)


def test_of_a_path_that_is_thinned_out_only_the_neighbours_of_what_went_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, losses = PromptCache(1 << 24), list[int]()
    fill(cache, range(400), *range(1, 401), size=50)
    loss = Thinning._loss
    monkeypatch.setattr(Thinning, "_loss", lambda self, p: losses.append(p) or loss(self, p))  # type: ignore[func-returns-value]
    cache.ram_bytes = 2000
    assert cache.stats().evictions > 350
    assert len(losses) < 10 * 400


def test_a_thinned_path_keeps_no_bytes_of_what_went() -> None:
    cache = PromptCache(1 << 24)
    fill(cache, range(20), *range(1, 21))
    bytes_ = [weakref.ref(e.checkpoint) for e in cache.ram.tree.oldest_entries()]
    cache.ram_bytes = 10 * SIZE
    assert sum(ref() is not None for ref in bytes_) == cache.stats().entries < 12
