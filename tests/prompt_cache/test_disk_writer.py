"""What is written, when, and how much; a writer that outlives exceptions, interrupts, forks, forgetting."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from llamahybrid.prompt_cache import PromptCache, disk_tier, disk_writer, refusals, write_behind
from llamahybrid.prompt_cache.disk import RecordStore
from llamahybrid.prompt_cache.disk_writer import DiskWriter
from llamahybrid.prompt_cache.envelope import sealed
from llamahybrid.prompt_cache.write_policy import MOST_SECONDS, QUIET_SECONDS
from tests.lab.fake_engine import FakeEngine
from tests.lab.integrity import check_integrity

from .asking import SLOW, A, B, C, ask, everything, files

TEXT = np.array(A[160:190], np.int32).tobytes()


class Gate:
    """Holds up every write to a disk until it is opened."""

    def __init__(self, monkeypatch) -> None:
        self.open, self.met = threading.Event(), threading.Event()
        prepare = RecordStore.prepare

        def slowly(store: RecordStore, key: str, parts: tuple[bytes, memoryview]) -> str:
            part = prepare(store, key, parts)
            self.met.set()
            self.open.wait(30)
            return part

        monkeypatch.setattr(RecordStore, "prepare", slowly)


@pytest.fixture
def gate(monkeypatch) -> Iterator[Gate]:
    one = Gate(monkeypatch)
    yield one
    one.open.set()


def writer_of(cache: PromptCache) -> DiskWriter:
    assert cache.disk is not None
    return cache.disk.writer


def ends(folder: Path, sort: str) -> list[int]:
    """Where the stored states of a sort end."""
    names = [path.stem.split("-") for path in files(folder)]
    return sorted(int(name[3]) for name in names if name[1] == sort)


# -- what is written -----------------------------------------------------------------------------------


def test_a_turn_leaves_its_tip_and_its_prompt(folder: Path) -> None:
    cache = PromptCache(1 << 24, folder)
    engine = FakeEngine(cache, costs=SLOW)
    engine.prefill(A[:120])
    engine.generate(range(7000, 7080))
    assert cache.stats().entries > 2
    cache.close()
    assert (ends(folder, "prompt"), ends(folder, "state")) == ([120], [200])
    extra = cache.stats().extra
    assert extra["disk_written_bytes"] == extra["disk_bytes"] == sum(p.stat().st_size for p in files(folder))


def test_where_a_message_starts_is_written_in_place_of_the_prompts_end(folder: Path) -> None:
    cache = PromptCache(1 << 24, folder)
    engine = FakeEngine(cache, costs=SLOW)
    engine.prefill(A[:120], boundaries=[50, 112])
    engine.generate(range(7000, 7080))
    cache.close()
    assert (ends(folder, "prompt"), ends(folder, "state")) == ([], [112, 200])


def test_a_conversation_in_full_swing_is_not_written_turn_by_turn(folder: Path) -> None:
    cache = PromptCache(1 << 24, folder)
    engine = FakeEngine(cache, costs=SLOW)
    for _ in range(10):
        engine.prefill([*engine.state, *A[:50]])
        engine.generate(range(7000, 7080))
    assert not files(folder)
    cache.close()
    assert (ends(folder, "prompt"), ends(folder, "state")) == ([1220], [1300])
    assert cache.stats().extra["disk_superseded"] >= 18
    again = FakeEngine(PromptCache(1 << 24, folder), costs=SLOW)
    assert again.prefill([*engine.state, 1, 2]).cached == 1300


def test_a_conversation_that_never_stands_still_is_written_now_and_then(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr("llamahybrid.prompt_cache.disk_writer.MOST_SECONDS", 0.0)
    cache = PromptCache(1 << 24, folder)
    engine = FakeEngine(cache, costs=SLOW)
    engine.prefill(A)
    end = time.monotonic() + 20
    while len(writer_of(cache)) and time.monotonic() < end:
        time.sleep(0.01)
    assert ends(folder, "prompt") == [300]


def test_a_conversation_that_stands_still_is_written_without_being_told(folder: Path) -> None:
    cache = PromptCache(1 << 24, folder)
    writer_of(cache).quiet_seconds = 0.01
    ask(cache, A)
    end = time.monotonic() + 20
    while len(writer_of(cache)) and time.monotonic() < end:
        time.sleep(0.01)
    assert ends(folder, "state") == [400]


def test_a_turn_puts_off_what_waits_and_not_for_ever(folder: Path, monkeypatch) -> None:
    start = time.monotonic() + 10_000  # the writer's own clock does not get there
    clock = [start]
    monkeypatch.setattr(disk_writer, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    cache = PromptCache(1 << 24, folder)
    engine = FakeEngine(cache, costs=SLOW)

    def due() -> set[float]:
        found: list[float] = []
        writer_of(cache).queue.change(lambda jobs: found.extend(job.due - start for job in jobs) or jobs)
        return set(found)

    for later, wanted in (
        (0.0, QUIET_SECONDS),
        (QUIET_SECONDS / 2, 1.5 * QUIET_SECONDS),
        (MOST_SECONDS - 1, MOST_SECONDS),
    ):
        clock[0] = start + later
        engine.prefill([*engine.state, *A[:50]])
        engine.generate(range(7000, 7080))
        assert due() == {wanted}
        clock[0] += QUIET_SECONDS / 4
        cache.queue_writes(engine.view())
        assert due() == {wanted}, "what waits already is not put off"


def test_where_paths_have_parted_is_written(folder: Path) -> None:
    cache = PromptCache(1 << 24, folder)
    for prompt in (A, B, [*A[:150], 9, 9, 9]):
        ask(cache, prompt)
    cache.close()
    assert 150 in ends(folder, "state")


def test_nothing_is_written_beyond_the_budget_and_it_is_said(folder: Path) -> None:
    for hourly, most in ((0, 0), (3000, 6000)):
        cache = PromptCache(1 << 24, folder / str(hourly), 1 << 30, hourly)
        for n in range(12):
            ask(cache, [n, *A])
        assert not cache.close()
        extra = cache.stats().extra
        assert extra["disk_deferred"] > 0
        assert extra["disk_written_bytes"] <= most + 4000  # the last one may be larger than what is left
        assert sum(p.stat().st_size for p in files(folder / str(hourly))) == extra["disk_written_bytes"]


def test_nothing_is_written_that_could_not_be_read_again(folder: Path) -> None:
    cache = PromptCache(1 << 24, folder)
    engine = FakeEngine(cache, costs=SLOW, pages=False)
    engine.prefill(A)
    assert cache.close()
    assert not files(folder)


def test_a_state_whose_attention_is_gone_is_not_written(folder: Path, monkeypatch) -> None:
    cache = PromptCache(1 << 24, folder)
    ask(cache, A)
    monkeypatch.setattr(cache.ram, "attention", lambda *_: [])
    cache.flush()
    assert not files(folder)
    assert cache.stats().extra["disk_dropped"] > 0


def test_a_record_that_could_not_be_finished_leaves_no_part(folder: Path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(RecordStore, "commit", fail)
    cache = PromptCache(1 << 24, folder)
    ask(cache, A)
    assert not cache.flush()
    assert not list(folder.glob("*/*/*"))


def test_a_disk_that_refused_is_not_asked_for_each_state(folder: Path, monkeypatch) -> None:
    asked = []

    def refuse(*_: object) -> None:
        asked.append(1)
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(RecordStore, "prepare", refuse)
    cache = PromptCache(1 << 24, folder)
    for prompt in (A, C):
        ask(cache, prompt)
        assert not cache.flush()
    assert asked == [1]
    assert cache.stats().extra["disk_errors"] > 1


def test_what_the_disk_refused_is_written_when_it_takes_it_again(folder: Path, monkeypatch) -> None:
    refused: list[str] = []

    def refuse(_: RecordStore, key: str, *__: object) -> None:
        refused.append(key)
        raise OSError(errno.ENOSPC, "no space left")

    cache = PromptCache(1 << 24, folder)
    with monkeypatch.context() as patch:
        patch.setattr(RecordStore, "prepare", refuse)
        for prompt in (A, C):
            ask(cache, prompt)
            assert not cache.flush()
            assert not cache.flush()  # nobody waits for the next try, and nothing is taken for written
        waiting = len(writer_of(cache))
        assert waiting > 1
    until = time.monotonic() + 30
    while not cache.flush():
        assert time.monotonic() < until
    assert len(writer_of(cache)) == 0
    assert len(refused) < waiting
    assert ends(folder, "state") == [300, 400]


def test_it_is_tried_again_without_being_told(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(refusals, "FIRST_BACKOFF_SECONDS", 0.01)
    refusals_left, prepare = [1, 1], RecordStore.prepare

    def refuse(store: RecordStore, key: str, parts: tuple[bytes, memoryview]) -> str:
        if refusals_left:
            refusals_left.pop()
            raise OSError(errno.ENOSPC, "no space left")
        return prepare(store, key, parts)

    monkeypatch.setattr(RecordStore, "prepare", refuse)
    cache = PromptCache(1 << 24, folder)
    ask(cache, A)
    cache.flush()
    until = time.monotonic() + 30
    while len(writer_of(cache)):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert ends(folder, "state") == [400]


def test_what_is_sealed_for_something_else_is_not_written(folder: Path) -> None:
    """The name of what computes changed between a look at it and the seal."""
    cache, engine = PromptCache(1 << 24, folder), FakeEngine(PromptCache(1 << 20))
    engine.decode(A)
    view, path = engine.view(), np.array(A, np.int32)
    for namespace, tokens, written in (("other", path, 0), ("model", path[:-1], 0), ("model", path, 1)):
        state = sealed(np.zeros(64, np.uint8), namespace=namespace, tokens=tokens)
        assert cache.admit(view, len(A), state)
        cache.disk.later(replace(view, needs_attention=False), path, [(len(A), False)])  # type: ignore[union-attr]
        assert cache.flush()
        assert len(files(folder)) == written


# -- a writer that goes on -----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ZeroDivisionError, MemoryError, KeyboardInterrupt, SystemExit])
def test_the_writer_outlives_whatever_is_raised(folder: Path, monkeypatch, caplog, error: type) -> None:
    cache = PromptCache(1 << 24, folder)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):

        def fail(*_: object) -> None:
            raise error("surprise")

        patch.setattr(RecordStore, "prepare", fail)
        for prompt in (A, B):
            ask(cache, prompt)
            assert not cache.flush(20)
    assert sum("surprise" in r.message for r in caplog.records) == 1
    ask(cache, C)
    assert cache.flush(20)
    assert ends(folder, "state") == [300]


def test_waiting_is_bounded_and_says_what_was_not_written(
    folder: Path, gate: Gate, caplog, monkeypatch
) -> None:
    monkeypatch.setattr(write_behind, "FLUSH_SECONDS", 0.2)
    cache = PromptCache(1 << 24, folder)
    ask(cache, A)
    assert not cache.flush(0.1)
    assert not cache.flush()
    with caplog.at_level(logging.WARNING):
        assert not cache.close()
    assert "were not written" in caplog.text
    gate.open.set()
    assert cache.flush(20)
    assert ends(folder, "state") == [400]


def test_what_is_forgotten_leaves_the_queue_too(folder: Path) -> None:
    cache = PromptCache(1 << 24, folder)
    ask(cache, A)
    ask(cache, C)
    assert not files(folder)
    assert cache.disk.forget(np.array(A[:20], np.int32))  # type: ignore[union-attr]
    assert cache.flush()
    assert ends(folder, "state") == [300]
    assert not any(TEXT in (raw or b"") for raw in everything(folder).values())


def test_no_tokens_are_no_path_to_forget(folder: Path) -> None:
    cache = PromptCache(1 << 24, folder)
    ask(cache, A)
    waiting = len(writer_of(cache))
    assert writer_of(cache).cancel(np.array([], np.int32), 0.0)
    assert len(writer_of(cache)) == waiting > 0
    assert cache.close()


def test_what_is_forgotten_while_it_is_written_never_becomes_a_record(folder: Path, gate: Gate) -> None:
    cache = PromptCache(1 << 24, folder)
    ask(cache, A)
    writer_of(cache).queue.flush(0)
    assert gate.met.wait(20)
    assert cache.disk is not None
    assert not cache.disk.forget(np.array(A[:160], np.int32), 0.1)  # it cannot be waited for any longer
    gate.open.set()
    cache.flush(20)
    assert files(folder) == []
    assert cache.disk.forget(np.array(A[:160], np.int32))
    assert not any(TEXT in (raw or b"") for raw in everything(folder).values())


@pytest.mark.parametrize("forget", ["forget", "clear"])
def test_forgetting_waits_for_what_is_being_written(folder: Path, gate: Gate, forget: str) -> None:
    cache = PromptCache(1 << 24, folder)
    ask(cache, A)
    writer_of(cache).queue.flush(0)
    assert gate.met.wait(20)
    assert cache.disk is not None
    threading.Timer(0.2, gate.open.set).start()
    assert cache.disk.forget(np.array(A, np.int32)) if forget == "forget" else cache.disk.clear()
    assert not any(TEXT in (raw or b"") for raw in everything(folder).values())
    cache.flush()
    assert files(folder) == []


def test_another_path_goes_on_being_written(folder: Path, gate: Gate) -> None:
    cache = PromptCache(1 << 24, folder)
    ask(cache, C)
    writer_of(cache).queue.flush(0)
    assert gate.met.wait(20)
    assert cache.disk is not None
    assert cache.disk.forget(np.array(A, np.int32), 0.0)
    gate.open.set()
    assert cache.flush()
    assert ends(folder, "state") == [300]


FORK = """
import os, sys, threading, time
import numpy as np
from llamahybrid.prompt_cache import PromptCache
from llamahybrid.prompt_cache.disk import RecordStore
from tests.lab.integrity import check_integrity
from tests.prompt_cache.asking import A, B, C, ask
cache = PromptCache(1 << 24, sys.argv[1])
ask(cache, A)
cache.flush()
write = RecordStore.prepare
def slowly(*arguments):
    time.sleep(0.5)
    return write(*arguments)
RecordStore.prepare = slowly
ask(cache, B)
cache.disk.writer.queue.flush(0)
time.sleep(0.1)
held = threading.Event()
def hold():
    with cache.ram.guard.lock, cache.disk.store.guard.lock, cache.disk.writer.queue.lock:
        held.set()
        time.sleep(1)
if sys.argv[2] == "locked":
    threading.Thread(target=hold, daemon=True).start()
    held.wait()
pid = os.fork()
if pid == 0:
    RecordStore.prepare = write
    ok = len(cache.disk.writer) == 0 and cache.flush(30)
    ok = ok and ask(PromptCache(1 << 24, sys.argv[1]), A).source == "disk"
    ask(cache, C)
    ok = ok and cache.flush(10) and cache.disk.forget(np.array([1, 2, 3], np.int32))
    check_integrity(cache)
    os._exit(0 if ok else 1)
end = time.monotonic() + 90
while (done := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < end:
    time.sleep(0.01)
if not done[0]:
    os.kill(pid, 9)
print("child", os.waitstatus_to_exitcode(done[1]) if done[0] else "stuck")
print("parent", cache.flush(30))
check_integrity(cache)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
@pytest.mark.parametrize("how", ["writing", "locked"])
def test_a_forked_process_goes_on_without_its_parents_writer(folder: Path, how: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", FORK, str(folder), how],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert (run.stdout.split("\n")[:2], run.returncode) == (["child 0", "parent True"], 0), run.stderr
    again = PromptCache(1 << 24, folder)
    for prompt in (A, B, C):
        assert ask(again, prompt).source == "disk"


def test_a_stopped_process_in_the_middle_of_a_write_holds_nobody_up(folder: Path, gate: Gate) -> None:
    first = PromptCache(1 << 24, folder)
    ask(first, A)
    writer_of(first).queue.flush(0)
    assert gate.met.wait(20)  # from here on it is as if it had been stopped
    store = RecordStore(folder)
    second = PromptCache(1 << 24, folder)
    assert ask(second, C).cached == 0
    assert second.disk is not None
    assert second.disk.forget(np.array(C, np.int32))
    assert store.keys() == []


PACKAGE = str(Path(disk_tier.__file__).parent)
ROOMS = ("disk.py", "disk_folder.py", "disk_index.py", "disk_store.py", "disk_tier.py")
ROOMS += ("disk_writer.py", "envelope.py", "guard.py", "nodes.py", "records.py", "tree.py")
ROOMS += ("write_behind.py", "write_policy.py")
STRIDE = 9
"""Every so many-th line: all of them take minutes."""


def tracer(do):
    """A trace function that calls `do(file, line)` on every line of the disk tier, in this thread."""

    def step(frame, event, _):
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE) or not name.endswith(ROOMS):
            return None
        if event == "line":
            do(name, frame.f_lineno)
        return step

    return step


def conversation(cache: PromptCache) -> None:
    for prompt in (A, C, [*A, 5]):
        ask(cache, prompt)
        cache.flush(20)
    assert cache.disk is not None
    cache.disk.forget(np.array(C, np.int32))


def test_an_interrupt_at_any_line_leaves_a_tier_that_works(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []
    conversation(PromptCache(1 << 24, tmp_path / "warm"))
    sys.settrace(tracer(lambda *at: seen.append(at)))
    try:
        conversation(PromptCache(1 << 24, tmp_path / "lines"))
    finally:
        sys.settrace(None)
    for number, target in enumerate(sorted(set(seen))[::STRIDE]):
        cache = PromptCache(1 << 24, tmp_path / str(number))
        ask(cache, B)
        armed = [True]

        def interrupt(*at: object, target=target, armed=armed) -> None:
            if armed and at == target:
                armed.clear()
                raise KeyboardInterrupt

        sys.settrace(tracer(interrupt))
        try:
            conversation(cache)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        again = PromptCache(1 << 24)  # the RAM tier has tests of its own
        again.disk = cache.disk
        if again.disk is not None:
            writer = again.disk.writer
            writer.source = again.ram
            check_integrity(again.disk.store)
            ask(again, A[:250])
            assert again.flush(20), target
            assert (
                FakeEngine(PromptCache(1 << 24, tmp_path / str(number)), costs=SLOW).prefill(A[:250]).cached
                == 250
            )
            check_integrity(again)
