"""A request in its thread; no model runs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from llamahybrid.server.job import Done, Failure, Job


class Handle:
    """Notes what is done to it."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.reports: list[Any] = ["report"]
        self.reasons = ["reason"]
        self.ended = threading.Event()

    def cancel(self) -> None:
        self.done.append("cancel")
        self.ended.set()

    def drop(self) -> None:
        self.done.append("drop")
        self.ended.set()

    @contextmanager
    def made(self) -> Iterator[Any]:
        yield self


def play(
    create: Callable[..., Any], scenario: Callable[[Job, ThreadPoolExecutor], Awaitable[None]], **options: Any
) -> Handle:
    """A scenario with a job; its handle."""
    handle, over = Handle(), list[Any]()

    async def run() -> None:
        with ThreadPoolExecutor(1) as threads:
            job = Job(create, options, handle.made, over.append)
            await asyncio.wait_for(scenario(job, threads), 60)
            while not over:
                await asyncio.sleep(0.001)

    asyncio.run(run())
    assert len(over) == 1
    return handle


def test_a_completion_comes_out_and_then_what_it_took() -> None:
    async def scenario(job: Job, threads: ThreadPoolExecutor) -> None:
        job.start(threads)
        assert await job.item() == {"text": "a"}
        assert await job.item() == Done(("report",), ("reason",))  # type: ignore[arg-type]

    play(lambda text: {"text": text}, scenario, text="a")


def test_chunks_come_out_as_they_are_made_and_nobody_waits_for_a_reader() -> None:
    made: list[int] = []

    def stream(stream: bool) -> Iterator[Any]:
        for i in range(100):
            made.append(i)
            yield {"i": i}

    async def scenario(job: Job, threads: ThreadPoolExecutor) -> None:
        job.start(threads)
        while len(made) < 100:
            await asyncio.sleep(0.001)
        assert [await job.item() for _ in range(100)] == [{"i": i} for i in range(100)]
        assert isinstance(await job.item(), Done)

    play(stream, scenario, stream=True)


def test_an_exception_comes_out_too() -> None:
    def broken() -> None:
        raise KeyboardInterrupt

    async def scenario(job: Job, threads: ThreadPoolExecutor) -> None:
        job.start(threads)
        item = await job.item()
        assert isinstance(item, Failure)
        assert isinstance(item.error, KeyboardInterrupt)

    play(broken, scenario)


def test_dropping_a_stream_ends_it_at_its_next_chunk_and_closes_it() -> None:
    closed = threading.Event()

    def endless(stream: bool) -> Iterator[Any]:
        try:
            while True:
                time.sleep(0.001)
                yield {}
        finally:
            closed.set()

    async def scenario(job: Job, threads: ThreadPoolExecutor) -> None:
        job.start(threads)
        await job.item()
        job.drop()
        assert job.cancelled

    assert play(endless, scenario, stream=True).done == ["drop"]
    assert closed.is_set()


@pytest.mark.parametrize("deed", ["cancel", "drop"])
def test_one_that_is_ended_before_it_began_ends_when_it_does(deed: str) -> None:
    handles: list[Handle] = []

    def waits() -> Any:
        assert handles[0].ended.wait(60)
        return {}

    async def scenario(job: Job, threads: ThreadPoolExecutor) -> None:
        handles.append(job._make_handle.__self__)  # type: ignore[attr-defined]
        getattr(job, deed)()
        job.start(threads)

    assert play(waits, scenario).done == [deed]
