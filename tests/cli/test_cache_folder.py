"""Conversations out of records, and what becomes of a record that cannot be read."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import typer

from llamahybrid.cli.cache_folder import CacheFolder, conversations
from llamahybrid.errors import RecordError, RecordGone
from llamahybrid.prompt_cache.disk import RecordStore
from llamahybrid.prompt_cache.disk_index import DiskIndex
from llamahybrid.prompt_cache.nodes import ids_of
from llamahybrid.prompt_cache.records import SEGMENT, SNAPSHOT, Head, head_of, pack

NOTHING = np.zeros(8, np.uint8)


def head(namespace: str, path: Iterable[int], kind: int = SNAPSHOT) -> tuple[Head, bytes]:
    tokens = np.array([*path], np.int32)
    start = 0 if kind == SEGMENT else len(tokens)
    first, _ = pack(namespace, kind, start, tokens, None, NOTHING)
    return head_of(first), ids_of(tokens)


def indexed(found: Iterable[tuple[Head, bytes]]) -> DiskIndex:
    index = DiskIndex()
    for one, ids in found:
        index.add(one, ids, 0)
    return index


def one_by_one(found: dict[str, tuple[Head, bytes]]) -> list[list[str]]:
    """Each record goes to the first conversation that begins with it, the longest first."""
    groups: list[list[str]] = []
    for key in sorted(sorted(found), key=lambda key: -found[key][0].end):
        one, ids = found[key]
        for group in groups:
            first, path = found[group[0]]
            if first.namespace == one.namespace and path.startswith(ids):
                group.append(key)
                break
        else:
            groups.append([key])
    return groups


@pytest.mark.parametrize("seed", range(20))
def test_a_record_belongs_to_the_longest_path(seed: int) -> None:
    chance = random.Random(seed)
    paths: list[list[int]] = [[]]
    found: dict[str, tuple[Head, bytes]] = {}
    for _ in range(80):
        path = chance.choice(paths)
        path = [*path[: chance.randint(0, len(path))], *chance.choices(range(3), k=chance.randint(1, 5))]
        paths.append(path)
        one = head(chance.choice("ab"), path, chance.choice((SNAPSHOT, SEGMENT)))
        found[one[0].key] = one
    assert conversations(indexed(found.values())) == one_by_one(found)


def calls(n: int) -> int:
    """What is called to tell n conversations apart."""
    index, count = indexed(head("a", [i, *range(i % 7 + 1)]) for i in range(n)), 0

    def note(*_: object) -> None:
        nonlocal count
        count += 1

    sys.setprofile(note)
    try:
        assert len(conversations(index)) == n
    finally:
        sys.setprofile(None)
    return count


def test_many_conversations_take_no_longer_each() -> None:
    assert calls(1000) < 12 * calls(100)


@pytest.fixture
def stored(tmp_path: Path) -> CacheFolder:
    store = RecordStore(tmp_path)
    for length in range(1, 6):
        tokens = np.arange(length, dtype=np.int32)
        parts = pack("a", SNAPSHOT, length, tokens, None, NOTHING)
        store.write(head_of(parts[0]).key, parts)
    return CacheFolder(tmp_path)


def test_what_cannot_be_read_is_told_apart(stored: CacheFolder, capsys: pytest.CaptureFixture[str]) -> None:
    keys = sorted(stored.store.keys())
    errors = [RecordGone("gone"), RecordError("damaged"), OSError(116, "Stale"), MemoryError()]

    def read(key: str) -> str:
        if keys.index(key) < len(errors):
            raise errors[keys.index(key)]
        return "sound"

    assert list(stored.each(read)) == [(keys[1], errors[1]), (keys[4], "sound")]
    assert stored.troubles() == ", 2 could not be read"
    assert capsys.readouterr().err.splitlines() == [
        f"{keys[2]}: [Errno 116] Stale",
        f"{keys[3]}: no memory for it",
    ]
    assert list(stored.sound(read)) == [(keys[4], "sound")]
    assert f"{keys[1]}: damaged" in capsys.readouterr().err


def test_what_was_damaged_once_may_be_sound(stored: CacheFolder) -> None:
    read: list[str] = []

    def damaged_once(key: str) -> int:
        read.append(key)
        if read.count(key) == 1:
            raise RecordError("damaged")
        return 1

    assert [found for _, found in stored.each(damaged_once)] == [1] * 5


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(typer.Exit):
        CacheFolder(tmp_path / "none")
    assert not (tmp_path / "none").exists()
