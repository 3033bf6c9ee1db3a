"""Paths as chains of blocks find and forget what a plain list of records would."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from llamahybrid.errors import RecordGone
from llamahybrid.prompt_cache.base import Tokens
from llamahybrid.prompt_cache.block_store import BlockStore, Rows, Values
from llamahybrid.prompt_cache.blocks import BLOCK, MOST_LEADS, Item, Kind, Node, Place, Reach, Why
from llamahybrid.prompt_cache.forgetting import on_path, sweep
from llamahybrid.prompt_cache.nodes import ids_of
from llamahybrid.prompt_cache.records import Record
from llamahybrid.prompt_cache.seen import cover, uncovered
from llamahybrid.prompt_cache.writer import item_of


class DictRows(Rows):
    """Rows and records in memory."""

    def __init__(self) -> None:
        self.data: dict[bytes, bytes] = {}

    def get(self, keys: Sequence[bytes], *, all_: bool = True) -> list[bytes | None]:
        return [self.data.get(key) for key in keys]

    def has(self, keys: Sequence[bytes]) -> set[bytes]:
        return {key for key in keys if key in self.data}

    def update(self, keys: Sequence[bytes], change: Callable[[Values], Values]) -> None:
        for key, value in change({key: self.data.get(key) for key in keys}).items():
            if value is None:
                self.data.pop(key, None)
            else:
                self.data[key] = value

    def write(self, key: bytes, parts: Sequence[bytes | memoryview]) -> None:
        self.data[key] = b"".join(parts)

    def read(self, key: bytes) -> Record:
        raise RecordGone

    def remove(self, key: bytes) -> None:
        self.data.pop(key, None)

    def touch(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if key in self.data:
                self.data[key] = self.data.pop(key)

    def keys(self, kind: bytes) -> Iterator[bytes]:
        yield from [key for key in self.data if key.startswith(kind)]


@dataclass(frozen=True)
class Listed:
    """A record in the list."""

    namespace: str
    path: tuple[int, ...]
    item: Item


STEMS = [0, 1, 5, 100, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 30]


@st.composite
def paths(draw: st.DrawFn) -> tuple[int, ...]:
    """Paths that share beginnings of all kinds of lengths, blocks' ends among them."""
    path: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        path += [draw(st.integers(0, 1))] * draw(st.sampled_from(STEMS))
    return (*path, 7) if not path else tuple(path)


def ids(path: Sequence[int]) -> Tokens:
    return np.array(path, np.int32)


def alike(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def add(store: BlockStore, listed: dict[bytes, Listed], one: tuple[str, tuple[int, ...], int | None]) -> None:
    """Store a record in both."""
    namespace, path, start = one
    start = None if start is None else start % len(path)
    kind = Kind.STATE if start is None else Kind.ATTENTION
    item = item_of(namespace, ids(path), start, 10, kind, Why.TIP)
    store.rows.write(item.key, [b"record"])
    store.link(namespace, ids(path), item)
    listed[item.key] = Listed(namespace, path, item)


def forget(listed: dict[bytes, Listed], tokens: Sequence[int], stays: int) -> set[bytes]:
    """Keys of the forgotten records of the list."""
    gone: set[bytes] = set()
    for namespace in {each.namespace for each in listed.values()}:
        ours = {key: each for key, each in listed.items() if each.namespace == namespace}
        common = {key: alike(each.path, tokens) for key, each in ours.items()}
        behind = {key for key, n in common.items() if n == len(tokens)}
        before = {key for key, n in common.items() if n == len(ours[key].path)} - behind
        keep = max([stays, *(n for key, n in common.items() if key not in behind | before)])
        gone |= behind | {key for key in before if len(ours[key].path) > keep}
    return gone


records = st.tuples(st.sampled_from(["a", "b"]), paths(), st.none() | st.integers(0, 600))


@settings(max_examples=200)
@given(st.lists(records, max_size=12), st.lists(paths(), min_size=1, max_size=3), st.data())
def test_random_histories_find_and_forget_what_a_list_would(
    stored: list[tuple[str, tuple[int, ...], int | None]],
    prompts: list[tuple[int, ...]],
    data: st.DataObject,
) -> None:
    store, listed = BlockStore(DictRows()), dict[bytes, Listed]()
    for one in stored:
        add(store, listed, one)
    for round_ in range(2):
        for prompt in prompts:
            compare(store, listed, prompt)
        for _, place, path in store.each():
            for item in place.items:
                assert (listed[item.key].namespace, listed[item.key].path) == (
                    path.namespace,
                    tuple(np.frombuffer(path.ids, "<i4").tolist()),
                )
        if round_:
            break
        tokens = data.draw(paths())
        stays = data.draw(st.sampled_from([0, 3, len(tokens) - 1]))
        gone = forget(listed, tokens, stays)
        forgotten = on_path(store, ids(tokens), stays)
        assert {item.key for item, _ in forgotten.items} == gone
        assert all(item.start < keep < item.end for item, _, keep in forgotten.torn)
        store.unlink(item for item, _ in forgotten.items)
        sweep(store)
        listed = {key: each for key, each in listed.items() if key not in gone}
    if not listed:
        assert not store.rows.data, "token ids are left"  # type: ignore[attr-defined]


def compare(store: BlockStore, listed: dict[bytes, Listed], prompt: tuple[int, ...]) -> None:
    """A look-up tells what the list has."""
    seen = store.look("a", ids(prompt))
    ours = [each for each in listed.values() if each.namespace == "a"]
    expected = {e.item.key for e in ours if prompt[: len(e.path)] == e.path}
    assert {item.key for item in seen.items} == expected
    longest = max((alike(e.path, prompt) for e in ours), default=0)
    assert max((i.end for i in seen.items), default=0) <= seen.length <= longest
    if len(ours) <= MOST_LEADS:
        assert seen.length == longest, "where paths part is known to the token"
        following = {e.path[longest] for e in ours if alike(e.path, prompt) == longest < len(e.path)}
        assert set(seen.followers) == following
    for reach in seen.through:
        path = listed[reach.item.key].path
        assert path[: reach.end] == prompt[: reach.end]


@given(paths(), st.integers(0, 1 << 16))
def test_a_flipped_bit_of_a_row_never_makes_a_look_up_fail(path: tuple[int, ...], at: int) -> None:
    store = BlockStore(DictRows())
    listed: dict[bytes, Listed] = {}
    for start in (None, 0):
        add(store, listed, ("a", path, start))
    data = store.rows.data  # type: ignore[attr-defined]
    for key, raw in list(data.items()):
        bit = at % (8 * len(raw))
        data[key] = bytes(b ^ (1 << bit % 8) * (n == bit // 8) for n, b in enumerate(raw))
        seen = store.look("a", ids(path))
        assert all(item.key[1:17] == item.digest for item in seen.items)
        on_path(store, ids(path[:5]))
        list(store.each())
        data[key] = raw


def test_a_block_of_other_tokens_under_the_same_hash_is_unknown() -> None:
    path = tuple(range(2 * BLOCK + 10))
    store, listed = BlockStore(DictRows()), dict[bytes, Listed]()
    add(store, listed, ("a", path, None))
    data = store.rows.data  # type: ignore[attr-defined]
    for key, raw in data.items():
        node = Node.unpack(raw) if key[:1] == b"n" else None
        if node is not None and node.text == ids(path[:BLOCK]).tobytes():
            data[key] = replace(node, text=ids(path[1 : BLOCK + 1]).tobytes()).pack()
    seen = store.look("a", ids(path))
    assert (seen.items, seen.length) == ((), 0)


def test_of_a_path_the_shallow_states_go_first_and_attention_last() -> None:
    path = tuple(range(600))
    store, listed = BlockStore(DictRows()), dict[bytes, Listed]()
    for end in (600, 100, 300):
        add(store, listed, ("a", path[:end], None))
        add(store, listed, ("a", path[:end], 0))
    store.used("a", ids(path), store.look("a", ids(path)))
    order = [key for key in store.rows.data if key[:1] == b"r"]  # type: ignore[attr-defined]
    items = [listed[key].item for key in order]
    assert [i.end for i in items if i.is_checkpoint] == [100, 300, 600]
    assert [i.is_checkpoint for i in items] == [True] * 3 + [False] * 3
    assert {key[:1] for key in list(store.rows.data)[6:]} == {b"p", b"n"}  # type: ignore[attr-defined]


def test_rows_of_other_lengths_are_none() -> None:
    rows = (b"", b"x", bytes(49), bytes(48) + b"\xff", bytes(16) + bytes(32) + b"\x08")
    assert [Node.unpack(raw) for raw in rows if raw != bytes(49)] == [None] * (len(rows) - 1)
    assert [Place.unpack(bytes(16), raw) for raw in (*rows, bytes(200))] == [None] * 6


def reach(start: int, end: int, until: int | None = None) -> Reach:
    item = Item(bytes(16), start, end, 100, Kind.ATTENTION, Why.TIP, 0)
    return Reach(item, end if until is None else until)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), max_size=8),
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=3),
)
def test_attention_is_covered_where_it_is_there_and_nowhere_else(
    there: list[tuple[int, int]], wanted: list[tuple[int, int]]
) -> None:
    reaches = [reach(start, start + n) for start, n in there]
    has = {t for r in reaches for t in range(r.item.start, r.end)}
    ranges, at = [], 0
    for start, n in wanted:
        ranges.append((at + start, at + start + n))
        at += start + n
    pieces, hole = cover(reaches, ranges)
    asked = [t for a, b in ranges for t in range(a, b)]
    assert hole == next((t for t in asked if t not in has), None)
    covered = [t for p in pieces for t in range(p.start, p.end)]
    assert covered == sorted(set(covered)), "pieces overlap"
    assert set(asked if hole is None else [t for t in asked if t < hole]) <= set(covered)
    end = max(b for _, b in ranges)
    holes = [t for a, b in uncovered(reaches, end) for t in range(a, b)]
    assert holes == [t for t in range(end) if t not in has]


def test_a_damaged_row_of_a_path_is_healed_by_the_next_record_of_it() -> None:
    rows = DictRows()
    store, tokens = BlockStore(rows), np.arange(2 * BLOCK + 5, dtype=np.int32)
    item = item_of("m", tokens, None, 10, Kind.STATE, Why.TIP)
    rows.write(item.key, [b"state"])
    store.link("m", tokens, item)
    assert [each.key for each in store.look("m", tokens).items] == [item.key]
    for key in [key for key in rows.data if key[:1] == b"n"]:
        node = Node.unpack(rows.data[key])
        assert node is not None
        rows.data[key] = replace(node, text=node.text[::-1]).pack()
    assert [*store.look("m", tokens).items] == []
    store.link("m", tokens, item)
    assert [each.key for each in store.look("m", tokens).items] == [item.key]
    ((_, _, path),) = store.each()
    assert path.ids == ids_of(tokens)
