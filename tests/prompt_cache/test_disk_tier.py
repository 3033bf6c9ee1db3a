"""What the disk tier does for conversations: they outlive the process, and nothing wrong ever comes back."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamahybrid.prompt_cache import Costs, PromptCache
from llamahybrid.prompt_cache.disk import RecordStore
from llamahybrid.prompt_cache.records import read_head
from tests.lab import disk_fuzz
from tests.lab.fake_engine import FakeAttention, FakeEngine, Kind
from tests.lab.integrity import check_integrity

from .asking import SLOW, A, B, C, ask, files

KINDS: tuple[Kind, ...] = ("recurrent", "hybrid", "window")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def opened(folder: Path) -> Iterator[object]:
    """Makes caches on `folder`, as one process after the other would."""
    caches: list[PromptCache] = []

    def make(ram_bytes: int = 1 << 24, disk_bytes: int = 1 << 30) -> PromptCache:
        for cache in caches:
            cache.close()
            check_integrity(cache)
        caches.append(PromptCache(ram_bytes, folder, disk_bytes))
        return caches[-1]

    yield make
    for cache in caches:
        cache.close()
        check_integrity(cache)


@pytest.mark.parametrize("kind", KINDS)
def test_conversations_outlive_the_process(opened, kind: Kind) -> None:
    cache = opened()
    for prompt in (A, B, C):
        ask(cache, prompt, kind)
    cache = opened()
    for prompt in (A, B, C):
        plan = ask(cache, prompt, kind)
        assert (plan.cached, plan.source) == (len(prompt), "disk")
    assert ask(cache, [*A, *C], kind).cached == len(A)
    assert cache.stats().extra["disk_damaged"] == 0


def decoded_with_and_without_restarts(opened, turns: list[list[int]]) -> tuple[list[int], list[int]]:
    decoded: dict[bool, list[int]] = {}
    for restarting in (False, True):
        cache = PromptCache(1 << 24) if not restarting else opened()
        decoded[restarting] = []
        for turn in turns:
            decoded[restarting].append(ask(cache, turn).to_decode)
            cache = opened() if restarting else cache
    return decoded[False], decoded[True]


def test_a_restart_costs_nothing_where_conversations_go_on(opened) -> None:
    turns = [A, [*A, 1, 2, 3], [*A, 1, 2, 4], C, [*A, *range(7000, 7100), 5, 6], [*C, 9], A]
    stayed, restarted = decoded_with_and_without_restarts(opened, turns)
    assert restarted == stayed


def test_where_paths_part_a_restart_costs_the_way_from_there_once(opened) -> None:
    turns = [A, B, [*B[:150], 5], [*A[:150], 6, 7], [*A[:150], 6, 8]]
    stayed, restarted = decoded_with_and_without_restarts(opened, turns)
    assert restarted[1] == 300  # not every checkpoint is written: no conversation had gone on from there
    assert max(restarted[2:]) <= 2  # but now they have
    assert sum(restarted) <= sum(stayed) + 150


def test_another_process_finds_what_this_one_wrote(folder: Path) -> None:
    first, second = PromptCache(1 << 24, folder), PromptCache(1 << 24, folder)
    ask(first, A)
    first.flush()
    assert ask(second, A).source == "disk"
    ask(second, C)
    second.flush()
    assert ask(first, C).source == "disk"


def test_state_of_another_model_is_not_matched(opened) -> None:
    ask(opened(), A)
    engine = FakeEngine(opened(), namespace="other")
    assert engine.prefill(A).cached == 0


@pytest.mark.parametrize("at", [0, 60, 140, 700, -1])
def test_a_damaged_record_is_a_counted_miss(opened, folder: Path, at: int) -> None:
    ask(opened(), A)
    opened()  # everything is written
    for path in files(folder):
        raw = bytearray(path.read_bytes())
        raw[min(at, len(raw) - 1)] ^= 0x40
        path.write_bytes(raw)
    cache = opened()
    assert ask(cache, A).cached == 0
    assert cache.stats().extra["disk_damaged"] > 0
    assert cache.stats().extra["disk_failed"] == 0
    ask(opened(), A)  # what was damaged and not looked at before is now
    assert ask(opened(), A).cached == len(A)  # written anew


def test_no_memory_to_cut_what_was_read_is_a_counted_miss_and_no_damage(
    opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(opened(), A)
    cache = opened()
    records, split = cache.stats().extra["disk_records"], FakeAttention.split

    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(FakeAttention, "split", full)
    assert ask(cache, [*A, 1]).source != "disk"
    stats = cache.stats().extra
    assert (stats["disk_errors"], stats["disk_damaged"], stats["disk_records"]) == (1, 0, records)
    monkeypatch.setattr(FakeAttention, "split", split)
    plan = ask(opened(), [*A, 2])
    assert (plan.source, plan.cached) == ("disk", len(A))


def test_a_missing_file_is_a_miss(opened, folder: Path) -> None:
    ask(opened(), A)
    cache = opened()
    for path in files(folder):
        path.unlink()
    assert ask(cache, A).cached == 0
    assert cache.stats().extra["disk_gone"] > 0


def test_the_next_best_serves_where_the_deepest_is_damaged(opened, folder: Path) -> None:
    engine = FakeEngine(opened(), costs=SLOW)
    engine.prefill(A[:200])
    engine.cache.flush()  # type: ignore[attr-defined]
    engine.prefill(A)
    opened()
    deepest = max(files(folder), key=depth)
    deepest.write_bytes(deepest.read_bytes()[:-3])
    cache = opened()
    plan = FakeEngine(cache, costs=SLOW).prefill(A)
    assert plan.source == "disk"
    assert 200 <= plan.cached < 300


def depth(path: Path) -> int:
    with path.open("rb") as file:
        return read_head(file, path.stat().st_size).end


def test_the_disk_budget_is_kept_and_what_was_used_stays(opened, folder: Path) -> None:
    limit = 200_000
    cache = opened(1 << 24, limit)
    ask(cache, A)
    for i in range(30):
        ask(cache, [*range(20 * i + 10_000, 20 * i + 10_250)])
        if i % 4 == 0:
            ask(opened(1 << 24, limit), A)
            cache = opened(1 << 24, limit)
        assert cache.flush()
        assert RecordStore(folder).nbytes <= limit
    assert cache.stats().extra["disk_evicted"] > 0
    assert ask(opened(1 << 24, limit), A).cached == len(A)


def test_a_pinned_path_stays_on_disk(opened) -> None:
    cache = opened(1 << 24, 200_000)
    ask(cache, A)
    cache.pin(A)
    for i in range(30):
        ask(cache, [*range(20 * i + 10_000, 20 * i + 10_250)])
    assert ask(opened(1 << 24, 200_000), A).cached == len(A)


def test_a_record_beyond_the_budget_is_not_written(opened, folder: Path) -> None:
    cache = opened(1 << 24, 1000)
    ask(cache, A)
    cache.flush()
    assert not files(folder)
    assert cache.stats().extra["disk_failed"] == 0


@pytest.mark.parametrize("forget", [lambda c: c.forget(A[:160]), lambda c: c.clear()])
def test_what_is_forgotten_is_gone_from_disk(opened, folder: Path, forget) -> None:
    cache = opened()
    for prompt in (A, C):
        ask(cache, prompt)
    forget(cache)
    text = np.array(A[160:190], np.int32).tobytes()
    assert not any(text in path.read_bytes() for path in files(folder))
    assert ask(opened(), A).cached == 0


def test_a_checkpoint_that_did_not_prove_right_goes_from_disk(opened) -> None:
    ask(opened(), A)
    cache = opened()
    engine = FakeEngine(cache, costs=SLOW)
    plan = cache.plan(np.array(A, np.int32), engine.view(), (), SLOW)
    cache.release(plan)
    assert plan.checkpoint is not None
    cache.drop(plan.checkpoint)
    again = FakeEngine(opened(), costs=SLOW).prefill(A)
    assert again.cached < plan.cached


def test_ram_is_kept_in_budget_by_what_comes_from_disk(opened) -> None:
    for prompt in (A, B, C):
        ask(opened(), prompt)
    cache = opened(12_000)
    for prompt in (A, B, C, A, B):
        ask(cache, prompt)
        assert cache.stats().bytes_ram <= 12_000


def test_the_disk_is_left_alone_where_decoding_is_faster(opened) -> None:
    for prompt in (A, C):
        ask(opened(), prompt)
    cache = opened()
    ask(cache, C)  # reads, and so knows what reading takes
    assert cache.disk is not None
    fast = Costs(token_seconds=1e-12, prefill_seconds=1e-12)
    assert cache.disk.seconds(1000) > 1e-9
    assert FakeEngine(cache, costs=fast).prefill(A).source != "disk"
    slow = Costs(token_seconds=1.0, prefill_seconds=1.0)
    assert FakeEngine(PromptCache(1 << 24, cache._arguments[0][0]), costs=slow).prefill(A).source == "disk"


def test_a_folder_that_cannot_be_used_costs_a_warning(tmp_path: Path, caplog) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        cache = PromptCache(1 << 24, tmp_path / "file" / "cache")
    assert len(caplog.records) == 1
    assert ask(cache, A).cached == 0
    assert ask(cache, A).cached == len(A)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_refuses_costs_one_warning(opened, monkeypatch, caplog, code: int) -> None:
    cache = opened()
    ask(cache, C)
    cache.flush()

    def refuse(*_: object) -> None:
        raise OSError(code, "no")

    monkeypatch.setattr(RecordStore, "prepare", refuse)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            ask(cache, A)
            assert ask(cache, B).source in ("ram", "none")
            assert not cache.flush(10)
    assert len([r for r in caplog.records if "disk" in r.message]) == 1
    assert cache.stats().extra["disk_failed"] == 1


def test_a_full_disk_for_real(folder: Path) -> None:
    """A process whose files may not grow: SQLite and the records both meet it."""
    code = f"""
import logging, random, resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from tests.lab import disk_fuzz
from tests.lab.fake_engine import CHEAP, FakeEngine, Kind
from llamahybrid.prompt_cache.cache import PromptCache
cache, rng = PromptCache(1 << 26, {str(folder)!r}, 1 << 40), random.Random(5)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for _ in range(30):
    disk_fuzz.turn(cache, rng)
cache.close()
print(cache.stats().extra["disk_failed"])
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (run.returncode, run.stdout.strip()) == (0, "1"), run.stderr
    assert run.stderr.count("writing to the disk cache failed") == 1
    assert run.stderr.count("were not written to the disk cache") == 1
    cache = PromptCache(1 << 24, folder)
    assert ask(cache, A).cached == 0
    assert cache.flush()
    assert cache.stats().extra["disk_failed"] == 0


def test_what_was_evicted_before_it_could_be_written_is_counted(opened, monkeypatch) -> None:
    import threading

    gate, prepare = threading.Event(), RecordStore.prepare

    def slowly(store: RecordStore, key: str, parts: tuple[bytes, memoryview]) -> str:
        gate.wait(10)
        return prepare(store, key, parts)

    monkeypatch.setattr(RecordStore, "prepare", slowly)
    cache = opened(12_000)
    for prompt in (A, B, C):
        ask(cache, prompt)
    gate.set()
    cache.flush()
    check_integrity(cache)
    assert cache.stats().extra["disk_dropped"] > 0
    for prompt in (A, B, C):
        ask(opened(), prompt)  # the fake engine tells a wrong restore


@settings(max_examples=40)
@given(st.data())
def test_random_histories_with_restarts(tmp_path_factory, data: st.DataObject) -> None:
    """Asking, restarting, starving and damaging in any order; the fake engine tells what is wrong."""
    folder = tmp_path_factory.mktemp("cache")
    kind: Kind = data.draw(st.sampled_from(KINDS))
    budget = data.draw(st.sampled_from([4_000, 12_000, 1 << 20]))
    cache = PromptCache(budget, folder, data.draw(st.sampled_from([60_000, 1 << 30])))
    engine = FakeEngine(cache, kind, costs=SLOW)
    prompts = [A, B, C, A[:200], [*B[:220], *C]]
    for _ in range(data.draw(st.integers(2, 10))):
        step = data.draw(st.sampled_from(["ask", "ask", "ask", "extend", "restart", "damage"]))
        if step == "ask":
            engine.prefill(data.draw(st.sampled_from(prompts)))
            engine.generate(range(8000, 8000 + data.draw(st.integers(0, 90))))
        elif step == "extend":
            engine.prefill([*engine.state, *range(9000, 9000 + data.draw(st.integers(1, 60)))])
        elif step == "restart":
            cache.close()
            cache = PromptCache(budget, folder)
            engine = FakeEngine(cache, kind, costs=SLOW)
        else:
            which, at = data.draw(st.integers(0, 1 << 20)), data.draw(st.integers(0, 1 << 20))
            cache.flush()
            for path in files(folder)[which % 8 :: 8]:  # as many files may be damaged as there are
                raw = bytearray(path.read_bytes())
                raw[at % len(raw)] ^= 1 << (at % 8)
                path.write_bytes(raw)
        check_integrity(cache)
    cache.close()


def test_a_closed_cache_leaves_no_thread(opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamahybrid.prompt_cache.write_behind.IDLE_SECONDS", 600.0)
    others = set(threading.enumerate())
    cache = opened()
    ask(cache, A, "hybrid")
    cache.flush()
    (thread,) = (t for t in threading.enumerate() if t not in others)
    assert thread.is_alive()  # more may come
    cache.close()
    thread.join(20)
    assert not thread.is_alive()


def test_killed_writers_lose_nothing_they_reported(tmp_path: Path) -> None:
    for seed in range(3):
        reported, _ = disk_fuzz.kill_one(tmp_path, seed)
        assert reported > 0


def test_several_processes_share_a_folder() -> None:
    from rich.console import Console

    disk_fuzz.hammer(2, 2.0, 0, Console(quiet=True))


def test_attention_of_a_path_that_left_is_not_taken_for_this_one(opened) -> None:
    cache = opened()
    FakeEngine(cache, costs=SLOW).prefill(B)
    assert cache.ram.attention("model", np.array(B, np.int32), 0, 300)
    for end in (150, 200, 300):  # A leaves B at 150, inside what is stored
        for segment in cache.ram.attention("model", np.array(A, np.int32), 0, end):
            assert segment.end <= 150
