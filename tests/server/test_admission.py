"""Order of admission, refusals, and opening and closing of models; no model runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from llamahybrid.errors import DeviceError
from llamahybrid.server.admission import Admission, Place
from llamahybrid.server.errors import Refusal

Scenario = Callable[[Admission, list[str]], Awaitable[None]]


class Pool:
    """In place of `Models`: notes what it opens and closes."""

    def __init__(self, slots: int = 2, most: int = 1) -> None:
        """`most`: models that are open at a time."""
        self.log: list[str] = []
        self.failing: list[Exception] = []
        self._slots, self._most = range(slots), most
        self._open: list[str] = []

    def open(self, alias: str) -> Any:
        self.log.append(f"open {alias}")
        if self.failing:
            raise self.failing.pop()
        self._open.append(alias)
        assert len(self._open) <= self._most
        return SimpleNamespace(slots=self._slots, offload=SimpleNamespace(lost=False))

    def close(self, *aliases: str) -> None:
        for alias in aliases:
            self.log.append(f"close {alias}")
            self._open.remove(alias)

    def in_the_way(self, alias: str, others: Sequence[str]) -> list[str] | None:
        closing = max(0, len(self._open) + (alias not in self._open) - self._most)
        return list(others[:closing]) if closing <= len(others) else None


def play(
    scenario: Scenario, pool: Any = None, max_queue: int = 8, idle_seconds: float | None = None
) -> list[str]:
    """Return the log: opened and closed models, and the notes of the scenario."""
    pool = pool or Pool()

    async def run() -> None:
        admission = Admission(pool, max_queue, idle_seconds)
        await asyncio.wait_for(scenario(admission, pool.log), 60)

    asyncio.run(run())
    log: list[str] = pool.log
    return log


async def client(admission: Admission, log: list[str], name: str, alias: str = "a", weight: int = 1) -> Place:
    _, place = await admission.enter(alias, weight)
    log.append(f"{name} on {alias}")
    return place


async def beat() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_lost_model_reopens_when_its_requests_have_ended() -> None:
    pool = Pool()

    async def scenario(admission: Admission, log: list[str]) -> None:
        llm, place = await admission.enter("a")
        llm.offload.lost = True
        pool.failing.append(DeviceError("not back yet"))
        waiting = [asyncio.ensure_future(admission.enter("a", weight)) for weight in (1, 0)]
        await beat()
        assert admission.waiting == 2, "neither a slot nor a look is had of it"
        assert admission.visit() is None
        admission.leave(place)
        for refused in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(refused, Refusal)
            assert (refused.status, refused.headers["Retry-After"]) == (503, "10")
        assert (await admission.enter("a"))[0] is not llm

    assert play(scenario, pool) == ["open a", "close a", "open a", "open a"]


def test_request_for_several_slots_is_not_overtaken() -> None:
    async def scenario(admission: Admission, log: list[str]) -> None:
        one = await client(admission, log, "1")
        two = asyncio.ensure_future(client(admission, log, "2", weight=2))
        await beat()
        three = asyncio.ensure_future(client(admission, log, "3"))
        await beat()
        assert admission.running == 1
        admission.leave(one)
        place = await two
        await beat()
        assert not three.done()
        admission.leave(place)
        await three

    assert play(scenario)[1:] == ["1 on a", "2 on a", "3 on a"]


@pytest.mark.parametrize("late", [False, True])
def test_cancelled_request_frees_its_place(late: bool) -> None:
    """`late`: its place came in the same turn of the loop."""

    async def scenario(admission: Admission, log: list[str]) -> None:
        one = await client(admission, log, "1")
        two = asyncio.ensure_future(admission.enter("a", 1))
        await beat()
        if late:
            admission.leave(one)
        two.cancel()
        await beat()
        assert admission.running == (0 if late else 1)
        assert admission.waiting == 0

    play(scenario, Pool(slots=1))


def test_failed_opening_refuses_only_requests_for_that_model() -> None:
    pool = Pool()
    pool.failing.append(OSError("no such file: /secret/place"))

    async def scenario(admission: Admission, log: list[str]) -> None:
        broken = asyncio.ensure_future(admission.enter("broken", 1))
        fine = asyncio.ensure_future(client(admission, log, "2"))
        with pytest.raises(Refusal) as refused:
            await broken
        assert refused.value.status == 503
        assert "secret" not in str(refused.value)
        await fine

    assert play(scenario, pool) == ["open broken", "open a", "2 on a"]


def test_busy_model_does_not_block_another_open_model() -> None:
    async def scenario(admission: Admission, log: list[str]) -> None:
        await client(admission, log, "1", "a")
        waits = asyncio.ensure_future(client(admission, log, "2", "a"))
        await client(admission, log, "3", "b")
        assert admission.waiting == 1
        waits.cancel()

    assert play(scenario, Pool(slots=1, most=2)) == ["open a", "1 on a", "open b", "3 on b"]


def test_least_recently_used_model_closes_and_a_look_is_no_use() -> None:
    async def scenario(admission: Admission, log: list[str]) -> None:
        for alias in ("a", "b", "a", "b"):
            admission.leave(await client(admission, log, alias, alias))
        visit = admission.visit("a")
        assert visit is not None
        admission.leave(visit[1])
        await client(admission, log, "c", "c")
        assert admission.visit("a") is None

    assert play(scenario, Pool(most=2))[-3:] == ["close a", "open c", "c on c"]


def test_model_in_use_closes_after_its_requests_and_admits_no_later_ones() -> None:
    async def scenario(admission: Admission, log: list[str]) -> None:
        one = await client(admission, log, "1", "a")
        two = asyncio.ensure_future(client(admission, log, "2", "b"))
        await beat()
        three = asyncio.ensure_future(client(admission, log, "3", "a"))
        await beat()
        assert not two.done()
        assert not three.done(), "there is a free slot, which came later than who waits for b"
        admission.leave(one)
        admission.leave(await two)
        await three

    assert play(scenario) == [
        *("open a", "1 on a", "close a", "open b", "2 on b", "close b", "open a", "3 on a")
    ]


def test_unused_model_closes_before_one_in_use() -> None:
    async def scenario(admission: Admission, log: list[str]) -> None:
        await client(admission, log, "1", "a")
        admission.leave(await client(admission, log, "2", "b"))
        await client(admission, log, "3", "c")

    assert play(scenario, Pool(most=2))[-3:] == ["close b", "open c", "3 on c"]


def test_idle_model_closes_after_a_time_and_one_in_use_stays_open() -> None:
    async def scenario(admission: Admission, log: list[str]) -> None:
        stays = await client(admission, log, "1", "a")
        admission.leave(await client(admission, log, "2", "b"))
        while (visit := admission.visit("b")) is not None:  # a look does not keep it open
            admission.leave(visit[1])
            await asyncio.sleep(0.001)
        assert admission.visit("a") is not None
        admission.leave(await client(admission, log, "3", "b"))
        admission.leave(stays)

    assert play(scenario, Pool(most=2), idle_seconds=0.02) == [
        *("open a", "1 on a", "open b", "2 on b", "close b", "open b", "3 on b")
    ]
