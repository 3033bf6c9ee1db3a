"""The prompt cache as its users have it: what it passes on to which tier, and what it does without one."""

from __future__ import annotations

import gc
import logging
import math
import pickle
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from llamahybrid.prompt_cache import PromptCache
from llamahybrid.prompt_cache import cache as cache_module
from llamahybrid.prompt_cache.base import HERE_ONLY
from llamahybrid.prompt_cache.cache import MAX_DISK_BYTES, default_disk_bytes
from llamahybrid.prompt_cache.disk import RecordStore
from tests.lab.fake_engine import FakeEngine

from .asking import SLOW, A, B, ask, everything, files, filled


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
        limits.append(cache.disk.store.limit)
        ask(cache, prompt)
        assert cache.close()
    assert files(folder)
    assert limits == [2_000_000, 2_000_000]


def test_clearing_and_forgetting_say_what_they_could_not_remove(folder: Path, monkeypatch, caplog) -> None:
    def fail(*_: object) -> None:
        raise PermissionError("not yours")

    cache = filled(folder)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(RecordStore, "delete", fail)
        cache.clear()
        assert "clear it again" in caplog.text
        cache.forget(A)
        assert "forget it again" in caplog.text
    cache.clear()
    assert not files(folder)


def test_a_copy_in_another_process_is_empty_and_has_the_same_budgets(folder: Path) -> None:
    cache = PromptCache(1 << 20, folder, 1 << 24, 0)
    ask(cache, A)
    copy = pickle.loads(pickle.dumps(cache))
    assert (copy.ram_bytes, copy.stats().entries) == (1 << 20, 0)
    assert copy.disk is not None
    assert copy.disk.store.limit == 1 << 24
    copy.close(), cache.close()


@pytest.mark.parametrize(("free", "expected"), [(1000, 250), (1 << 50, MAX_DISK_BYTES)])
def test_the_default_is_a_share_of_what_is_free_where_the_folder_will_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, expected: int
) -> None:
    class Usage:
        pass

    def usage(path: Path) -> Usage:
        assert path == tmp_path
        found = Usage()
        found.free = free  # type: ignore[attr-defined]
        return found

    monkeypatch.setattr(cache_module.shutil, "disk_usage", usage)
    assert default_disk_bytes(tmp_path / "not" / "there" / "yet") == expected


def test_a_folder_that_cannot_be_used_costs_the_disk_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        cache = PromptCache(1 << 20, tmp_path / "file" / "cache", 1 << 20)
    assert "cannot be used" in caplog.text
    assert (cache.disk, cache.leaves_process) == (None, False)


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
    cache = PromptCache(1 << 20)
    with pytest.raises(ValueError, match="ram_bytes"):
        cache.ram_bytes = -1
    assert cache.ram_bytes == 1 << 20


@pytest.mark.parametrize("given", [np.int64(1 << 20), float(1 << 20)])
def test_a_budget_may_be_any_number(folder: Path, given: object) -> None:
    cache = PromptCache(**dict.fromkeys(BUDGETS, given), disk_dir=folder)  # type: ignore[arg-type]
    assert cache.disk is not None
    assert (cache.ram_bytes, cache.disk.store.limit, cache.disk.writer.budget.hourly) == (1 << 20,) * 3
    assert type(cache.ram_bytes) is int
    ask(cache, A)
    assert cache.close()


def test_a_budget_without_end_is_one() -> None:
    cache = PromptCache(math.inf)  # type: ignore[arg-type]
    assert ask(cache, A).total == len(A)
    assert cache.ram_bytes == sys.maxsize


def test_a_disk_of_no_bytes_is_read_and_stays_as_it_is(folder: Path) -> None:
    filled(folder)
    before = everything(folder)
    cache = PromptCache(1 << 24, folder, 0)
    assert ask(cache, A).source == "disk"
    ask(cache, range(9000, 9300))
    assert cache.close()
    assert everything(folder) == before
    cache.forget(A)
    assert len(everything(folder)) < len(before)


@pytest.mark.parametrize("name", ["~nobody-has-this-name/cache", "cache\0", "cache\ud800"])
def test_a_name_that_no_folder_can_have_costs_the_disk_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.WARNING):
        cache = PromptCache(1 << 20, name)
    assert "cannot be used" in caplog.text
    assert (cache.disk, cache.leaves_process, list(tmp_path.iterdir())) == (None, False, [])


def test_what_no_other_process_will_have_is_not_written(folder: Path) -> None:
    for namespace, written in ((f"here{HERE_ONLY}", False), ("anywhere", True)):
        cache = PromptCache(1 << 24, folder)
        FakeEngine(cache, namespace=namespace, costs=SLOW).request(A)
        assert cache.close()
        assert bool(files(folder)) == written


def test_what_was_forgotten_while_it_was_live_is_not_written(folder: Path) -> None:
    cache = PromptCache(1 << 24, folder)
    engine = FakeEngine(cache, costs=SLOW)
    engine.request(A)
    assert cache.flush()
    assert files(folder)
    cache.forget(A)
    cache.queue_writes(engine.view())
    assert cache.close()
    assert files(folder) == []


def test_what_the_disk_knows_is_not_asked_for_by_memory_that_needs_none(folder: Path) -> None:
    cache = PromptCache(1 << 24, folder)
    ask(cache, A)
    cache.close()
    again = PromptCache(1 << 24, folder)
    FakeEngine(again, "plain", costs=SLOW).request(A)
    assert again.disk is not None
    assert again.disk.store.counts.loaded == 0
    assert FakeEngine(again, costs=SLOW).request(A).source == "disk"
    again.close()


def test_clearing_empties_both_tiers(folder: Path) -> None:
    cache = PromptCache(1 << 24, folder)
    for prompt in (A, B):
        ask(cache, prompt)
    cache.flush()
    cache.clear()
    assert (cache.stats().entries, files(folder)) == (0, [])
    cache.close()


def test_a_checkpoint_that_did_not_prove_right_goes_from_both_tiers(folder: Path) -> None:
    cache = PromptCache(1 << 24, folder)
    ask(cache, A)
    cache.flush()
    with cache.ram.checkpoint_at("model", np.array(A, np.int32)) as checkpoint:
        pass
    assert checkpoint is not None
    entries, records = cache.stats().entries, len(files(folder))
    cache.drop(checkpoint)
    assert (cache.stats().entries, len(files(folder))) == (entries - 1, records - 1)
    cache.drop(checkpoint)
    assert cache.stats().entries == entries - 1
    cache.close()


def test_what_is_forgotten_is_gone_from_both_tiers(folder: Path) -> None:
    cache = PromptCache(1 << 24, folder)
    ask(cache, A)
    cache.flush()
    held = cache.stats().bytes_ram
    assert cache.forget([5, 6, 7]) == 0
    assert cache.forget(A) == held
    assert (cache.stats().bytes_ram, files(folder)) == (0, [])
    cache.close()


NO_PATHS = ["123", b"123", 5, None, {1: 2}, iter(A), [[1, 2]], [1, [2]], [1.7, 2.0], ["1"], [None], [1 << 31]]


@pytest.mark.parametrize("what", ["pin", "unpin", "forget"])
@pytest.mark.parametrize("prefix", NO_PATHS, ids=lambda prefix: type(prefix).__name__)
def test_what_are_no_token_ids_is_an_error_and_costs_nothing(what: str, prefix: object) -> None:
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


def test_it_serves_others_while_there_are_several_contexts(tmp_path: Path) -> None:
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
