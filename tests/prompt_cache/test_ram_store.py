"""What lies in RAM and what it takes: whose bytes count, what goes for what, and what is used again."""

from __future__ import annotations

import numpy as np
import pytest

from llamahybrid.prompt_cache import Checkpoint, Costs
from llamahybrid.prompt_cache.base import Segment, Tokens
from llamahybrid.prompt_cache.eviction import ValueEviction
from llamahybrid.prompt_cache.nodes import Entry
from llamahybrid.prompt_cache.ram import Account
from llamahybrid.prompt_cache.ram_store import MOST_NAMES, RamStore, row
from llamahybrid.prompt_cache.tree import Tree
from tests.lab.integrity import check_integrity

SIZE = 1000


def path(length: int, branch: int = 0, at: int = 0) -> Tokens:
    """Tokens 1, 2, 3, ...; of another `branch` from `at` on."""
    tokens = np.arange(1, length + 1, dtype=np.int32)
    tokens[at:] += 1000 * branch
    return tokens


@pytest.fixture
def store() -> RamStore:
    return RamStore(Account(1 << 20), ValueEviction())


def put(store: RamStore, tokens: Tokens, namespace: str = "m") -> Entry:
    checkpoint = Checkpoint(namespace, len(tokens), np.zeros(SIZE, np.uint8))
    return store.put(store.tree.insert(namespace, tokens), checkpoint, tokens)


def segment(store: RamStore, tokens: Tokens, start: int, end: int) -> None:
    assert store.tree.store(store.tree.match("m", tokens), Segment(start, end, np.zeros(SIZE, np.uint8)))


def test_all_that_lies_there_counts_once(store: RamStore) -> None:
    put(store, path(10)), put(store, path(20))
    segment(store, path(20), 0, 20)
    assert store.used() == 3 * SIZE + 4 * 20
    store.account.keep(np.zeros(50, np.uint8))
    handed_out = store.account.reserve(np.zeros(70, np.uint8))
    assert store.used() == 3 * SIZE + 4 * 20 + 50 + 70
    del handed_out
    assert store.used() == 3 * SIZE + 4 * 20 + 50


def test_the_buffer_of_what_goes_is_used_again(store: RamStore) -> None:
    entry = put(store, path(10))
    snapshot = entry.checkpoint.snapshot
    store.remove(entry)
    assert store.account.reuse(SIZE) is snapshot


def test_what_is_in_use_counts_until_its_last_user_is_gone(store: RamStore) -> None:
    entry, users = put(store, path(10)), [Costs(), Costs(1.0)]
    for user in users:
        store.pins.use(user, entry)
    before = store.used()
    store.remove(entry)
    assert (store.used(), store.staying(), entry.node) == (before, SIZE, None)
    store.release(users[0])
    assert store.account.reuse(SIZE) is None
    store.release(users[1])
    assert (store.doomed, store.staying()) == (set(), 0)
    assert store.account.reuse(SIZE) is entry.checkpoint.snapshot


def test_a_user_that_was_collected_has_released_what_it_used(store: RamStore) -> None:
    class Reader:
        pass

    entry, reader = put(store, path(10)), Reader()
    store.pins.use(reader, entry)
    store.remove(entry)
    del reader
    store.release_collected()
    assert store.account.reuse(SIZE) is entry.checkpoint.snapshot


def test_segments_go_with_the_checkpoint_unless_it_is_replaced(store: RamStore) -> None:
    entry = put(store, path(10))
    segment(store, path(10), 0, 10)
    store.remove(entry, replaced=True)
    assert store.tree.segment_bytes == SIZE
    store.remove(put(store, path(10)))
    assert store.tree.segment_bytes == 0


def test_the_one_above_takes_what_came_to_the_one_that_goes(store: RamStore) -> None:
    above, deeper = put(store, path(10)), put(store, path(20))
    store.remove(deeper)
    assert above.deeper_gone


def test_idle_buffers_go_before_anything_that_is_kept(store: RamStore) -> None:
    put(store, path(10))
    store.account.keep(np.zeros(500, np.uint8))
    store.account.limit = store.used() - 500
    assert store.make_room(0)
    assert (len(store.tree), store.account.idle_bytes, store.counts.evictions) == (1, 0, 0)


def test_an_idle_buffer_of_the_size_is_room_enough(store: RamStore) -> None:
    put(store, path(10))
    store.account.keep(np.zeros(500, np.uint8))
    store.account.limit = store.used()
    assert store.make_room(500, reuse=500)
    assert store.account.has_idle(500)
    assert store.counts.evictions == 0


def test_nothing_goes_for_what_pins_leave_no_room_for(store: RamStore) -> None:
    user = Costs()
    store.pins.use(user, put(store, path(10)))
    put(store, path(10, 1))
    store.account.limit = SIZE + 4 * 10 + 500
    assert [store.cannot_hold(n) for n in (500, 501)] == [False, True]
    assert not store.make_room(501)
    assert len(store.tree) == 2
    assert store.make_room(500)
    assert len(store.tree) == 1


def test_cuts_of_one_prompt_fill_half_the_budget(store: RamStore) -> None:
    store.account.limit = 10 * SIZE
    assert store.most_cuts(Costs(snapshot_bytes=SIZE)) == 5
    assert store.most_cuts(Costs(snapshot_bytes=100 * SIZE)) == 1


def test_a_pinned_prefix_covers_what_comes_later_on_it(store: RamStore) -> None:
    early = put(store, path(10))
    assert store.pin(path(20)) == 1
    late, beyond, beside = put(store, path(20)), put(store, path(30)), put(store, path(20, 1, at=15))
    assert [e.user_pinned for e in (early, late, beyond, beside)] == [True, True, False, False]
    store.pin(path(10))
    store.unpin(path(20))
    assert [e.user_pinned for e in (early, late)] == [True, False]


def test_nothing_goes_for_what_the_users_pins_leave_no_room_for(store: RamStore) -> None:
    put(store, path(10))
    segment(store, path(10), 0, 10)
    store.pin(path(10))
    put(store, path(10, 1))
    held = 2 * SIZE + 4 * 10 + 4 * 10
    assert store.staying() == held, "what is pinned, its attention, its tokens, and the pin's own"
    store.account.limit = store.used() + 100
    assert not store.make_room(store.account.limit - held + 1)
    assert len(store.tree) == 2
    assert store.make_room(store.account.limit - held)
    assert (len(store.tree), store.tree.segment_bytes) == (1, SIZE)


def test_what_was_handed_out_stays_too(store: RamStore) -> None:
    put(store, path(10))
    taken = store.account.reserve(np.zeros(SIZE, np.uint8))
    store.account.limit = 2 * SIZE + 4 * 10
    assert store.cannot_hold(SIZE + 4 * 10 + 1)
    assert not store.cannot_hold(SIZE + 4 * 10)
    del taken
    assert not store.cannot_hold(SIZE + 4 * 10 + 1)


@pytest.mark.parametrize("pinned", [path(10), path(3)], ids=["pinned", "not pinned"])
def test_a_checkpoint_stays_until_there_is_room_for_the_one_in_its_place(
    store: RamStore, pinned: Tokens
) -> None:
    whole = path(10)
    entry = put(store, whole)
    segment(store, whole, 0, 10)
    store.pin(pinned)
    match = store.tree.match("m", whole)
    store.live, store.account.limit = match.entries(), store.used()
    assert store.room_for(SIZE, match, 10, entry)
    assert store.tree.segment_bytes == SIZE
    more = SIZE if entry.user_pinned else 2 * SIZE  # as attention of a live path may go that nobody pinned
    assert not store.room_for(more + 1, match, 10, entry)
    assert entry.node is not None
    assert (entry.pins, store.tree.segment_bytes, store.counts.evictions) == (0, SIZE, 0)
    user = Costs()
    store.pins.use(user, entry)
    assert not store.room_for(more, match, 10, entry), "its bytes stay with who uses them"
    assert entry.pins == 1


def test_a_prefix_pinned_again_is_kept_once_and_counts(store: RamStore) -> None:
    put(store, path(10))
    before = store.used()
    assert [store.pin(path(20)) for _ in range(3)] == [1, 1, 1]
    assert store.used() == before + 4 * 20
    store.unpin(path(20))
    assert (store.used(), store.kept) == (before, set())


def test_what_a_pin_takes_is_made_room_for(store: RamStore) -> None:
    put(store, path(10))
    store.account.limit = store.used()
    store.pin(path(20, 1))
    assert store.used() <= store.account.limit


def test_forgetting_a_part_of_what_is_pinned_lets_what_others_share_go(store: RamStore) -> None:
    shared, other = put(store, path(10)), put(store, path(20, 1, at=10))
    put(store, path(20))
    store.pin(path(20))
    store.pin(path(20, 1, at=10)[:15])
    store.forget(path(15))
    assert (shared.user_pinned, other.user_pinned) == (True, False), "another pin covers it"
    store.unpin(path(20, 1, at=10)[:15])
    put(store, path(30, 2, at=10))
    store.pin(path(30, 2, at=10))
    store.forget(path(12, 2, at=10))
    assert (shared.user_pinned, shared.node is not None, store.kept) == (False, True, set())
    store.account.limit = 0
    store.make_room(0)
    assert store.used() == 0


def test_no_tokens_are_no_path_to_forget(store: RamStore) -> None:
    put(store, path(10))
    store.pin(path(10))
    store.account.keep(np.zeros(50, np.uint8))
    assert store.forget(path(0)) == 0
    assert (len(store.pinned), len(store.tree), store.account.idle_bytes) == (1, 1, 50)


def test_what_is_forgotten_goes_and_what_others_share_stays(store: RamStore) -> None:
    shared, mine, other = put(store, path(10)), put(store, path(30)), put(store, path(30, 1, at=10))
    freed = store.forget(path(20))
    assert [e.node is not None for e in (shared, mine, other)] == [True, False, True]
    assert freed == SIZE + 4 * 20
    assert store.account.idle_bytes == 0


def test_all_that_goes_on_from_a_forgotten_path_is_looked_for_once(
    store: RamStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(1, 30):
        put(store, path(10 + n, n, at=10))
        put(store, path(50 + n, n, at=20))
    put(store, path(30, 1, at=5))
    matched, match = [], Tree.match
    monkeypatch.setattr(Tree, "match", lambda *args: matched.append(args) or match(*args))  # type: ignore[func-returns-value]
    store.forget(path(8))
    assert len(matched) < 4
    assert [e.position for e in store.tree.oldest_entries()] == [30]
    check_integrity(store.tree)


def test_forgetting_leaves_the_beginning_that_is_pinned(store: RamStore) -> None:
    put(store, path(10)), put(store, path(30))
    store.pin(path(10))
    store.pin(path(25))
    store.forget(path(20))
    assert [len(p) for p in store.pinned] == [10]
    assert [e.position for e in store.tree.match("m", path(30)).entries()] == [10]


def test_what_is_in_use_while_it_is_forgotten_is_not_used_again(store: RamStore) -> None:
    user, entry = Costs(), put(store, path(10))
    store.pins.use(user, entry)
    store.forget(path(10))
    store.release(user)
    assert store.account.reuse(SIZE) is None


def test_a_new_one_has_what_the_user_said_and_what_is_in_use(store: RamStore) -> None:
    user = Costs()
    store.pin(path(10))
    entry = put(store, path(10))
    store.pins.use(user, entry)
    store.account.keep(np.zeros(50, np.uint8))
    store.tree.requests, store.counts.evictions = 7, 3
    new = store.renewed()
    assert (len(new.tree), new.tree.requests, new.counts.evictions) == (0, 7, 3)
    assert [p.tolist() for p in new.pinned] == [path(10).tolist()]
    assert new.used() == SIZE + 4 * 10, "the plan's bytes count until it is gone"


def test_clear_takes_all_but_what_is_in_use(store: RamStore) -> None:
    user = Costs()
    used, other = put(store, path(10)), put(store, path(10, 1))
    store.pins.use(user, used)
    store.pin(path(10))
    store.clear()
    assert (store.used(), store.pinned, other.node) == (SIZE, [], None)


def test_little_is_kept_of_names_that_have_no_path_any_more(store: RamStore) -> None:
    put(store, path(10), "kept")
    names = ["kept", *(f"gone {n}" for n in range(MOST_NAMES))]
    store.tails = dict.fromkeys(names, 3)
    store.let_names_go("gone 5")
    assert sorted(store.tails) == ["gone 5", "kept"]
    store.let_names_go("other")
    assert len(store.tails) == 2, "while they are few they may stay"


def test_logits_are_copied() -> None:
    logits = np.ones(3, np.float32)
    kept = row(logits)
    logits[0] = 9
    assert kept is not None
    assert kept.tolist() == [1, 1, 1]
    assert row(None) is None
