"""Who is let in, in which order, and who is sent away; no model runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from llamahybrid.errors import DeviceError
from llamahybrid.server.admission import Admission, Place
from llamahybrid.server.errors import Refusal

Scenario = Callable[[Admission, list[str]], Awaitable[None]]


def play(scenario: Scenario, slots: int = 2, max_queue: int = 8) -> list[str]:
    """What happened: the models that were opened, and what the scenario noted."""
    log: list[str] = []

    async def opened(alias: str) -> tuple[Any, int]:
        log.append(f"open {alias}")
        await asyncio.sleep(0)
        if alias == "broken":
            raise OSError("no such file: /secret/place")
        return alias, slots

    async def run() -> None:
        await asyncio.wait_for(scenario(Admission(opened, max_queue), log), 5)

    asyncio.run(run())
    return log


async def client(admission: Admission, log: list[str], name: str, alias: str = "a", weight: int = 1) -> Place:
    llm, place = await admission.enter(alias, weight)
    log.append(f"{name} on {llm}")
    return place


async def beat() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_one_that_is_lost_is_opened_again_once_nobody_is_inside() -> None:
    lost: list[str] = []
    opens: list[str | Exception] = ["first", DeviceError("not back yet"), "second"]

    async def opened(_: str) -> tuple[Any, int]:
        if isinstance(one := opens.pop(0), Exception):
            raise one
        return one, 2

    async def run() -> None:
        admission = Admission(opened, 8, lambda llm: llm in lost)
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

    asyncio.run(asyncio.wait_for(run(), 5))


def test_several_answers_take_several_slots_and_are_not_overtaken() -> None:
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
def test_who_gives_up_leaves_no_place_taken(late: bool) -> None:
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


def test_a_model_that_cannot_be_opened_is_told_to_who_asked_for_it_alone() -> None:
    async def scenario(admission: Admission, log: list[str]) -> None:
        broken = asyncio.ensure_future(admission.enter("broken", 1))
        fine = asyncio.ensure_future(client(admission, log, "2"))
        with pytest.raises(Refusal) as refused:
            await broken
        assert refused.value.status == 503
        assert "secret" not in str(refused.value)
        await fine

    assert play(scenario) == ["open broken", "open a", "2 on a"]
