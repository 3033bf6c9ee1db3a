"""Answers: the items of a job as an HTTP response, whole or as server-sent events.

The status waits for the first item, so that an error has its own status. A stream without any item for
`ping_seconds` begins with a ping instead, and reports an error as an event.
"""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llamahybrid.server.answer_format import AnswerFormat, event
from llamahybrid.server.errors import Refusal, refusal
from llamahybrid.server.job import End, Item, Job

logger = logging.getLogger("llamahybrid.server")

Result = TypeVar("Result")

STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer the events
)


class HungUp(Refusal):
    """The client disconnected."""

    def __init__(self) -> None:
        super().__init__(499, "the client hung up")


async def disconnect(receive: Receive) -> None:
    """Return when the client disconnects."""
    with suppress(Exception):
        while (await receive())["type"] != "http.disconnect":
            pass


async def unless_gone(receive: Receive, doing: asyncio.Future[Result]) -> Result:
    """Return the result of `doing`. Cancels it and raises HungUp if the client disconnects before."""
    gone = asyncio.ensure_future(disconnect(receive))
    either: set[asyncio.Future[Any]] = {doing, gone}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            logger.info("a client hung up before the end of its answer")
            raise HungUp
        return doing.result()
    finally:
        gone.cancel()
        doing.cancel()


class Answer(Response):
    """The answer of a job. A disconnect of the client ends the job."""

    def __init__(self, job: Job, form: AnswerFormat, ping_seconds: float) -> None:
        """`form`: of the answer."""
        self._job = job
        self._form = form
        self._ping_seconds = ping_seconds
        self.background = None
        self.raw_headers = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. The job ends with it, whatever happens."""
        send_items = self._stream if self._job.stream else self._whole
        sending = asyncio.ensure_future(send_items(scope, receive, send))
        try:
            with suppress(HungUp):
                await unless_gone(receive, sending)
        finally:
            self._job.drop()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            made = json.dumps(await self._job.whole(), default=float)
            response = Response(made, media_type="application/json")
        except Refusal as refused:
            response = refused.response(scope)
        await response(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = over = False
        while not over:
            items = await self._job.items(self._ping_seconds)
            first = items[0] if items else None
            if not started and isinstance(first, End) and first.error is not None:
                await refusal(first.error).response(scope)(scope, receive, send)
                return
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            over = bool(items) and isinstance(items[-1], End)
            data = b"".join(map(self._encoded, items)) if items else self._form.silence
            if data or over:
                await send({"type": "http.response.body", "body": data, "more_body": not over})

    def _encoded(self, item: Item) -> bytes:
        if not isinstance(item, End):
            return event(item)
        return self._form.end if item.error is None else self._form.failed(refusal(item.error))
