"""The prompt cache as its users have it: what it passes on to which tier, and what it does without one."""

from __future__ import annotations

import gc
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from llamahybrid.prompt_cache import PromptCache
from llamahybrid.prompt_cache import cache as cache_module
from llamahybrid.prompt_cache.block_store import Busy
from llamahybrid.prompt_cache.cache import MAX_DISK_BYTES, default_disk_bytes
from llamahybrid.prompt_cache.disk import DiskRows
from tests.lab.fake_engine import FakeEngine

from .asking import SLOW, A, B, ask, files


def test_without_a_folder_nothing_leaves_the_process() -> None:
    cache = PromptCache(1 << 20)
    assert (cache.disk, cache.leaves_process) == (None, False)
    assert cache.flush(0.0)
    assert cache.close()
    assert not any(name.startswith("disk") for name in cache.stats().extra)


def test_the_budget_of_a_folder_does_not_shrink_by_what_it_holds(folder: Path, monkeypatch) -> None:
    disk = [8_000_000]

    def usage(_: Path) -> SimpleNamespace:
        return SimpleNamespace(free=disk[0] - sum(path.stat().st_size for path in files(folder)))

    monkeypatch.setattr(cache_module.shutil, "disk_usage", usage)
    limits = []
    for prompt in (A, B):
        cache = PromptCache(1 << 24, folder)
        assert cache.disk is not None
        limits.append(cache.disk.limit)
        ask(cache, prompt)
        assert cache.close()
    assert files(folder)
    assert limits == [2_000_000, 2_000_000]


def test_a_disk_that_was_full_at_the_start_is_written_to_once_it_has_room(folder: Path, monkeypatch) -> None:
    free = 0
    monkeypatch.setattr(cache_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    cache = PromptCache(1 << 24, folder)
    ask(cache, A)
    assert cache.flush()
    assert not files(folder)
    free = 8_000_000
    ask(cache, B)
    assert cache.close()
    assert files(folder)


def test_the_budget_of_a_folder_that_was_locked_at_the_start_counts_what_it_holds(
    folder: Path, monkeypatch
) -> None:
    kept = PromptCache(1 << 24, folder)
    ask(kept, A)
    assert kept.close()
    inner, locked = DiskRows.open, True

    def open_unless_locked(rows: DiskRows) -> None:
        if locked:
            raise Busy("another process holds its lock")
        inner(rows)

    def usage(_: Path) -> SimpleNamespace:
        return SimpleNamespace(free=8_000_000 - sum(path.stat().st_size for path in files(folder)))

    monkeypatch.setattr(cache_module.shutil, "disk_usage", usage)
    monkeypatch.setattr(DiskRows, "open", open_unless_locked)
    cache = PromptCache(1 << 24, folder)
    locked = False
    ask(cache, B)
    assert cache.close()
    assert cache.disk is not None
    assert cache.disk.limit == 2_000_000


@pytest.mark.parametrize(("free", "expected"), [(1000, 250), (1 << 50, MAX_DISK_BYTES)])
def test_the_default_is_a_share_of_what_is_free_where_the_folder_will_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, expected: int
) -> None:
    def usage(path: Path) -> SimpleNamespace:
        assert path == tmp_path
        return SimpleNamespace(free=free)

    monkeypatch.setattr(cache_module.shutil, "disk_usage", usage)
    assert default_disk_bytes(tmp_path / "not" / "there" / "yet") == expected


BUDGETS = ("ram_bytes", "disk_bytes", "disk_write_bytes", "remote_bytes")


@pytest.mark.parametrize("name", BUDGETS)
@pytest.mark.parametrize(
    ("given", "error"),
    [("4GiB", TypeError), (True, TypeError), ([1], TypeError), (-1, ValueError), (math.nan, ValueError)],
)
def test_a_budget_that_is_no_size_is_said_at_once(
    folder: Path, name: str, given: object, error: type[Exception]
) -> None:
    with pytest.raises(error, match=rf"{name}: .* not {re.escape(repr(given))}"):
        PromptCache(**{"disk_dir": folder, name: given})  # type: ignore[arg-type]
    assert not folder.exists()


def test_a_budget_that_is_set_later_is_a_size_too() -> None:
    cache = PromptCache(math.inf)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ram_bytes"):
        cache.ram_bytes = -1
    assert cache.ram_bytes == sys.maxsize
    assert ask(cache, A).total == len(A)


@pytest.mark.parametrize("given", [np.int64(1 << 20), float(1 << 20)])
def test_a_budget_may_be_any_number(folder: Path, given: object) -> None:
    cache = PromptCache(**dict.fromkeys(BUDGETS, given), disk_dir=folder)  # type: ignore[arg-type]
    assert cache.disk is not None
    assert (cache.ram_bytes, cache.disk.limit, cache.disk.writer.budget.hourly) == (1 << 20,) * 3
    assert type(cache.ram_bytes) is int
    ask(cache, A)
    assert cache.close()


def test_plain_attention_reads_nothing_from_disk(folder: Path) -> None:
    cache = PromptCache(1 << 24, folder)
    ask(cache, A)
    cache.close()
    again = PromptCache(1 << 24, folder)
    FakeEngine(again, "plain", costs=SLOW).request(A)
    assert again.disk is not None
    assert again.disk.counts.loaded == 0
    assert FakeEngine(again, costs=SLOW).request(A).source == "disk"
    again.close()


NO_PATHS = ["123", b"123", 5, None, {1: 2}, iter(A), [[1, 2]], [1, [2]], [1.7, 2.0], ["1"], [None], [1 << 31]]


@pytest.mark.parametrize("what", ["pin", "unpin", "forget"])
@pytest.mark.parametrize("prefix", NO_PATHS, ids=lambda prefix: type(prefix).__name__)
def test_a_prefix_of_no_token_ids_is_an_error_and_costs_nothing(what: str, prefix: object) -> None:
    cache = PromptCache(1 << 20)
    ask(cache, A)
    before = cache.stats()
    with pytest.raises((TypeError, ValueError)):
        getattr(cache, what)(prefix)
    assert cache.stats() == before
    assert ask(cache, A).cached == len(A)


@pytest.mark.parametrize("kind", [list, tuple, np.int64, np.uint32, np.int32])
def test_token_ids_may_come_in_any_sequence(kind: type) -> None:
    cache = PromptCache(1 << 20)
    ask(cache, A)
    prefix = kind(A) if kind in (list, tuple) else np.array(A, kind)
    assert cache.pin(prefix) > 0
    cache.unpin(prefix)
    assert cache.forget(prefix) > 0
    assert cache.forget([]) == 0


def test_a_cache_serves_others_while_several_contexts_are_attached(tmp_path: Path) -> None:
    class Context:
        pass

    cache, one, other = PromptCache(1 << 20), Context(), Context()
    for context in (one, one):
        cache.attach(context)
        assert not cache.serves_others
    cache.attach(other)
    assert cache.serves_others
    del other, context
    gc.collect()
    assert not cache.serves_others
    assert PromptCache(1 << 20, tmp_path).serves_others, "later processes"
