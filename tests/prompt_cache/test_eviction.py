"""The order of eviction: learned worth, the guards around it, and policies side by side on traces."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import pytest

from llamahybrid.harness.oracle import least_decodes
from llamahybrid.harness.workloads.multi_user import CROWDS
from llamahybrid.harness.workloads.tokens import TOKEN_WORKLOADS, Workload
from llamahybrid.prompt_cache import CacheStats, PromptCache
from llamahybrid.prompt_cache.base import Segment
from llamahybrid.prompt_cache.eviction import Eviction, Victim, bare_leaf
from llamahybrid.prompt_cache.nodes import ENTRY_BYTES, Entry, Match, Node, tokens_of
from llamahybrid.prompt_cache.tree import Tree
from tests.lab.fake_engine import FakeEngine
from tests.lab.integrity import check_integrity
from tests.lab.pretend import QWEN36_27B, Ours, PretendSpeech, interleaved

from .asking import SLOW
from .test_budget import ROOM, SIZE, fill, kept, path_bytes, view
from .test_value import ids, put

CHATS = [
    workload
    for workload in TOKEN_WORKLOADS
    if workload.name in ("exact append", "thinking stripped", "edit a middle message", "agent loop")
]


def test_a_poor_checkpoint_of_the_live_path_goes_before_another_chats_only_one() -> None:
    cache = PromptCache(3 * SIZE + ROOM)
    other, live = [1] * 100, list(range(1000, 1100))
    fill(cache, other, 100)
    fill(cache, live, 96, 98, 100)
    assert kept(cache, other, 100) == [100]
    assert len(kept(cache, live, 96, 98, 100)) == 2


def test_an_abandoned_branch_of_a_returning_chat_goes_first() -> None:
    cache = PromptCache(4 * SIZE + ROOM)
    fill(cache, [5] * 50, 50)
    fill(cache, [1] * 100, 40, 100)
    assert kept(cache, [1] * 40, 40) == [40]
    fill(cache, [2] * 60, 60)
    fill(cache, [3] * 60, 60)
    assert kept(cache, [1] * 100, 40, 100) == [40]


def test_tokens_of_paths_stay_while_they_are_few() -> None:
    tree, order = Tree(), Eviction()
    tree.insert("m", ids(*[7] * 50))
    entry = put(tree, [1] * 50, 50)
    tree.insert("m", ids(*[8] * 10))
    assert order.victim(tree, None, ()) is entry
    tree.insert("m", ids(*[9] * 2000))
    victim = order.victim(tree, None, ())
    assert isinstance(victim, Node)
    assert tokens_of(victim.edge)[0] == 7


def test_all_checkpoints_are_looked_at_before_none_may_go() -> None:
    tree, order = Tree(), Eviction()
    long = [*range(1000)]
    keep = [put(tree, long, position) for position in range(5, 885, 5)]
    others = [put(tree, [2000 + number] * 20, 20) for number in range(16)]
    victim = order.victim(tree, None, (), keep)
    assert victim in (*keep, *others), "one may go, so the tree was seen whole"


def test_a_segment_is_not_stored_once_the_checkpoint_behind_it_had_to_go() -> None:
    def attention(start: int, end: int) -> Segment:
        return Segment(start, end, np.zeros(900, np.uint8))

    cache = PromptCache(2 * (SIZE + ENTRY_BYTES) + path_bytes(105, 2) + 580)
    paged = view(range(100), needs_attention=True)
    fill(cache, [7] * 100, 100)
    fill(cache, range(100), 5)
    cache.store_segment(paged, attention(0, 5))
    check_integrity(cache)
    assert cache.stats().segments == 0
    assert kept(cache, [7] * 100, 100) == [100]


class Lru(Eviction):
    """The checkpoint that no request was restored from for longest, wherever it lies."""

    def learn(self, tree: Tree, match: Match, entries: Sequence[Entry]) -> None:
        """Nothing is learned; the tree keeps the order of use."""

    def victim(
        self, tree: Tree, path: Match | None, held: Collection[Entry], keep: Collection[Entry] = ()
    ) -> Victim | None:
        free = (e for e in tree.entries() if e not in held and e not in keep)
        entry = next(free, None)
        return bare_leaf(tree, path, entry) or entry


def played(workloads: Sequence[Workload], order: Eviction) -> tuple[float, CacheStats]:
    """Workloads side by side in two GiB, too little for them: tokens decoded over the least, and counts."""
    speech, ours = PretendSpeech(), Ours(QWEN36_27B, 2 << 30, eviction=order)
    records = []
    for record in interleaved([workload.start for workload in workloads], speech, ours):
        records.append(record)
        check_integrity(ours.engine.cache)
        assert ours.engine.cache.stats().bytes_ram <= ours.engine.cache.ram_bytes
    return sum(r.decoded for r in records) / sum(least_decodes(records)), ours.engine.cache.stats()


@pytest.mark.parametrize(("workloads", "most"), [(CHATS, 1.25), (CROWDS, 1.75)], ids=["chats", "crowds"])
def test_eviction_by_worth_decodes_half_of_what_least_recent_use_does(
    workloads: Sequence[Workload], most: float
) -> None:
    worth, stats = played(workloads, Eviction())
    assert worth <= most
    assert worth < 0.5 * played(workloads, Lru())[0]
    assert played(workloads, Eviction()) == (worth, stats), "the same each time"


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
