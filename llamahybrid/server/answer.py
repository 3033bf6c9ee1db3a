"""Answer: a job's items as an HTTP response, whole or as server-sent events; a client that hangs up ends it.

The status waits for the first item, so that an error is told as one; a stream that is silent for too long
before that begins with comments, and tells an error as an event.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llamahybrid.server.errors import Refusal, later, refusal
from llamahybrid.server.job import Done, Failure, Item, Job, Notice

logger = logging.getLogger("llamahybrid.server")

Chunk = dict[str, Any]

COMMENT = b": ping\n\n"
"""Keeps proxies from closing a silent stream."""

END = b"data: [DONE]\n\n"


class Account:
    """What is told of a request at its end."""

    def __init__(self, finish: Callable[[Done], tuple[Chunk, Chunk]], include_usage: bool = False) -> None:
        """`finish`: the `usage` and `timings` of what is done. `include_usage`: a stream ends with them."""
        self.finish = finish
        self.include_usage = include_usage

    def settle(self, done: Done) -> None:
        """Work out what `finish` says while the model is open; who reads slowly asks when it is not."""
        told = self.finish(done)
        self.finish = lambda _: told


class Answer(Response):
    """What a job makes, as it comes."""

    silence = COMMENT
    """Sent where a stream has been silent for too long."""
    end = END
    """Ends a stream."""

    def failed(self, refused: Refusal) -> bytes:
        """What tells an error in a stream that has begun."""
        return event(refused.body)

    def beside(self, timings: Chunk) -> Chunk:
        """What a whole answer has beside what the job made."""
        return {"timings": timings} if timings else {}

    def __init__(self, job: Job, account: Account, ping_seconds: float) -> None:
        self._job = job
        self._account = account
        self._ping_seconds = ping_seconds
        self._sent = 0
        self.background = None
        self.raw_headers = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. However this ends, the job does, too."""
        watch = [asyncio.ensure_future(self._watch(receive))]
        if self._job.stream:
            watch.append(asyncio.ensure_future(self._break_silence()))
        try:
            await (
                self._stream(scope, receive, send) if self._job.stream else self._whole(scope, receive, send)
            )
        finally:
            for each in watch:
                each.cancel()
            self._job.drop()

    # -- whole -----------------------------------------------------------------------------------

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        made: Chunk | None = None
        while True:
            item = await self._job.item()
            if isinstance(item, Failure):
                await refusal(item.error).response(scope)(scope, receive, send)
                return
            if item is Notice.GONE:
                logger.info("a client hung up")
                return
            if isinstance(item, Done):
                break
            if isinstance(item, dict):
                made = item
        if made is None:  # cancelled before there was anything
            await later("the request was cancelled; ask again", 1).response(scope)(scope, receive, send)
            return
        _, timings = self._account.finish(item)
        body = json.dumps({**made, **self.beside(timings)}, default=float)
        await Response(body, media_type="application/json")(scope, receive, send)

    # -- streamed --------------------------------------------------------------------------------

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        last: Chunk | None = None
        while True:
            items = [await self._job.item(), *self._job.more()]  # a write takes as long for several
            if Notice.GONE in items:
                logger.info("a client hung up")
                return
            if isinstance(items[0], Failure) and not started:
                await refusal(items[0].error).response(scope)(scope, receive, send)
                return
            if not started:
                started = True
                headers = [
                    (b"content-type", b"text/event-stream; charset=utf-8"),
                    (b"cache-control", b"no-cache"),
                ]
                headers.append((b"x-accel-buffering", b"no"))  # nginx would hold it back
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            data, over = b"", False
            for item in items:
                more, last = self._events(item, last)
                data += more
                over |= isinstance(item, (Done, Failure))
            if data or over:
                self._sent += 1
                await send({"type": "http.response.body", "body": data, "more_body": not over})
            if over:
                return

    def _events(self, item: Item, last: Chunk | None) -> tuple[bytes, Chunk | None]:
        """What is sent for an item, and a last chunk that waits for what is told with it."""
        if item is Notice.SILENCE:
            return self.silence, last
        if isinstance(item, Failure):
            return (event(last) if last else b"") + self.failed(refusal(item.error)), None
        if isinstance(item, Done):
            return self._end(item, last), None
        assert isinstance(item, dict), "a client that is gone is told nothing"
        if self._account.include_usage:
            item["usage"] = None
        if any(choice.get("finish_reason") for choice in item["choices"]):
            return (event(last) if last else b""), item
        return (event(last) if last else b"") + event(item), None

    def _end(self, done: Done, last: Chunk | None) -> bytes:
        if last is None:
            return self.end
        usage, timings = self._account.finish(done)
        told = {"timings": timings} if timings else {}
        if not self._account.include_usage:
            return event({**last, **told}) + END
        named = {key: last[key] for key in ("id", "object", "created", "model")}
        return event(last) + event({**named, "choices": [], "usage": usage, **told}) + END

    # -- what happens meanwhile --------------------------------------------------------------------

    async def _watch(self, receive: Receive) -> None:
        with suppress(Exception):
            while (await receive())["type"] != "http.disconnect":
                pass
        self._job.drop()
        self._job.notify(Notice.GONE)

    async def _break_silence(self) -> None:
        while True:
            sent = self._sent
            await asyncio.sleep(self._ping_seconds)
            if self._sent == sent:
                self._job.notify(Notice.SILENCE)


class EventAnswer(Answer):
    """An answer whose items are events, told one by one as they are."""

    def _events(self, item: Item, last: Chunk | None) -> tuple[bytes, Chunk | None]:
        return (event(item), None) if isinstance(item, dict) else super()._events(item, last)


def event(data: Chunk) -> bytes:
    """A server-sent event; its type is what the data name."""
    kind = b"event: " + data["type"].encode() + b"\n" if "type" in data else b""
    return kind + b"data: " + json.dumps(data, default=float).encode() + b"\n\n"
