"""From disk into RAM before a prompt is planned: what is deeper and comes cheaper, and only that."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llamahybrid.prompt_cache import Costs, LiveView, PromptCache, lateness
from llamahybrid.prompt_cache.disk import RecordStore
from llamahybrid.prompt_cache.disk_tier import DiskTier
from llamahybrid.prompt_cache.promotion import promote, recall_path
from llamahybrid.prompt_cache.records import Record
from tests.lab.fake_engine import FakeAttention

from .asking import SLOW, A, B, filled

PATH = np.array(A, np.int32)
NEW = LiveView("model", PATH[:0], 0, True, True, False, split=FakeAttention(8).split)
"""A context that was opened just now."""


@pytest.fixture
def cache(folder: Path) -> Iterator[PromptCache]:
    """A new process's, on a folder with conversations that begin with A, and with what A and B share."""
    filled(folder)
    made = PromptCache(1 << 24, folder)
    yield made
    made.close()


def disk(cache: PromptCache) -> DiskTier:
    assert cache.disk is not None
    return cache.disk


def promoted(cache: PromptCache, view: LiveView = NEW, costs: Costs = SLOW) -> list[int]:
    """Where checkpoints lie in RAM on the path of A and one token more, once it was looked for on disk."""
    asked = np.append(PATH, np.int32(9))
    promote(disk(cache), cache.ram, asked, view, costs)
    return [e.position for e in cache.ram.tree.match("model", asked).entries()]


def test_the_deepest_on_disk_comes_with_its_attention(cache: PromptCache) -> None:
    assert promoted(cache) == [len(A)]
    assert cache.ram.missing(replace(NEW, tokens=PATH)) == []
    assert cache.stats().segments > 0
    assert disk(cache).store.counts.loaded == 1


def test_what_ram_has_is_not_read_again(cache: PromptCache) -> None:
    promoted(cache)
    promoted(cache)
    assert disk(cache).store.counts.loaded == 1


def test_nothing_is_read_where_decoding_is_quicker(
    cache: PromptCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk(cache), "seconds", lambda n_bytes: len(A) * SLOW.prefill_seconds * 1.01)
    assert promoted(cache) == []
    monkeypatch.setattr(disk(cache), "seconds", lambda n_bytes: len(A) * SLOW.prefill_seconds * 0.99)
    assert promoted(cache) == [len(A)]


def test_a_disk_that_was_slow_once_is_read_again(cache: PromptCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that spins up takes seconds for its first read; most chats save less than that."""
    load, counter, passed = RecordStore.load, time.perf_counter, [0.0]

    def slowly(store: RecordStore, key: str, within: float | None = None) -> Record:
        passed[0] = 86_400.0
        return load(store, key, within)

    monkeypatch.setattr(time, "perf_counter", lambda: counter() + passed[0])
    monkeypatch.setattr(RecordStore, "load", slowly)
    assert promoted(cache) == [len(A)]
    cache.ram.clear()
    assert promoted(cache) == [], "decoding is quicker"
    monkeypatch.setattr(lateness, "FADE_SECONDS", 1e-9)
    assert promoted(cache) == [len(A)]


def test_without_a_way_to_load_attention_only_what_is_live_is_served(cache: PromptCache) -> None:
    nobody = replace(NEW, split=None)
    assert promoted(cache, nobody) == []
    left = np.append(PATH, np.int32([7, 7]))  # what was said behind A cannot be taken back
    assert promoted(cache, replace(nobody, tokens=left, cut_floor=len(left))) == [len(A)]


def test_no_restore_point_beyond_the_limit_is_read(cache: PromptCache) -> None:
    assert promoted(cache, replace(NEW, reuse_limit=len(A) - 1)) != [len(A)]


def test_what_does_not_fit_is_left_for_the_next_shallower(cache: PromptCache) -> None:
    needed = disk(cache).offer("model", PATH, 0, len(A), ((0, len(A)),))
    assert needed is not None
    cache.ram_bytes = needed.nbytes - 1
    assert len(A) not in promoted(cache)
    assert cache.stats().bytes_ram <= cache.ram_bytes


def test_a_damaged_record_is_passed_over(cache: PromptCache, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, load, asked = disk(cache), disk(cache).load, []

    def damaged_once(offer, path, split, within):  # type: ignore[no-untyped-def]
        asked.append(offer.position)
        return None if len(asked) == 1 else load(offer, path, split, within)

    monkeypatch.setattr(tier, "load", damaged_once)
    found = promoted(cache)
    assert asked[0] == len(A)
    assert all(position < len(A) for position in [*asked[1:], *found])
    assert cache.ram.store.account.reserved_bytes() == 0, "room for what was not read is room again"


def test_what_the_disk_knows_of_a_path_is_known_without_its_bytes(cache: PromptCache) -> None:
    shared = PATH[:150]
    recall_path(disk(cache), cache.ram, shared, NEW, SLOW)
    match = cache.ram.tree.match("model", shared)
    assert (match.length, match.branches()) == (150, True), "A and B part there"
    assert {token for token in match.path[-1].children} == {A[150], B[150]}
    assert (cache.stats().entries, disk(cache).store.counts.loaded) == (0, 0)


def test_what_ram_knows_as_well_is_not_recalled(cache: PromptCache, monkeypatch: pytest.MonkeyPatch) -> None:
    recall_path(disk(cache), cache.ram, PATH[:150], NEW, SLOW)
    monkeypatch.setattr(cache.ram, "remember", lambda *_: pytest.fail("it was known"))
    recall_path(disk(cache), cache.ram, PATH[:150], NEW, SLOW)
