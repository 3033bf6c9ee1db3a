"""Items as HTTP responses; no model runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from llamahybrid.server.answer import Account, Answer
from llamahybrid.server.errors import bad
from llamahybrid.server.job import Done, Failure, Notice

DONE = Done(())
CHUNK: dict[str, Any] = {"id": "1", "object": "chunk", "created": 5, "model": "m"}


def chunk(text: str, end: str | None = None, index: int = 0) -> dict[str, Any]:
    return {**CHUNK, "choices": [{"index": index, "text": text, "finish_reason": end}]}


class Spoken:
    """A job whose items are known, with pauses in seconds between them."""

    def __init__(self, items: Sequence[Any], stream: bool) -> None:
        self.stream = stream
        self.dropped = False
        self.at_once = False
        self._coming = list(items)
        self._said: asyncio.Queue[Any] = asyncio.Queue()

    async def item(self) -> Any:
        if self._said.empty() and self._coming:
            first = self._coming.pop(0)
            if not isinstance(first, float):
                return first
            await asyncio.sleep(first)
        return await self.item() if self._said.empty() and self._coming else await self._said.get()

    def more(self) -> list[Any]:
        there = []
        while not self._said.empty():
            there.append(self._said.get_nowait())
        while self.at_once and self._coming:
            there.append(self._coming.pop(0))
        return there

    def notify(self, notice: Notice) -> None:
        self._said.put_nowait(notice)

    def drop(self) -> None:
        self.dropped = True


def spoken(
    items: Sequence[Any],
    *,
    stream: bool = True,
    usage: bool = False,
    gone_after: float = 60,
    ping: float = 60,
    at_once: bool = False,
    writes: list[bytes] | None = None,
) -> tuple[int, str]:
    """Status and body of the response to these items; 0: there was none. `writes`: where its parts go."""
    status, body = 0, b""

    async def receive() -> Any:
        await asyncio.sleep(gone_after)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal status, body
        if message["type"] == "http.response.start":
            status = message["status"]
        body += message.get("body", b"")
        if writes is not None and "body" in message:
            writes.append(message["body"])

    job: Any = Spoken(items, stream)
    job.at_once = at_once
    account = Account(lambda done: ({"total_tokens": 3}, {"cache_n": 2}), usage)
    asyncio.run(asyncio.wait_for(Answer(job, account, ping)({"type": "http"}, receive, send), 5))
    assert job.dropped
    return status, body.decode()


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_whole_answer_has_timings() -> None:
    status, body = spoken([{"text": "a"}, DONE], stream=False)
    assert (status, json.loads(body)) == (200, {"text": "a", "timings": {"cache_n": 2}})


def test_an_error_is_told_with_its_status() -> None:
    for stream in (False, True):
        status, body = spoken([Failure(bad("no"))], stream=stream)
        assert (status, json.loads(body)["error"]["message"]) == (400, "no")


def test_nothing_at_all_is_told_as_such() -> None:
    assert spoken([DONE], stream=False)[0] == 503
    assert spoken([DONE]) == (200, "data: [DONE]\n\n")


def test_a_stream_ends_with_timings_on_its_last_chunk() -> None:
    status, body = spoken([chunk("a"), chunk("", "stop"), DONE])
    assert status == 200
    assert events(body) == [chunk("a"), {**chunk("", "stop"), "timings": {"cache_n": 2}}]


def test_or_with_a_chunk_of_its_own_for_usage() -> None:
    _, body = spoken([chunk("a"), chunk("", "stop"), DONE], usage=True)
    *others, last = events(body)
    assert others == [{**chunk("a"), "usage": None}, {**chunk("", "stop"), "usage": None}]
    assert last == {**CHUNK, "choices": [], "usage": {"total_tokens": 3}, "timings": {"cache_n": 2}}


def test_the_chunks_of_several_answers_keep_their_order() -> None:
    said = [chunk("a"), chunk("", "stop"), chunk("b", index=1), chunk("", "stop", 1)]
    _, body = spoken([*said, DONE])
    assert events(body) == [*said[:-1], {**said[-1], "timings": {"cache_n": 2}}]


def test_what_is_there_at_once_is_one_write() -> None:
    said = [chunk("a"), chunk("b"), chunk("c"), chunk("", "stop"), DONE]
    alone, together = list[bytes](), list[bytes]()
    assert spoken(said, writes=alone, usage=True) == spoken(said, at_once=True, writes=together, usage=True)
    assert (len(alone), len(together)) == (4, 1)
    status, body = spoken([chunk("a"), Failure(bad("no"))], at_once=True)
    assert (status, body.count("data: ")) == (200, 2)
    assert spoken([Failure(bad("no"))], at_once=True)[0] == 400


def test_a_client_that_is_gone_is_told_nothing() -> None:
    for stream in (False, True):
        assert spoken([], stream=stream, gone_after=0.01) == (0, "")
