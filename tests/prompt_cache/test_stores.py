"""One contract for RAM, a folder and a Redis server: what was kept serves, nothing wrong ever comes back."""

from __future__ import annotations

import errno
import logging
import pickle
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from llamahybrid.errors import RecordError
from llamahybrid.prompt_cache import Costs, PromptCache
from llamahybrid.prompt_cache.base import HERE_ONLY
from llamahybrid.prompt_cache.block_store import BlockStore
from llamahybrid.prompt_cache.envelope import sealed
from llamahybrid.prompt_cache.folder import FOLDER, FOREIGN
from llamahybrid.prompt_cache.store import RamStore
from tests.lab import disk_fuzz
from tests.lab.descriptors import no_descriptors
from tests.lab.fake_engine import FakeEngine, Kind
from tests.lab.integrity import check_integrity
from tests.lab.redis_server import RedisServer
from tests.lab.waiting import wait_until

from .asking import SLOW, A, B, C, ask
from .stores import DEADLINE, FolderStore, MemoryStore, Operation, ServerStore, Store
from .test_envelope import MADE_UP, made_up

KINDS: tuple[Kind, ...] = ("recurrent", "hybrid", "window")
SECRET = np.array(A[160:190], np.int32).tobytes()
"""Tokens of A alone, as they lie in rows."""


def chat(number: int) -> list[int]:
    """A prompt of 250 tokens; chats of other numbers part from it at once."""
    return [10_000 + number, *range(250)]


def planned(cache: PromptCache, prompt: list[int]) -> int:
    """Tokens of a prompt that a new context would not decode."""
    engine = FakeEngine(cache, costs=SLOW)
    plan = cache.plan(np.array(prompt, np.int32), engine.view(), (), SLOW)
    cache.release(plan)
    return plan.cached


class StoreContract:
    """What every store does."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        raise NotImplementedError

    @pytest.mark.parametrize("kind", KINDS)
    def test_conversations_are_resumed_at_their_tip(self, store: Store, kind: Kind) -> None:
        cache = store.open()
        for prompt in (A, B, C):
            ask(cache, prompt, kind)
        cache = store.open()
        for prompt in (A, B, C):
            plan = ask(cache, prompt, kind)
            assert (plan.cached, plan.source) == (len(prompt), store.name)
            again = ask(cache, [*prompt, *range(7000, 7100), 5], kind)
            assert (again.cached, again.source) == (len(prompt) + 100, "ram")

    def test_a_context_that_cannot_load_attention_is_not_served(self, store: Store) -> None:
        ask(store.open(), A)
        cache = store.open()
        assert FakeEngine(cache, costs=SLOW, pages=False).request([*A, 1]).cached == 0
        assert planned(cache, [*A, 1]) == len(A)

    def test_state_of_another_model_does_not_serve(self, store: Store) -> None:
        ask(store.open(), A)
        cache = store.open()
        for namespace in ("model+salt", "mode", "model2"):
            plan = FakeEngine(cache, namespace=namespace, costs=SLOW).request(A)
            assert (plan.cached, plan.matched) == (0, 0)

    def test_a_path_that_leaves_a_stored_one_is_served_no_further(self, store: Store) -> None:
        for prompt in (A, B, [*B[:150], 5]):
            ask(store.open(), prompt)
        cache = store.open()
        assert planned(cache, [*A[:150], 6, 7]) == 150
        assert 0 < planned(cache, [*A[:299], 8, 8]) <= 299
        assert planned(cache, [A[0] + 1, *A[1:]]) == 0

    def test_a_forgotten_path_is_gone_and_others_stay(self, store: Store) -> None:
        cache = store.open()
        longer = [*A, *range(3000, 3100)], [*A, *range(4000, 4100)]
        for prompt in (A, C, *longer):
            ask(cache, prompt)
        cache.flush()
        assert store.name == "ram" or SECRET in store.at_rest()
        assert cache.forget([5, 6, 7]) == cache.forget([]) == 0
        assert cache.forget(A[:160]) > 0
        again = store.open()
        for prompt in (A, *longer):
            assert planned(again, [*prompt, 1]) == 0
        assert planned(again, [*C, 1]) == len(C)
        assert SECRET not in store.at_rest()

    def test_a_path_is_forgotten_whose_end_is_not_stored(self, store: Store) -> None:
        cache = store.open()
        ask(cache, A)
        ask(cache, C)
        cache.flush()
        cache.forget([*A, *range(7000, 7101)])  # the last one is not decoded
        again = store.open()
        assert planned(again, [*A, 1]) == 0
        assert planned(again, [*C, 1]) == len(C)
        assert SECRET not in store.at_rest()

    def stored(self, store: Store) -> dict[str, bytes]:
        """All records of a store that has any."""
        return {} if store.name == "ram" else store.records()

    def test_clearing_leaves_nothing(self, store: Store) -> None:
        cache = store.open()
        for prompt in (A, B):
            ask(cache, prompt)
        cache.flush()
        cache.clear()
        assert (cache.stats().entries, self.stored(store)) == (0, {})
        assert planned(store.open(), [*A, 1]) == 0

    @pytest.mark.parametrize("written", [False, True])
    def test_a_pinned_beginning_outlives_forgetting_what_goes_on_from_it(
        self, store: Store, written: bool
    ) -> None:
        cache = store.open()
        FakeEngine(cache).prefill(C)  # a request tells how attention is cut
        engine = FakeEngine(cache)
        cache.pin(A[:60])
        engine.decode(A[:60])
        assert engine.checkpoint(engine.logits)
        engine.decode(A[60:])
        assert engine.checkpoint()
        engine.page_out()
        assert not written or cache.flush()
        cache.forget(A[:120])
        assert SECRET not in store.at_rest()
        plan = FakeEngine(store.open(), costs=SLOW).prefill(A)
        assert (plan.cached, plan.matched, plan.source) == (60, 60, store.name)

    def test_a_checkpoint_that_did_not_prove_right_is_not_offered_again(self, store: Store) -> None:
        ask(store.open(), A)
        cache = store.open()
        plan = cache.plan(np.array(A, np.int32), FakeEngine(cache).view(), (), SLOW)
        cache.release(plan)
        assert plan.checkpoint is not None
        cache.drop(plan.checkpoint)
        cache.drop(plan.checkpoint)
        assert planned(cache, A) < plan.cached
        assert planned(store.open(), A) < plan.cached


class BoundedContract(StoreContract):
    """What every store does whose bytes are limited here."""

    def test_the_budget_holds_and_what_is_asked_for_again_or_pinned_stays(self, store: Store) -> None:
        cache = store.open(60_000)
        ask(cache, A)
        ask(cache, C)
        cache.pin(C)
        for number in range(16):
            ask(cache, chat(number))
            if number % 3 == 0:
                cache = store.open(60_000)
                cache.pin(C)
                ask(cache, A)
            assert cache.flush()
            stats = cache.stats()
            held = stats.bytes_ram if store.name == "ram" else store.count(cache, "bytes")
            assert held <= 60_000
            assert sum(map(len, self.stored(store).values())) <= 60_000
        cache = store.open(60_000)
        assert planned(cache, A) > 250
        assert planned(cache, C) == len(C)
        assert planned(cache, chat(0)) == 0

    def test_a_record_that_can_never_fit_evicts_nothing(self, store: Store) -> None:
        cache = store.open(60_000)
        ask(cache, C)
        assert cache.flush()
        before = self.stored(store)
        FakeEngine(cache, costs=SLOW, snapshot_bytes=70_000).prefill(A)
        cache.flush()
        assert before.items() <= self.stored(store).items()
        assert planned(store.open(60_000), C) == len(C)


class OutsideContract(StoreContract):
    """What every store outside the process does."""

    @pytest.fixture(autouse=True)
    def impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A store that refused is asked again at once."""
        monkeypatch.setattr("llamahybrid.prompt_cache.breaker.FIRST_BACKOFF_SECONDS", 0.0)
        monkeypatch.setattr("llamahybrid.prompt_cache.loading.UNREADABLE_SECONDS", 0.0)

    # -- damage ------------------------------------------------------------------------------------

    @pytest.mark.parametrize("at", [9, 140, 700, -1])
    def test_a_flipped_bit_is_a_miss_and_is_healed(self, store: Store, at: int) -> None:
        ask(store.open(), A)
        store.open()
        store.damage(lambda raw: bytes(b ^ 0x40 * (n == at % len(raw)) for n, b in enumerate(raw)))
        cache = store.open()
        assert ask(cache, A).cached == 0
        assert store.count(cache, "failed") == 0
        assert store.count(cache, "damaged") > 0
        ask(store.open(), A)  # reads the rest of what is damaged
        cache = store.open()
        assert ask(cache, A).source == store.name
        assert store.count(cache, "damaged") == 0

    @pytest.mark.parametrize("what", [0, 180, -1, "nonsense", "huge", "another's digest"])
    def test_what_is_no_record_of_a_path_is_a_miss_and_costs_no_other(
        self, store: Store, what: int | str
    ) -> None:
        """Truncated to a length, foreign bytes, and sealed ones that lie (`test_envelope` has more)."""
        ask(store.open(), C)
        store.open()
        sound = store.records()
        for prompt in (A, B):
            ask(store.open(), prompt)
        store.open()

        def damaged(raw: bytes) -> bytes:
            if isinstance(what, int):
                return raw[:what]
            return made_up(**MADE_UP[what]) if what in MADE_UP else b"nonsense" * 50

        store.damage(damaged, lambda name: name not in sound)
        cache = store.open()
        assert [planned(cache, prompt) for prompt in ([*A, 1], B, [*C, 1])] == [0, 0, len(C)]
        assert store.count(cache, "errors") == 0
        assert sound.items() <= store.records().items()

    def test_a_record_that_was_read_wrong_once_is_not_removed(self, store: Store) -> None:
        ask(store.open(), A)
        cache = store.open()
        before, real, failed = store.records(), store.rows_class.read, []

        def once(*arguments: object) -> object:
            failed.append(1)
            if len(failed) == 1:
                raise RecordError("a bit was read wrong")
            return real(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store.rows_class, "read", once)
            assert ask(cache, A).source == store.name
        assert before.items() <= store.records().items()

    def test_a_wrong_checkpoint_goes_also_while_reading_is_paused(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ask(store.open(), A)
        cache = store.open()
        plan = cache.plan(np.array(A, np.int32), FakeEngine(cache).view(), (), SLOW)
        cache.release(plan)
        assert plan.checkpoint is not None
        (tier,) = cache.outside
        monkeypatch.setattr(tier.reading, "left", lambda: 60.0)
        cache.drop(plan.checkpoint)
        assert planned(store.open(), A) < plan.cached

    # -- a store that refuses ----------------------------------------------------------------------

    @pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.ESTALE, errno.EACCES, errno.ENOMEM])
    def test_an_error_that_passes_while_reading_removes_nothing(self, store: Store, code: int) -> None:
        for prompt in (A, C):
            ask(store.open(), prompt)
        cache = store.open(disk_write_bytes=0) if store.name == "disk" else store.open()
        before = store.records()
        with store.failing("read", OSError(code, "refused")) as asked:
            assert planned(cache, [*A, 1]) == 0
            assert asked
        assert before.items() <= store.records().items()
        assert store.count(cache, "damaged") == 0
        assert planned(store.open(), [*A, 1]) == len(A)

    @pytest.mark.parametrize(
        "error",
        [
            OSError(errno.ENOSPC, "full"),
            OSError(errno.EROFS, "read-only"),
            MemoryError(),
            KeyboardInterrupt(),
        ],
    )
    def test_a_store_that_takes_nothing_costs_one_warning_and_is_tried_again(
        self, store: Store, caplog: pytest.LogCaptureFixture, error: BaseException
    ) -> None:
        cache = store.open()
        with caplog.at_level(logging.WARNING), store.failing("write", error):
            for prompt in (A, B):
                ask(cache, prompt)
                assert not cache.flush(DEADLINE)
            assert ask(cache, [*A, 1]).cached == len(A), "RAM serves on"
        assert len([r for r in caplog.records if r.name == "llamahybrid"]) == 1
        ask(cache, C)
        wait_until(cache.flush)
        assert planned(store.open(), [*C, 1]) == len(C)

    def test_a_record_that_no_row_could_name_does_not_stay(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object) -> None:
            raise OSError(errno.ENOSPC, "full")

        cache = store.open()
        with monkeypatch.context() as patch:
            patch.setattr(BlockStore, "link", refuse)
            ask(cache, A)
            assert not cache.flush(DEADLINE)
            wait_until(lambda: not store.records())  # the writer tries again

    @pytest.mark.parametrize("what", ["forget", "clear"])
    def test_a_failed_removal_is_said_and_can_be_repeated(
        self, store: Store, caplog: pytest.LogCaptureFixture, what: str
    ) -> None:
        ask(store.open(), A)
        cache = store.open()
        operation: Operation = "remove" if what == "forget" else "clear"

        def remove() -> None:
            cache.forget(A) if what == "forget" else cache.clear()

        with caplog.at_level(logging.WARNING), store.failing(operation, PermissionError(errno.EPERM, "no")):
            for _ in range(2):
                caplog.clear()
                remove()
                assert f"{what} it again" in caplog.text
            assert planned(cache, [*A, 1]) == 0, "it serves nobody meanwhile"
        assert store.records()
        remove()
        assert not store.records()

    def test_a_slow_store_holds_up_no_request_and_flush_says_so(self, store: Store) -> None:
        cache = store.open()
        with store.held("write") as (met, go_on):
            ask(cache, A)
            assert not cache.flush(0.0)
            assert met.wait(DEADLINE)
            assert ask(cache, C).cached == 0
            assert ask(cache, [*A, 1]).cached == len(A)
            assert not cache.flush(0.0)
            go_on.set()
            assert cache.flush()
        assert planned(store.open(), [*A, 1]) >= len(A)

    def test_a_record_forgotten_while_it_is_written_never_appears(self, store: Store) -> None:
        cache = store.open()
        with store.held("write") as (met, go_on):
            ask(cache, A)
            cache.flush(0.0)
            assert met.wait(DEADLINE)
            forgetting = threading.Thread(target=cache.forget, args=(A[:160],))
            forgetting.start()
            wait_until(lambda: cache.stats().entries == 0)
            forgetting.join(1.0)  # one that did not take the write back would be over by now
            go_on.set()
            forgetting.join(DEADLINE)
            assert not forgetting.is_alive()
            assert cache.flush()
        assert not store.records()
        assert SECRET not in store.at_rest()
        assert planned(store.open(), [*A, 1]) == 0

    @pytest.mark.parametrize("what", ["forget", "clear"])
    def test_a_removal_that_comes_late_is_not_lost(self, store: Store, what: str) -> None:
        cache = store.open()
        (tier,) = cache.outside
        with store.held("write") as (met, go_on):
            ask(cache, A)
            cache.flush(0.0)
            assert met.wait(DEADLINE)
            if what == "forget":
                RamStore.forget(cache, np.array(A, np.int32))
                assert not tier.forget(np.array(A, np.int32), 0.01)
            else:
                RamStore.clear(cache)
                assert not tier.clear(0.01)
            assert store.count(cache, "late") > 0
            assert not store.count(cache, "failed"), "writing is not paused"
            go_on.set()
            wait_until(lambda: not store.records() and not len(tier.writer))
        assert cache.flush()
        assert not store.records()

    def test_nothing_more_of_a_forgotten_path_is_written(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each turn of a conversation is a segment of its own, and all wait together."""
        cache, writes = store.open(), list[bytes]()
        (tier,) = cache.outside
        write = store.rows_class.write

        def counted(rows: Any, key: bytes, *arguments: Any) -> Any:
            writes.append(key)
            return write(rows, key, *arguments)

        monkeypatch.setattr(store.rows_class, "write", counted)
        tier.writer.quiet_seconds = 1000.0
        engine = FakeEngine(cache, costs=SLOW)
        for turn in range(12):
            engine.request([*engine.state, *A[10 * turn :][:40]], answer=range(7000, 7040))
        with store.held("write") as (met, go_on):
            flushing = threading.Thread(target=cache.flush)
            flushing.start()
            assert met.wait(DEADLINE)
            RamStore.forget(cache, np.array(A[:10], np.int32))
            go_on.set()
            flushing.join(DEADLINE)
        assert len(writes) == 1

    @pytest.mark.parametrize("what", ["forget", "clear"])
    def test_a_path_in_ram_again_while_it_is_removed_is_not_written_again(
        self, store: Store, what: str
    ) -> None:
        cache = store.open()
        (tier,) = cache.outside
        ask(cache, A)
        assert cache.flush()
        with store.held("remove" if what == "forget" else "clear") as (met, go_on):
            work = partial(tier.forget, np.array(A, np.int32)) if what == "forget" else tier.clear
            removing = threading.Thread(target=work)
            removing.start()
            assert met.wait(DEADLINE)
            ask(cache, A)
            go_on.set()
            removing.join(DEADLINE)
        assert cache.flush()
        assert not store.records()

    @pytest.mark.parametrize("what", ["forget", "clear"])
    def test_a_record_forgotten_while_it_is_read_does_not_serve(self, store: Store, what: str) -> None:
        ask(store.open(), A)
        cache = store.open()
        plans: list[int] = []
        with store.held("read") as (met, go_on):
            reading = threading.Thread(target=lambda: plans.append(planned(cache, [*A, 1])))
            reading.start()
            assert met.wait(DEADLINE)
            cache.forget(A[:20]) if what == "forget" else cache.clear()
            go_on.set()
            reading.join(DEADLINE)
        stats = cache.stats()
        assert (plans, stats.entries, stats.segments) == ([0], 0, 0)
        assert not store.records()

    def test_a_request_that_ends_after_its_path_was_forgotten_writes_nothing(self, store: Store) -> None:
        cache = store.open()
        engine = FakeEngine(cache, costs=SLOW)
        engine.request(A)
        assert cache.flush()
        cache.forget(A)
        engine.page_out()
        assert cache.flush()
        assert not store.records()

    def test_forgetting_removes_records_that_no_row_names(self, store: Store) -> None:
        ask(store.open(), A)
        cache = store.open()
        (tier,) = cache.outside
        tier.rows.update([*tier.rows.keys(b"n")], dict.fromkeys)
        assert planned(cache, [*A, 1]) == 0
        assert store.records()
        cache.forget(A[:20])
        assert not store.records()
        assert SECRET not in store.at_rest()

    # -- what is written ---------------------------------------------------------------------------

    def test_state_valid_in_this_process_alone_is_not_written(self, store: Store) -> None:
        for namespace, written in ((f"here{HERE_ONLY}", False), ("anywhere", True)):
            FakeEngine(store.open(), namespace=namespace, costs=SLOW).request(A)
            store.open()
            assert bool(store.records()) == written

    def test_a_state_sealed_for_something_else_serves_nobody(self, store: Store) -> None:
        """The model's fingerprint changed between a look at it and the seal."""
        for namespace, tokens, served in (("other", A, 0), ("model", A[:-1], 0), ("model", A, len(A))):
            cache = store.open()
            engine = FakeEngine(cache, "recurrent")
            engine.decode(A)
            state = sealed(np.zeros(64, np.uint8), namespace=namespace, tokens=np.array(tokens, np.int32))
            assert cache.admit(engine.view(), len(A), state)
            cache.queue_writes(engine.view())
            assert cache.flush()
            again = store.open()
            view = FakeEngine(again, "recurrent").view()
            plan = again.plan(np.array([*A, 1], np.int32), view, (), SLOW)
            again.release(plan)
            assert plan.cached == served

    def test_a_store_of_no_bytes_is_read_and_left_as_it_is(self, store: Store) -> None:
        ask(store.open(), A)
        store.open()
        before = store.records()
        cache = store.open(0)
        assert ask(cache, A).source == store.name
        ask(cache, C)
        assert cache.close()
        assert store.records() == before
        cache.forget(A)
        assert not store.records()

    def test_a_restart_decodes_no_more_than_a_cache_that_stayed(self, store: Store) -> None:
        turns = [A, [*A, 1, 2, 3], [*A, 1, 2, 4], C, [*A, *range(7000, 7100), 5, 6], [*C, 9], A]
        stayed = PromptCache(1 << 24)
        for turn in turns:
            assert ask(store.open(), turn).cached == ask(stayed, turn).cached

    def test_records_that_are_read_stay_within_the_budget_of_ram(self, store: Store) -> None:
        for prompt in (A, B, C):
            ask(store.open(), prompt)
        cache = store.open(ram_bytes=12_000)
        for prompt in (A, B, C, A, B):
            ask(cache, prompt)
            assert cache.stats().bytes_ram <= 12_000

    def test_a_store_is_left_alone_where_decoding_is_faster(self, store: Store) -> None:
        for prompt in (A, C):
            ask(store.open(), prompt)
        cache = store.open()
        assert ask(cache, C).source == store.name  # now the cost of a read is known
        fast = Costs(token_seconds=1e-12, prefill_seconds=1e-12)
        assert FakeEngine(cache, costs=fast).prefill(A).source != store.name
        assert FakeEngine(store.open(), costs=SLOW).prefill(A).source == store.name

    def test_no_restore_point_beyond_the_limit_is_read(self, store: Store) -> None:
        """Where logits of every position are wanted, those of restored tokens are not there."""
        ask(store.open(), A)
        cache = store.open()
        view = replace(FakeEngine(cache).view(), reuse_limit=len(A) - 1)
        plan = cache.plan(np.array([*A, 1], np.int32), view, (), SLOW)
        assert plan.cached < len(A)

    # -- processes and threads ---------------------------------------------------------------------

    def test_two_caches_share_a_store(self, store: Store) -> None:
        first = store.open()
        second = PromptCache(1 << 24, **store.arguments(None))
        ask(first, A)
        first.flush()
        wait_until(lambda: planned(second, [*A, 1]) == len(A))
        ask(second, C)
        second.flush()
        wait_until(lambda: planned(first, [*C, 1]) == len(C))
        first.forget(A)
        second.ram_bytes = 0
        second.ram_bytes = 1 << 24
        wait_until(lambda: planned(second, [*A, 1]) == 0)
        second.close()

    def test_a_pickled_cache_is_an_empty_one_on_the_same_store(self, store: Store) -> None:
        cache = store.open(1 << 22, 1 << 20)
        ask(cache, A)
        assert cache.flush()
        copy = pickle.loads(pickle.dumps(cache))
        assert (copy.ram_bytes, copy.stats().entries) == (1 << 20, 0)
        assert planned(copy, [*A, 1]) == len(A)
        copy.close()

    def test_a_process_that_ends_without_closing_has_written_its_conversations(
        self, store: Store, tmp_path: Path
    ) -> None:
        run(f"ask(PromptCache(1 << 24, **{store.arguments(None)!r}), A)")
        assert planned(store.open(), [*A, 1]) == len(A)

    @pytest.mark.skipif(sys.platform == "win32", reason="no fork")
    def test_a_forked_process_goes_on_with_nothing_of_its_parents_to_write(self, store: Store) -> None:
        run(FORK.replace("ARGUMENTS", repr(store.arguments(None))))
        cache = store.open()
        for prompt in (A, B, C):
            assert ask(cache, prompt).source == store.name

    def test_a_closed_cache_leaves_no_writing_thread(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("llamahybrid.prompt_cache.worker.IDLE_SECONDS", 600.0)
        cache = store.open()
        before = set(threading.enumerate())
        ask(cache, A)
        cache.flush()
        (thread,) = set(threading.enumerate()) - before
        cache.close()
        thread.join(DEADLINE)
        assert not thread.is_alive()


def run(code: str) -> None:
    """Run Python code in a process of its own."""
    head = "from llamahybrid.prompt_cache import PromptCache\nfrom tests.prompt_cache.asking import *\n"
    done = subprocess.run(
        [sys.executable, "-c", head + code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


FORK = """
import os, signal, threading
cache = PromptCache(1 << 24, **ARGUMENTS)
rows = (cache.disk or cache.remote).rows
ask(cache, A)
assert cache.flush()
write, met, go_on = type(rows).write, threading.Event(), threading.Event()
def held(*arguments):
    met.set()
    go_on.wait(60)
    return write(*arguments)
type(rows).write = held
ask(cache, B)
cache.flush(0.0)  # is being written when the process is forked
assert met.wait(60)
child = os.fork()
if child == 0:
    signal.alarm(100)
    type(rows).write = write
    ask(cache, C)
    done = cache.flush(60)
    other = ask(PromptCache(1 << 24, **ARGUMENTS), A).source != "none"
    os._exit(0 if done and other else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child"
go_on.set()
assert cache.flush(60)
"""


class TestMemory(BoundedContract):
    """RAM."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        made = MemoryStore()
        yield made
        made.close()


@contextmanager
def locked(store: FolderStore) -> Iterator[None]:
    """Another process changes the folder's index."""
    other = sqlite3.connect(store.folder / FOLDER / FOREIGN, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


HARM: dict[str, Callable[[FolderStore], AbstractContextManager[Any]]] = {
    "locked": locked,
    "refused": lambda store: store.failing("read", OSError(errno.EIO, "refused")),
    **({"no descriptors": lambda _: no_descriptors()} if Path("/dev/fd").is_dir() else {}),
}
"""Troubles of a disk that pass."""


class TestFolder(OutsideContract, BoundedContract):
    """A folder."""

    @pytest.fixture
    def store(self, folder: Path) -> Iterator[Store]:
        made = FolderStore(folder)
        yield made
        made.close()

    @settings(
        max_examples=settings().max_examples * 3 // 10,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(data=st.data())
    def test_random_histories_with_restarts_and_damage(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        """Requests, restarts, starvation, and a disk that refuses or loses: no sound record goes with it."""
        store = FolderStore(tmp_path_factory.mktemp("cache"))
        kind: Kind = data.draw(st.sampled_from(KINDS))
        steps = ["ask", "ask", "ask", "extend", "restart", "damage", "forget", *HARM]
        expendable = set[str]()
        budgets = data.draw(st.sampled_from([(60_000, 4_000), (1 << 30, 12_000), (60_000, 1 << 20)]))
        engine = FakeEngine(store.open(*budgets), kind, costs=SLOW)
        prompts = [A, B, C, A[:200], [*B[:220], *C]]
        for _ in range(data.draw(st.integers(2, 10))):
            step = data.draw(st.sampled_from(steps))
            before = store.records()
            if step == "ask":
                engine.request(
                    data.draw(st.sampled_from(prompts)),
                    answer=range(8000, 8000 + data.draw(st.integers(0, 90))),
                )
            elif step == "extend":
                engine.prefill([*engine.state, *range(9000, 9000 + data.draw(st.integers(1, 60)))])
            elif step == "restart":
                engine = FakeEngine(store.open(*budgets), kind, costs=SLOW)
            elif step in HARM:
                with HARM[step](store):
                    engine.request(data.draw(st.sampled_from(prompts)))
            elif step == "forget":
                expendable |= before.keys()
                engine.cache.forget(data.draw(st.sampled_from(prompts))[: data.draw(st.integers(1, 200))])
            else:
                which, at = data.draw(st.integers(0, 7)), data.draw(st.integers(0, 1 << 20))
                for number, (name, raw) in enumerate(store.records().items()):
                    if number % 8 == which:
                        expendable.add(name)
                        store.put(
                            name,
                            raw[: at % len(raw)] + bytes([raw[at % len(raw)] ^ 1]) + raw[at % len(raw) + 1 :],
                        )
            store.caches[-1].flush()
            check_integrity(store.caches[-1])
            assert budgets[0] < 1 << 30 or not before.keys() - store.records().keys() - expendable, step
        store.close()

    def test_killed_writers_lose_nothing_they_reported(self, tmp_path: Path) -> None:
        """kill -9 while records are written; what is there is right, and the folder is used on."""
        for seed in range(3):
            reported, _ = disk_fuzz.kill_one(tmp_path, seed)
            assert reported > 0

    def test_several_processes_share_a_folder_that_is_too_small(self) -> None:
        disk_fuzz.hammer(2, 1.0, 0, Console(quiet=True))


class TestServer(OutsideContract):
    """A Redis server."""

    @pytest.fixture
    def store(self, server: RedisServer) -> Iterator[Store]:
        made = ServerStore(server)
        yield made
        made.close()
