"""Paths as chains of blocks find and forget what a plain list of records would."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from llamahybrid.errors import RecordGone
from llamahybrid.prompt_cache.base import Tokens
from llamahybrid.prompt_cache.block_store import BlockStore, Rows, Values
from llamahybrid.prompt_cache.blocks import BLOCK, MOST_NEXT, Item, Node, Why, chain, cover, spans
from llamahybrid.prompt_cache.envelope import Record
from llamahybrid.prompt_cache.nodes import ids_of


class DictRows(Rows):
    """Rows and records in memory."""

    def __init__(self) -> None:
        self.data: dict[bytes, bytes] = {}

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self.data.get(key) for key in keys]

    def sizes(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        return {key: len(self.data[key]) for key in keys if key in self.data}

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


STEMS = [0, 1, 5, 100, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 30]

Path = tuple[int, ...]


@st.composite
def paths(draw: st.DrawFn) -> Path:
    """Paths that share beginnings of all kinds of lengths, blocks' ends among them."""
    path: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        path += [draw(st.integers(0, 1))] * draw(st.sampled_from(STEMS))
    return (*path, 7) if not path else tuple(path)


def ids(path: Sequence[int]) -> Tokens:
    return np.array(path, np.int32)


def alike(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def add(store: BlockStore, namespace: str, path: Path, *, attention: bool = True) -> None:
    """Store a checkpoint, and its attention."""
    store.link(namespace, ids(path), Why.TIP)
    hashes = [prefix.hash for prefix in chain(namespace, ids_of(ids(path)))]
    for hash_ in hashes[1:] if attention else ():
        store.rows.write(b"a" + hash_, [b"attention"])
    store.rows.write(b"r" + hashes[-1], [b"state"])


def forget(listed: set[tuple[str, Path]], tokens: Sequence[int], stays: int) -> set[tuple[str, Path]]:
    """The checkpoints of a list that go with a forgotten path."""
    gone: set[tuple[str, Path]] = set()
    for namespace in {name for name, _ in listed}:
        common = {path: alike(path, tokens) for name, path in listed if name == namespace}
        behind = {path for path, n in common.items() if n == len(tokens)}
        before = {path for path, n in common.items() if n == len(path)} - behind
        keep = max([stays, *(n for path, n in common.items() if path not in behind | before)])
        gone |= {(namespace, p) for p in behind} | {(namespace, p) for p in before if len(p) > keep}
    return gone


def test_spans_are_those_of_a_path() -> None:
    assert spans(BLOCK) == [(0, BLOCK)]
    assert spans(BLOCK + 3) == [(0, BLOCK), (BLOCK, BLOCK + 3)]


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from(["a", "b"]), paths()), max_size=12),
    st.lists(paths(), min_size=1, max_size=3),
    st.data(),
)
def test_random_histories_find_and_forget_what_a_list_would(
    stored: list[tuple[str, Path]], prompts: list[Path], data: st.DataObject
) -> None:
    store, listed = BlockStore(DictRows()), set(stored)
    for namespace, path in stored:
        add(store, namespace, path)
    for round_ in range(2):
        for prompt in prompts:
            compare(store, {path for name, path in listed if name == "a"}, prompt)
        found = {(one.namespace, tuple(np.frombuffer(one.ids, "<i4").tolist())) for one in store.each()}
        assert found == listed
        if round_:
            break
        tokens = data.draw(paths())
        stays = data.draw(st.sampled_from([0, 3, len(tokens) - 1]))
        unneeded = store.unneeded(ids(tokens), stays)
        for key in unneeded:
            store.rows.remove(key)
        listed -= forget(listed, tokens, stays)
        assert not store.unneeded()
    if not listed:
        assert not store.rows.data, "token ids are left"  # type: ignore[attr-defined]


def compare(store: BlockStore, ours: set[Path], prompt: Path) -> None:
    """A look-up tells what a list has."""
    seen = store.look("a", ids(prompt))
    points = {item.end: item for item in seen.items if item.is_checkpoint}
    assert {prompt[:end] for end in points} == {path for path in ours if prompt[: len(path)] == path}
    wanted = {prompt[:end] for path in ours for _, end in spans(len(path)) if path[:end] == prompt[:end]}
    attention = [item for item in seen.items if not item.is_checkpoint]
    assert {prompt[: item.end] for item in attention if item.node is None} == wanted
    for item in (item for item in attention if item.node is not None):
        path = tuple(item.tokens(ids(prompt)).tolist())
        assert alike(path, prompt) == item.end < len(path)
        assert any(each[: len(path)] == path for each in ours)
    longest = max((alike(path, prompt) for path in ours), default=0)
    assert max(points, default=0) <= seen.length <= longest
    for end in points:
        assert seen.serves(end, logits=False, attention=True)
    if len(ours) <= MOST_NEXT:
        assert seen.length == longest, "where paths part is known to the token"
        following = {path[longest] for path in ours if alike(path, prompt) == longest < len(path)}
        assert set(seen.followers) == following


def test_a_path_that_another_process_begins_to_write_outlives_forgetting_another() -> None:
    store, begun = BlockStore(DictRows()), tuple(range(2 * BLOCK))
    store.link("a", ids(begun), Why.TIP)
    assert not store.unneeded(ids([5, 6]))
    assert len(store.unneeded(ids(begun[:9]))) == len(store.unneeded()) == 3


@given(paths(), st.integers(0, 1 << 16))
def test_a_flipped_bit_of_a_row_never_makes_a_look_up_fail(path: Path, at: int) -> None:
    store = BlockStore(DictRows())
    add(store, "a", path)
    data = store.rows.data  # type: ignore[attr-defined]
    before = {item.key for item in store.look("a", ids(path)).items}
    for key, raw in list(data.items()):
        bit = at % (8 * len(raw))
        data[key] = bytes(b ^ (1 << bit % 8) * (n == bit // 8) for n, b in enumerate(raw))
        assert {item.key for item in store.look("a", ids(path)).items} <= before
        store.unneeded(ids(path[:5]))
        data[key] = raw


def test_a_block_of_other_tokens_under_the_same_hash_is_unknown() -> None:
    path = tuple(range(2 * BLOCK + 10))
    store = BlockStore(DictRows())
    add(store, "a", path)
    data = store.rows.data  # type: ignore[attr-defined]
    for key, raw in data.items():
        node = Node.unpack(raw) if key[:1] == b"n" else None
        if node is not None and node.text == ids(path[:BLOCK]).tobytes():
            data[key] = replace(node, text=ids(path[1 : BLOCK + 1]).tobytes()).pack()
    seen = store.look("a", ids(path))
    assert (seen.items, seen.length) == ((), 0)


def test_of_a_path_the_shallow_states_go_first_and_attention_last() -> None:
    path = tuple(range(600))
    store = BlockStore(DictRows())
    for end in (600, 100, 300):
        add(store, "a", path[:end])
    seen = store.look("a", ids(path))
    store.used("a", ids(path), seen)
    items = {item.key: item for item in seen.items}
    data = store.rows.data  # type: ignore[attr-defined]
    order = [items[key] for key in data if key[:1] != b"n"]
    assert [i.end for i in order if i.is_checkpoint] == [100, 300, 600]
    ends = [i.end for i in order if not i.is_checkpoint]
    assert ends == sorted(ends, reverse=True)
    assert [i.is_checkpoint for i in order] == [True] * 3 + [False] * len(ends)
    assert {key[:1] for key in list(data)[len(order) :]} == {b"n"}


def test_rows_of_other_lengths_are_none() -> None:
    sound = Node(bytes(16), b"text", next=(bytes(16),)).pack()
    assert Node.unpack(sound) is not None
    at = 16 + BLOCK // 8  # the number of following nodes
    rows = (None, b"", b"x", sound[:at], bytes(at) + b"\xff" * 30, sound[:at] + b"\x08" + sound[at + 1 :])
    assert [Node.unpack(raw) for raw in rows] == [None] * len(rows)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, BLOCK)), max_size=8),
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 200)), min_size=1, max_size=3),
)
def test_attention_is_covered_where_it_is_there_and_nowhere_else(
    there: list[tuple[int, int]], wanted: list[tuple[int, int]]
) -> None:
    items = [Item(b"a%d %d" % (k, n), BLOCK * k, BLOCK * k + n, 100) for k, n in there]
    has = {t for item in items for t in range(item.start, item.end)}
    ranges, at = [], 0
    for start, n in wanted:
        ranges.append((at + start, at + start + n))
        at += start + n
    found, hole = cover(items, ranges)
    asked = [t for a, b in ranges for t in range(a, b)]
    assert hole == next((t for t in asked if t not in has), None)
    covered = [t for item in found for t in range(item.start, item.end)]
    assert covered == sorted(set(covered)), "records overlap"
    assert set(asked if hole is None else [t for t in asked if t < hole]) <= set(covered)


def test_a_damaged_row_of_a_path_is_healed_by_the_next_record_of_it() -> None:
    rows = DictRows()
    store, path = BlockStore(rows), tuple(range(2 * BLOCK + 5))
    add(store, "m", path)
    before = store.look("m", ids(path)).items
    for key in [key for key in rows.data if key[:1] == b"n"]:
        node = Node.unpack(rows.data[key])
        assert node is not None
        rows.data[key] = replace(node, text=node.text[::-1]).pack()
    assert store.look("m", ids(path)).items == ()
    add(store, "m", path)
    assert [item.key for item in store.look("m", ids(path)).items] == [item.key for item in before]
    (one,) = store.each()
    assert one.ids == ids_of(ids(path))
