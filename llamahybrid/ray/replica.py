"""Deployments for Ray Serve: replicas of our server, and a front that reads request bodies.

The front forwards requests unchanged, with hints for the router, and streams the replicas' answers back. A
client that disconnects cancels the request at its replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message

from llamahybrid.client.salt import SHARED
from llamahybrid.llama import Llama
from llamahybrid.prompt_cache.base import Costs, Tokens
from llamahybrid.prompt_cache.nodes import common_prefix
from llamahybrid.ray.conversations import Hints, RecentPrompts, hints_of
from llamahybrid.server.app import app_of
from llamahybrid.server.service import Service
from llamahybrid.server.settings import ModelSettings, ServerSettings

NUMBER = "x-llamahybrid-request"
"""Header with a replica's internal request number."""

Headers: TypeAlias = list[tuple[bytes, bytes]]
Part: TypeAlias = "tuple[int, Headers] | bytes"
"""Status and headers first, then the body."""


@dataclass(frozen=True)
class Forwarded:
    """A request from the front to a replica."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    hints: Hints


class Replica:
    """The server on one model."""

    async def __init__(self, server: dict[str, Any], model: dict[str, Any]) -> None:  # type: ignore[misc]
        """Open the model. Arguments are those of `ServerSettings` and `ModelSettings`."""
        self._recent = RecentPrompts()
        self._running: dict[str, Hints] = {}
        self._count = 0
        settings = ServerSettings(**server)
        self._service = Service(settings, [ModelSettings(**model)])
        self._service.observer = self._observer
        self._app = app_of(self._service)
        await self._service.start()

    async def stop(self) -> None:
        """Cancel all requests and close the model."""
        await self._service.stop()

    async def serve(self, forwarded: Forwarded) -> AsyncIterator[Part]:
        """Answer a request: yield status and headers, then pieces of the body."""
        self._count += 1
        number = str(self._count)
        self._running[number] = forwarded.hints
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()
        body: Message | None = {"type": "http.request", "body": forwarded.body, "more_body": False}

        async def receive() -> Message:
            nonlocal body
            if body is not None:
                first, body = body, None
                return first
            await gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app(_scope(forwarded, number), receive, sent.put)
            finally:
                await sent.put(None)

        running = asyncio.create_task(run())
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], list(message["headers"])
                elif message.get("body"):
                    yield message["body"]
            await running  # raises the app's exception
        finally:
            gone.set()
            self._running.pop(number, None)
            with suppress(Exception):
                await asyncio.wait_for(asyncio.shield(running), timeout=10)

    def record_routing_stats(self) -> dict[str, Any]:
        """Resumable prefixes, for the router."""
        llm = self._service.models.llm
        if llm is None:
            return {}
        return {"resumable": sorted(self._recent.resumable(_depth(llm)))}

    async def check_health(self) -> None:
        """Raise RuntimeError if no model is open."""
        if self._service.models.llm is None:
            raise RuntimeError("no model is open")

    def _observer(self, request: Request) -> Callable[[Sequence[int]], None] | None:
        hints = self._running.get(request.headers.get(NUMBER, ""))
        if hints is None:
            return None
        return lambda tokens: self._recent.add(hints, np.array(tokens, np.int32))


def _depth(llm: Llama) -> Callable[[Tokens], int]:
    """A function that returns how many tokens of a prompt any slot could resume, live or from RAM."""
    lives = [runner.live for runner in llm.slots.runners]
    views = [live.blank_view(live.identity.namespace_of(SHARED)) for live in lives[:1]]
    cache = llm.prompt_cache

    def depth(prompt: Tokens) -> int:
        stored = max((cache.peek(prompt, view, Costs()) for view in views), default=0) if cache else 0
        alive = 0
        for live in lives:
            tokens = live.tokens
            same = common_prefix(tokens, prompt)
            # State that cannot be cut serves only if one is a prefix of the other.
            if same == min(len(tokens), len(prompt)) or not live.profile.needs_checkpoints:
                alive = max(alive, same)
        return max(stored, alive)

    return depth


def _scope(forwarded: Forwarded, number: str) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": forwarded.method,
        "scheme": "http",
        "path": forwarded.path,
        "raw_path": forwarded.path.encode(),
        "query_string": forwarded.query,
        "root_path": "",
        "headers": [*forwarded.headers, (NUMBER.encode(), number.encode())],
        "client": None,
        "server": None,
        "state": {},
    }


class Front:
    """Reads a request's body for the router's hints, and streams the answer back."""

    def __init__(self, replicas: Any, max_body: int) -> None:
        """`replicas`: handle of their deployment; `max_body`: larger bodies are refused with 413."""
        self._replicas = replicas.options(stream=True, method_name="serve")
        self._max_body = max_body

    async def __call__(self, request: Request) -> Response:
        """Forward a request."""
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > self._max_body:
                return Response("the body is too large", 413)
        headers = tuple((name, value) for name, value in request.headers.raw if name != NUMBER.encode())
        hints = hints_of(request.headers, body)
        path, query = request.url.path, request.scope["query_string"]
        answer = self._replicas.remote(Forwarded(request.method, path, query, headers, body, hints))
        try:
            status, sent = await anext(aiter(answer))
        except BaseException:
            answer.cancel()
            raise

        async def rest() -> AsyncIterator[bytes]:
            ended = False
            try:
                async for part in answer:
                    yield part
                ended = True
            finally:
                if not ended:
                    answer.cancel()

        passed = StreamingResponse(rest(), status)
        passed.raw_headers = [(n, v) for n, v in sent if n.lower() != b"transfer-encoding"]
        return passed
