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


def test_as_many_as_there_are_slots_and_then_in_order() -> None:
    async def scenario(admission: Admission, log: list[str]) -> None:
        first = [await client(admission, log, name) for name in "12"]
        others = [asyncio.ensure_future(client(admission, log, name)) for name in "345"]
        await beat()
        assert (admission.running, admission.waiting) == (2, 3)
        for place in first:
            admission.leave(place)
            admission.leave(place)  # harmless a second time
        await beat()
        assert (admission.running, admission.waiting) == (2, 1)
        admission.leave(await others[0])
        await others[2]

    assert play(scenario) == ["open a", *(f"{i} on a" for i in range(1, 6))]


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


def test_more_answers_than_slots_take_them_all() -> None:
    async def scenario(admission: Admission, log: list[str]) -> None:
        admission.leave(await client(admission, log, "1", weight=99))
        assert admission.running == 0

    assert play(scenario)[1:] == ["1 on a"]


def test_a_full_queue_sends_away_and_says_for_how_long() -> None:
    async def scenario(admission: Admission, log: list[str]) -> None:
        await client(admission, log, "1")
        waiting = asyncio.ensure_future(client(admission, log, "2"))
        await beat()
        admission.on_refused = lambda: log.append("sent away")
        with pytest.raises(Refusal) as refused:
            await admission.enter("a", 1)
        assert refused.value.status == 429
        assert log[-1] == "sent away"
        assert 1 <= int(refused.value.headers["Retry-After"]) <= 60
        waiting.cancel()
        await beat()
        assert admission.waiting == 0
        admission.require_room()

    play(scenario, slots=1, max_queue=1)


def test_no_queue_at_all() -> None:
    async def scenario(admission: Admission, log: list[str]) -> None:
        place = await client(admission, log, "1")
        with pytest.raises(Refusal):
            admission.require_room()
        admission.leave(place)
        await client(admission, log, "2")

    async def opened(admission: Admission, log: list[str]) -> None:
        admission.max_queue = 1
        admission.leave(await client(admission, log, "0"))
        admission.max_queue = 0
        await scenario(admission, log)

    play(opened, slots=1)


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


def test_another_model_waits_until_the_first_is_left_and_nobody_overtakes_it() -> None:
    async def scenario(admission: Admission, log: list[str]) -> None:
        one = await client(admission, log, "1")
        two = asyncio.ensure_future(client(admission, log, "2", "b"))
        await beat()
        three = asyncio.ensure_future(client(admission, log, "3"))
        await beat()
        assert log == ["open a", "1 on a"]
        admission.leave(one)
        admission.leave(await two)
        admission.leave(await three)
        await admission.settled()

    assert play(scenario) == ["open a", "1 on a", "open b", "2 on b", "open a", "3 on a"]


def test_what_takes_no_slot_waits_for_none() -> None:
    async def scenario(admission: Admission, log: list[str]) -> None:
        await client(admission, log, "1")
        waiting = asyncio.ensure_future(client(admission, log, "2"))
        await beat()
        place = await client(admission, log, "counts tokens", weight=0)
        assert admission.running == 1
        admission.leave(place)
        waiting.cancel()

    assert play(scenario, slots=1)[-1] == "counts tokens on a"


def test_who_looks_neither_waits_nor_opens_a_model_nor_keeps_one_open() -> None:
    async def scenario(admission: Admission, log: list[str]) -> None:
        assert admission.visit() is None
        place = await client(admission, log, "1")
        visit = admission.visit()
        assert visit is not None
        assert visit[0] == "a"
        assert admission.running == 1
        other = asyncio.ensure_future(client(admission, log, "2", alias="b"))
        await beat()
        assert admission.visit() is None, "another model is wanted"
        admission.leave(place)
        await beat()
        assert not other.done(), "nothing is closed under who looks"
        admission.leave(visit[1])
        await other
        admission.refuse_waiting()
        assert admission.visit() is None

    assert play(scenario) == ["open a", "1 on a", "open b", "2 on b"]


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


def test_shutting_down_sends_away_who_waits_and_who_comes() -> None:
    async def scenario(admission: Admission, log: list[str]) -> None:
        place = await client(admission, log, "1")
        waiting = asyncio.ensure_future(client(admission, log, "2"))
        await beat()
        admission.refuse_waiting()
        for refused in (waiting, asyncio.ensure_future(client(admission, log, "3"))):
            with pytest.raises(Refusal) as error:
                await refused
            assert error.value.status == 503
        admission.leave(place)
        await admission.settled()

    play(scenario, slots=1)


def test_whoever_has_to_wait_is_told_of() -> None:
    async def scenario(admission: Admission, log: list[str]) -> None:
        admission.on_crowd = lambda: log.append("crowd")
        await client(admission, log, "1")
        waiting = asyncio.ensure_future(client(admission, log, "2"))
        await beat()
        waiting.cancel()

    assert play(scenario, slots=1) == ["open a", "1 on a", "crowd"]


def test_the_wait_that_is_told_follows_how_long_requests_took() -> None:
    async def scenario(admission: Admission, log: list[str]) -> None:
        for seconds in [30.0] * 30:
            place = await client(admission, log, "1")
            place.since -= seconds
            admission.leave(place)
        assert 20 <= admission.retry_after() <= 30
        admission.slots = 10
        assert admission.retry_after() <= 3

    play(scenario, slots=1)


def test_no_more_may_wait_while_a_slot_is_free_for_whoever_is_first() -> None:
    """It needs two of them, or a model that is being opened."""

    async def scenario(admission: Admission, log: list[str]) -> None:
        one = await client(admission, log, "1")
        waiting = [asyncio.ensure_future(client(admission, log, "2", weight=2))]
        await beat()
        waiting.append(asyncio.ensure_future(client(admission, log, "3", alias="b")))
        await beat()
        with pytest.raises(Refusal):
            admission.require_room()
        admission.leave(one)
        admission.leave(await waiting[0])
        waiting.append(asyncio.ensure_future(client(admission, log, "4")))
        await asyncio.sleep(0)
        assert admission.waiting == 2  # nobody is in
        with pytest.raises(Refusal):
            await admission.enter("b", 1)
        for each in waiting[1:]:
            admission.leave(await each)

    play(scenario, max_queue=2)


def test_what_takes_no_slot_is_sent_away_on_shutdown_too() -> None:
    """The model is about to be closed."""

    async def scenario(admission: Admission, log: list[str]) -> None:
        admission.leave(await client(admission, log, "1"))
        admission.refuse_waiting()
        with pytest.raises(Refusal):
            await admission.enter("a", 0)

    play(scenario)


@pytest.mark.parametrize("known", [True, False])
def test_the_log_says_why_and_shows_code_only_where_that_is_at_fault(
    caplog: pytest.LogCaptureFixture, known: bool
) -> None:
    """A file that is not there is one line."""

    async def opened(_: str) -> tuple[Any, int]:
        raise ValueError("there is no such file") if known else ZeroDivisionError("there is no such file")

    async def run() -> None:
        with pytest.raises(Refusal):
            await Admission(opened, 8).enter("a")

    asyncio.run(run())
    (record,) = caplog.records
    assert record.getMessage() == "a cannot be opened: there is no such file"
    assert (record.exc_info is None) == known
