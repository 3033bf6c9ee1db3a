"""A queue and its thread: what waits is done, once, in time; whoever waits for it is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from llamahybrid.prompt_cache.write_behind import WriteBehind


@dataclass(eq=False)
class Job:
    name: str
    due: float = 0.0
    cancelled: bool = False
    refused: bool = False


class Worker:
    """Notes what is done; holds up the job called "slow" until it is let go on."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.refuses = False
        self.tried = 0
        self.queue: WriteBehind[Job] = WriteBehind(self.do)

    def do(self, job: Job) -> None:
        if job.name == "slow":
            self.begun.set()
            self.go_on.wait(30)
        if job.name == "refused" and self.refuses:
            self.tried += 1
            self.queue.again(job, 1000)
            return
        if job.name == "bad":
            raise ValueError(job.name)
        if not job.cancelled:
            self.done.append(job.name)

    def add(self, *jobs: Job) -> None:
        self.queue.change(lambda waiting: [*waiting, *jobs])


@pytest.fixture
def worker() -> Iterator[Worker]:
    one = Worker()
    yield one
    one.go_on.set()
    assert one.queue.flush(20)


def test_what_is_due_is_done_in_order(worker: Worker) -> None:
    worker.add(*map(Job, "abc"))
    assert worker.queue.flush(20)
    assert worker.done == ["a", "b", "c"]
    assert len(worker.queue) == 0


def test_what_is_not_due_waits_until_it_is_flushed(worker: Worker) -> None:
    worker.add(Job("later", due=time.monotonic() + 1000), Job("now"))
    while "now" not in worker.done:
        time.sleep(0.001)
    assert len(worker.queue) == 1
    assert worker.queue.flush(20)
    assert worker.done == ["now", "later"]


def test_what_waits_can_be_taken_back_and_what_runs_is_told(worker: Worker) -> None:
    worker.add(Job("slow"), Job("next"))
    assert worker.begun.wait(20)
    assert worker.queue.cancel(lambda job: job.name == "next", 0.0)
    assert not worker.queue.cancel(lambda job: job.name == "slow", 0.01), "it still runs"
    worker.go_on.set()
    assert worker.queue.flush(20)
    assert worker.done == []


def test_who_comes_in_again_does_not_wait_for_itself_and_takes_back_what_waits() -> None:
    """As a finaliser does that the collector runs while the queue is changed."""
    worker = Worker()
    worker.add(Job("secret", due=time.monotonic() + 1000))
    seen: list[object] = []

    def changing(waiting: list[Job]) -> list[Job]:
        seen.extend([len(worker.queue), worker.queue.cancel(lambda job: job.name == "secret", 0.0)])
        return [*waiting, Job("other")]

    thread = threading.Thread(target=worker.queue.change, args=(changing,), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it waits for itself"
    assert worker.queue.flush(20)
    assert (seen, worker.done) == ([1, True], ["other"])


def test_waiting_ends_when_the_time_is_over(worker: Worker) -> None:
    worker.add(Job("slow"))
    assert worker.begun.wait(20)
    assert not worker.queue.flush(0.01)
    assert len(worker.queue) == 1


def test_a_job_that_fails_ends_nothing_and_is_told_once(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    worker.add(Job("bad"), Job("bad"), Job("good"))
    assert worker.queue.flush(20)
    assert (worker.done, worker.queue.failures) == (["good"], 2)
    assert sum("ValueError: bad" in record.message for record in caplog.records) == 1


def test_the_thread_goes_when_nothing_comes_and_is_made_anew(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamahybrid.prompt_cache.write_behind.IDLE_SECONDS", 0.01)
    threads, others = [], set(threading.enumerate())
    for name in "ab":
        worker.queue.change(lambda waiting, name=name: [*waiting, Job(name)])  # type: ignore[misc]
        assert worker.queue.flush(20)
        threads = [t for t in threading.enumerate() if t.name == "llamahybrid-disk" and t not in others]
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
    assert worker.done == ["a", "b"]


def test_the_thread_goes_at_once_when_nothing_is_expected_but_not_before_all_is_done(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamahybrid.prompt_cache.write_behind.IDLE_SECONDS", 600.0)
    others = set(threading.enumerate())

    def mine() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == "llamahybrid-disk" and t not in others]

    worker.add(Job("slow"), Job("later"))
    assert worker.begun.wait(20)
    worker.queue.rest()
    worker.go_on.set()
    for thread in mine():
        thread.join(20)
    assert worker.done == ["slow", "later"]
    assert not mine()

    worker.add(Job("again"))  # that more comes after all makes it stay
    assert worker.queue.flush(20)
    (thread,) = mine()
    thread.join(0.05)
    assert worker.done[2:] == ["again"]
    assert thread.is_alive()
    worker.queue.rest()
    thread.join(20)
    assert not thread.is_alive()


def test_a_forked_process_has_nothing_of_its_parents_to_do(worker: Worker) -> None:
    worker.add(Job("slow"), Job("next"))
    assert worker.begun.wait(20)
    worker.queue.start_anew()
    assert len(worker.queue) == 0
    worker.add(Job("own"))
    assert worker.queue.flush(20)
    assert "own" in worker.done
    assert "next" not in worker.done


# -- what was refused --------------------------------------------------------------------------------


def test_what_was_refused_is_tried_again_when_all_is_flushed(worker: Worker) -> None:
    worker.refuses = True
    worker.add(Job("refused"), Job("other"))
    assert worker.queue.flush(20)  # each is tried once, and nobody waits for another try
    assert (worker.done, worker.tried, len(worker.queue)) == (["other"], 1, 1)
    worker.refuses = False
    assert worker.queue.flush(20)
    assert (worker.done, len(worker.queue)) == (["other", "refused"], 0)


def test_what_was_refused_is_tried_again_in_time(worker: Worker) -> None:
    job = Job("refused")
    worker.queue.again(job, 0.0)
    worker.add(Job("other"))
    assert worker.queue.flush(20)
    assert sorted(worker.done) == ["other", "refused"]


def test_a_thread_that_rests_does_not_wait_for_another_try(worker: Worker) -> None:
    worker.refuses = True
    worker.add(Job("refused"))
    assert worker.queue.flush(20)
    thread = worker.queue._thread
    worker.queue.rest()
    if thread is not None:
        thread.join(20)
        assert not thread.is_alive()
    worker.refuses = False
    worker.add(Job("other"))
    assert worker.queue.flush(20)
    assert sorted(worker.done) == ["other", "refused"]


def test_what_was_refused_and_cancelled_is_not_tried_again(worker: Worker) -> None:
    worker.queue.again(Job("refused", cancelled=True), 0.0)
    assert len(worker.queue) == 0
    worker.queue.again(Job("refused"), 1000)
    assert worker.queue.cancel(lambda job: True, 20)
    assert len(worker.queue) == 0
