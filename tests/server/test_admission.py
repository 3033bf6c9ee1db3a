"""Order of admission, refusals, and opening and closing of models; no model runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from llamahybrid.errors import DeviceError
from llamahybrid.server.admission import Admission, Place
from llamahybrid.server.errors import Refusal

Scenario = Callable[[Admission, list[str]], Awaitable[None]]


def play(
    scenario: Scenario, slots: int = 2, max_queue: int = 8, most: int = 1, idle_seconds: float | None = None
) -> list[str]:
    """Return the log: opened and closed models, and the notes of the scenario.

    `most`: models that are open at a time.
    """
    log: list[str] = []
    is_open: list[str] = []

    async def opened(alias: str) -> tuple[Any, int]:
        log.append(f"open {alias}")
        await asyncio.sleep(0)
        if alias == "broken":
            raise OSError("no such file: /secret/place")
        is_open.append(alias)
        assert len(is_open) <= most
        return alias, slots

    async def close(aliases: Sequence[str]) -> None:
        log.extend(f"close {alias}" for alias in aliases)
        for alias in aliases:
            is_open.remove(alias)

    def in_the_way(alias: str, others: Sequence[str]) -> list[str] | None:
        closing = max(0, len(is_open) + 1 - most)
        return list(others[:closing]) if closing <= len(others) else None

    async def run() -> None:
        admission = Admission(opened, max_queue, lambda _: False, close, in_the_way, idle_seconds)
        await asyncio.wait_for(scenario(admission, log), 30)

    asyncio.run(run())
    return log


async def client(admission: Admission, log: list[str], name: str, alias: str = "a", weight: int = 1) -> Place:
    llm, place = await admission.enter(alias, weight)
    log.append(f"{name} on {llm}")
    return place


async def beat() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_lost_model_reopens_when_its_requests_have_ended() -> None:
    lost: list[str] = []
    opens: list[str | Exception] = ["first", DeviceError("not back yet"), "second"]

    async def opened(_: str) -> tuple[Any, int]:
        if isinstance(one := opens.pop(0), Exception):
            raise one
        return one, 2

    async def closed(_: Sequence[str]) -> None:
        pass

    async def run() -> None:
        admission = Admission(opened, 8, lambda llm: llm in lost, closed, lambda _, others: list(others))
        llm, place = await admission.enter("a")
        assert llm == "first"
        lost.append("first")
        waiting = [asyncio.ensure_future(admission.enter("a", weight)) for weight in (1, 0)]
        await beat()
        assert admission.waiting == 2, "neither a slot nor a look is had of it"
        assert admission.visit() is None
        admission.leave(place)
        for refused in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(refused, Refusal)
            assert (refused.status, refused.headers["Retry-After"]) == (503, "10")
        assert (await admission.enter("a"))[0] == "second"

    asyncio.run(asyncio.wait_for(run(), 60))


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

    play(scenario, slots=1)


def test_failed_opening_refuses_only_requests_for_that_model() -> None:
    async def scenario(admission: Admission, log: list[str]) -> None:
        broken = asyncio.ensure_future(admission.enter("broken", 1))
        fine = asyncio.ensure_future(client(admission, log, "2"))
        with pytest.raises(Refusal) as refused:
            await broken
        assert refused.value.status == 503
        assert "secret" not in str(refused.value)
        await fine

    assert play(scenario) == ["open broken", "open a", "2 on a"]


def test_busy_model_does_not_block_another_open_model() -> None:
    async def scenario(admission: Admission, log: list[str]) -> None:
        await client(admission, log, "1", "a")
        waits = asyncio.ensure_future(client(admission, log, "2", "a"))
        await client(admission, log, "3", "b")
        assert admission.waiting == 1
        waits.cancel()

    assert play(scenario, slots=1, most=2) == ["open a", "1 on a", "open b", "3 on b"]


def test_least_recently_used_model_closes_and_a_look_is_no_use() -> None:
    async def scenario(admission: Admission, log: list[str]) -> None:
        for alias in ("a", "b", "a", "b"):
            admission.leave(await client(admission, log, alias, alias))
        visit = admission.visit("a")
        assert visit is not None
        admission.leave(visit[1])
        await client(admission, log, "c", "c")
        assert admission.visit("a") is None

    assert play(scenario, most=2)[-3:] == ["close a", "open c", "c on c"]


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

    assert play(scenario, most=2)[-3:] == ["close b", "open c", "3 on c"]


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

    assert play(scenario, most=2, idle_seconds=0.02) == [
        *("open a", "1 on a", "open b", "2 on b", "close b", "open b", "3 on b")
    ]
