"""The index of a folder: against a list of records, and lean: in memory, in what is read and gone through."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamahybrid.errors import RecordError
from llamahybrid.prompt_cache import disk_store
from llamahybrid.prompt_cache.disk import RecordStore
from llamahybrid.prompt_cache.disk_index import DiskIndex
from llamahybrid.prompt_cache.disk_store import DiskStore
from llamahybrid.prompt_cache.nodes import ids_of
from llamahybrid.prompt_cache.records import Head, head_of
from tests.lab.integrity import check_integrity

from .asking import record_of

LETTERS = 2


def head(start: int, tokens: list[int], base: int = 0, *, logits: bool = False) -> Head:
    row = np.zeros(3, np.float32) if logits else None
    path = np.array(tokens, np.int32)
    return head_of(record_of("m", start, path, row, np.zeros(10, np.uint8), base)[0])


def starts(end: int) -> st.SearchStrategy[int]:
    """Of segments, and of the snapshot, which comes as often."""
    return st.integers(0, end - 1) | st.just(end)


def add(index: DiskIndex, one: Head, tokens: list[int]) -> None:
    base = one.base if index.knows(one) else 0
    index.add(one, ids_of(np.array(tokens, np.int32))[4 * base :], base)


def shared(a: list[int], b: list[int]) -> int:
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


class Naive:
    """The same records in a list."""

    def __init__(self) -> None:
        self.records: dict[str, tuple[Head, list[int]]] = {}

    def fitting(self, tokens: list[int]) -> list[tuple[Head, list[int]]]:
        return [(h, t) for h, t in self.records.values() if t[: h.end] == tokens[: h.end]]

    def covered(self, tokens: list[int], end: int) -> bool:
        """Attention of [0, end) of a prompt is in records, as far as those agree with the prompt."""
        have: set[int] = set()
        for h, t in self.records.values():
            if not h.is_snapshot:
                have |= set(range(h.start, shared(t, tokens)))
        return have >= set(range(end))

    def offer(self, tokens: list[int], *, attention: bool) -> int:
        ends = [
            h.end
            for h, _ in self.fitting(tokens)
            if h.is_snapshot and h.end <= len(tokens) and (h.end < len(tokens) or h.n_logits)
        ]
        return max((e for e in ends if not attention or self.covered(tokens, e)), default=0)

    def attention(self, tokens: list[int]) -> int:
        return max((end for end in range(len(tokens) + 1) if self.covered(tokens, end)), default=0)

    def known(self, tokens: list[int]) -> int:
        shared = [
            next(
                (i for i, (a, b) in enumerate(zip(t, tokens, strict=False)) if a != b),
                min(len(t), len(tokens)),
            )
            for _, t in self.records.values()
        ]
        return max(shared, default=0)


PATHS = st.lists(st.integers(0, LETTERS - 1), min_size=1, max_size=12)


@settings(max_examples=200)
@given(st.data())
def test_the_index_says_what_a_list_of_records_says(data: st.DataObject) -> None:
    index, naive = DiskIndex(), Naive()
    for _ in range(data.draw(st.integers(1, 25))):
        step = data.draw(st.sampled_from(["add", "add", "add", "remove", "forget", "evict"]))
        tokens = data.draw(PATHS)
        if step == "add":
            start = data.draw(starts(len(tokens)))
            base = index.base_of("m", np.array(tokens, np.int32))
            one = head(start, tokens, base, logits=start == len(tokens) and data.draw(st.booleans()))
            if one.key not in index:
                add(index, one, tokens)
                naive.records[one.key] = (one, tokens)
        elif step == "remove" and naive.records:
            key = data.draw(st.sampled_from(sorted(naive.records)))
            assert index.remove(key)
            del naive.records[key]
        elif step == "forget":
            stays = data.draw(st.integers(0, len(tokens) - 1))
            everything = index.on_path(np.array(tokens, np.int32))
            gone = index.on_path(np.array(tokens, np.int32), stays)
            assert set(gone) == {k for k in everything if naive.records[k][0].end > stays}
            beyond = {k for k, (_, t) in naive.records.items() if t[: len(tokens)] == tokens}
            assert beyond <= set(gone)
            for key in gone:
                assert index.remove(key)
                end = naive.records.pop(key)[0].end
                assert key in beyond or end < len(tokens)
        elif step == "evict":
            spared = data.draw(PATHS)
            record = index.victim([("m", np.array(spared, np.int32))])
            if record is not None:
                victim, path = naive.records.pop(record.key)
                assert not victim.is_snapshot or path != spared[: len(path)]
                index.remove(record.key)
        check_integrity(index)
        prompt = data.draw(PATHS)
        asked = np.array(prompt, np.int32)
        assert index.known("m", asked)[0] == naive.known(prompt)
        for attention in (False, True):
            missing = [(0, len(prompt))] if attention else []
            offer = index.offer("m", asked, 0, len(prompt), missing)
            assert (0 if offer is None else offer.position) == naive.offer(prompt, attention=attention)
            if offer is not None and attention:
                reach = 0
                for piece in offer.pieces:
                    assert piece.start <= reach < piece.end
                    reach = piece.end
                assert reach == offer.position
        whole = index.offer_attention("m", asked, 0, len(prompt), [(0, len(prompt))])
        assert (0 if whole is None else whole.position) == naive.attention(prompt)
        if whole is not None:
            assert (whole.checkpoint, whole.keys) == ("", list(dict.fromkeys(p.key for p in whole.pieces)))
            assert whole.pieces[-1].end == whole.position
        assert index.nbytes == sum(h.nbytes for h, _ in naive.records.values())


@settings(max_examples=100)
@given(st.data())
def test_what_could_go_is_all_that_goes(data: st.DataObject) -> None:
    index = DiskIndex()
    for _ in range(data.draw(st.integers(1, 14))):  # fewer than `MOST_THROUGH`
        tokens = data.draw(PATHS)
        start = data.draw(starts(len(tokens)))
        one = head(start, tokens, index.base_of("m", np.array(tokens, np.int32)))
        if one.key not in index:
            add(index, one, tokens)
    spared = [("m", np.array(data.draw(PATHS), np.int32)), (None, np.array(data.draw(PATHS), np.int32))]
    could = index.evictable(spared)
    went = 0
    while (record := index.victim(spared)) is not None:
        went += record.nbytes
        index.remove(record.key)
    assert went == could
    assert index.size("a" * 40) == 0


def test_what_was_longest_unused_goes_first() -> None:
    index = DiskIndex()
    paths = [[n, 1, 2] for n in range(5)]
    for path in paths:
        add(index, head(3, path, logits=True), path)
    index.offer("m", np.array(paths[0], np.int32), 0, 3, [])
    order = []
    while (record := index.victim([("m", np.array(paths[2], np.int32))])) is not None:
        order.append(record.key)
        index.remove(record.key)
    assert order == [head(3, paths[n], logits=True).key for n in (1, 3, 4, 0)]


def test_attention_that_nothing_is_behind_goes_before_anything_else() -> None:
    index = DiskIndex()
    path = [1, 2, 3, 4, 5, 6]
    point, segment = head(6, path), head(0, path)
    other, bare = head(2, [7, 8]), head(1, [9, 9, 9])
    for one, tokens in ((point, path), (segment, path), (other, [7, 8]), (bare, [9, 9, 9])):
        add(index, one, tokens)
    order = []
    while (record := index.victim([])) is not None:
        order.append(record.key)
        index.remove(record.key)
    assert order == [bare.key, point.key, segment.key, other.key]


def test_attention_serves_only_as_far_as_its_path_goes_along() -> None:
    index = DiskIndex()
    here, there = [1, 2, 3, 3, 3], [1, 2, 4, 4, 4]
    for one, tokens in ((head(0, there), there), (head(5, there), there)):
        add(index, one, tokens)
    add(index, head(5, here, logits=True), here)
    asked = np.array(here, np.int32)
    assert index.offer("m", asked, 0, 5, [(0, 5)]) is None
    assert index.uncovered("m", asked) == [(2, 5)]
    add(index, head(2, here), here)
    offer = index.offer("m", asked, 0, 5, [(0, 5)])
    assert offer is not None
    assert [(p.start, p.end) for p in offer.pieces] == [(0, 2), (2, 5)]
    check_integrity(index)


def test_attention_alone_is_offered_where_it_is_missing_and_not_yet_there() -> None:
    index = DiskIndex()
    path = [1, 2, 3, 4, 5, 6]
    for start, end in ((0, 2), (2, 4), (5, 6)):
        add(index, head(start, path[:end]), path[:end])
    asked = np.array([*path, 7], np.int32)

    def offered(above: int, limit: int, missing: list[tuple[int, int]]) -> list[tuple[int, int]] | None:
        offer = index.offer_attention("m", asked, above, limit, missing)
        return None if offer is None else [(p.start, p.end) for p in offer.pieces]

    assert offered(0, 7, [(0, 7)]) == [(0, 2), (2, 4)]
    assert offered(0, 3, [(0, 7)]) == [(0, 2), (2, 3)]
    assert offered(4, 7, [(0, 7)]) is None
    assert offered(2, 7, [(2, 5), (5, 7)]) == [(2, 4)]
    assert offered(5, 7, [(5, 7)]) == [(5, 6)]
    assert offered(3, 7, [(6, 7)]) is None
    assert offered(0, 7, []) is None


def test_attention_that_was_asked_for_keeps_its_chat() -> None:
    index = DiskIndex()
    paths = [[n, 1, 2] for n in range(3)]
    for path in paths:
        add(index, head(3, path), path)
        add(index, head(0, path), path)
    assert index.offer_attention("m", np.array([0, 1, 9], np.int32), 0, 3, [(0, 3)]) is not None
    victim = index.victim([])
    assert victim is not None
    assert victim.key == head(3, paths[1]).key


@pytest.mark.parametrize("twist", ["position", "digest"])
def test_records_that_contradict_each_other_are_refused(twist: str) -> None:
    index = DiskIndex()
    sound = head(4, [1, 2, 3, 4])
    add(index, sound, [1, 2, 3, 4])
    liar = head(6, [1, 2, 3, 4, 5, 6], 4)
    change = {"base": 3} if twist == "position" else {"digest": sound.digest}
    liar = Head(**{**vars(liar), **change})
    with pytest.raises(RecordError):
        index.add(liar, ids_of(np.array([5, 6], np.int32)), liar.base)
    check_integrity(index)
    assert len(index) == 1


# -- how much of it ------------------------------------------------------------------------------------


def fill(folder: Path, chats: int, row: np.ndarray | None = None) -> int:
    """Chats of 1,000 tokens on 200 in common, four turns each; how many ids they have of their own."""
    store, rng = RecordStore(folder), np.random.default_rng(0)
    system, own = rng.integers(0, 1000, 200), 0
    for _ in range(chats):
        tokens = np.concatenate([system, rng.integers(0, 1000, 800)]).astype(np.int32)
        for start, end in ((0, 250), (250, 500), (500, 750), (750, 1000)):
            for at, row_here in ((start, None), (end, row)):
                parts = record_of("m", at, tokens[:end], row_here, np.zeros(10, np.uint8), start)
                store.write(head_of(parts[0]).key, parts)
                own += end - start
    return own


def test_a_start_reads_ids_once_and_no_logits(tmp_path: Path, monkeypatch) -> None:
    own = fill(tmp_path, 20, np.zeros(50_000, np.float32))
    read: list[int] = []
    reading = disk_store.read_ids

    def count(*arguments: object) -> bytes:
        ids = reading(*arguments)  # type: ignore[arg-type]
        read.append(len(ids))
        return ids

    monkeypatch.setattr(disk_store, "read_ids", count)
    DiskStore(tmp_path, 1 << 30)
    assert (len(read), sum(read)) == (160, 4 * own)


def test_an_index_takes_a_kibibyte_a_record_and_8_bytes_a_token_while_it_is_read_too(tmp_path: Path) -> None:
    fill(tmp_path, 40, np.zeros(50_000, np.float32))
    DiskStore(tmp_path, 1 << 30)  # what is made once
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    store = DiskStore(tmp_path, 1 << 30)
    most = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert store.stats()["disk_records"] == 320
    assert most <= 320 * 1024 + 8 * (200 + 40 * 800)


def calls(do: Callable[[], object]) -> int:
    """Python and C functions called by it."""
    count = 0

    def step(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(step)
    try:
        do()
    finally:
        sys.setprofile(None)
    return count


def test_nothing_takes_longer_for_there_being_more_records() -> None:
    def steps(chats: int) -> list[int]:
        index, rng = DiskIndex(), np.random.default_rng(0)
        heads = []
        for _ in range(chats):
            tokens = [*range(50), *rng.integers(100, 900, 50).tolist()]
            for one in (head(0, tokens), head(100, tokens)):
                add(index, one, tokens)
                heads.append(one)
        path = np.array(tokens, np.int32)
        return [
            calls(lambda: index.remove(index.victim([("m", path)]).key)),
            calls(lambda: index.remove(heads[-1].key)),
            calls(lambda: index.offer("m", path, 0, 100, [])),
            calls(lambda: index.on_path(path)),
            calls(lambda: index.uncovered("m", path)),
        ]

    few, many = steps(30), steps(300)
    assert all(b <= 1.3 * a + 10 for a, b in zip(few, many, strict=True)), (few, many)


def test_a_record_more_on_a_long_path_costs_no_more() -> None:
    """A conversation is one edge, whatever of it is stored."""

    def steps(turns: int) -> list[int]:
        index, path = DiskIndex(), list(range(10 * turns))
        for end in range(10, 10 * turns + 1, 10):
            for start in (end - 10, end):
                one = head(start, path[:end], end - 10)
                ids = ids_of(np.array(path[end - 10 : end], np.int32))
                base = one.base if index.knows(one) else 0
                last = calls(lambda one=one, ids=ids, base=base: index.add(one, ids, base))
        check_integrity(index)
        prompt = np.array(path, np.int32)
        return [
            last,
            calls(lambda: index.serves("m", prompt, logits=False, attention=False)),
            calls(lambda: index.remove(one.key)),
            calls(lambda: index.uncovered("m", prompt)) // turns,
        ]

    few, many = steps(20), steps(120)
    assert all(b <= 1.3 * a + 10 for a, b in zip(few, many, strict=True)), (few, many)
