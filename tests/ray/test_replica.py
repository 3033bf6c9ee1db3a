"""A replica without Ray around it: answers come back in parts, hang-ups end them, it tells what it knows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.requests import Request

from llamahybrid.ray.conversations import deepest, hints_of
from llamahybrid.ray.replica import Forwarded, Front, Replica

CHAT = {
    "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What is a crow?"}]
}


@asynccontextmanager
async def started(model: Path, **server: Any) -> AsyncIterator[Replica]:
    replica = Replica.__new__(Replica)
    options = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "n_parallel": 2, "chat_format": "chatml"}
    await replica.__init__(server, {"model": str(model), **options})  # type: ignore[misc]
    try:
        yield replica
    finally:
        await replica.stop()


def forwarded(body: dict[str, Any], path: str = "/v1/chat/completions", **headers: str) -> Forwarded:
    most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    raw = json.dumps({most: 4, "temperature": 0, **body}).encode()
    given = {"content-type": "application/json", **headers}
    pairs = tuple((name.encode(), value.encode()) for name, value in given.items())
    return Forwarded("POST", path, b"", pairs, raw, hints_of(given, raw))


async def whole(replica: Replica, asked: Forwarded) -> tuple[int, dict[bytes, bytes], bytes]:
    parts = [part async for part in replica.serve(asked)]
    (status, headers), body = parts[0], b"".join(parts[1:])  # type: ignore[misc,arg-type]
    return status, dict(headers), body


def test_replica_answers_responses_and_chats(tiny_model: Callable[..., Path]) -> None:
    async def play() -> None:
        async with started(tiny_model("qwen35")) as replica:
            for path, said in (("/v1/responses", {"input": "Why?"}), ("/v1/chat/completions", CHAT)):
                status, _, body = await whole(replica, forwarded(said, path))
                assert status == 200, body

    asyncio.run(play())


def test_replica_reports_resumable_conversations(tiny_model: Callable[..., Path]) -> None:
    async def play() -> None:
        async with started(tiny_model("qwen35")) as replica:
            await replica.check_health()
            assert replica.record_routing_stats() == {"resumable": []}
            status, headers, body = await whole(replica, forwarded(CHAT))
            assert status == 200
            assert headers[b"content-type"].startswith(b"application/json")
            said = json.loads(body)["choices"][0]["message"]
            told = replica.record_routing_stats()["resumable"]
            more = [*CHAT["messages"], said, {"role": "user", "content": "And a rook?"}]
            longer = forwarded({"messages": more}).hints.chain
            known = deepest(longer, told)
            assert known == longer[1]
            other = forwarded({"messages": [CHAT["messages"][0], {"role": "user", "content": "Why?"}]}).hints
            link = deepest(other.chain, told)
            assert link == other.chain[0], "they begin alike"
            assert deepest(forwarded({**CHAT, "cache_salt": "s"}).hints.chain, told) is None

    asyncio.run(play())


class Remote:
    """Stands for a deployment's handle: one replica, no Ray."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.cancelled = 0

    def options(self, **_: Any) -> Remote:
        return self

    def remote(self, asked: Forwarded) -> Any:
        stream = self._replica.serve(asked)
        self.asked = asked

        def cancel() -> None:
            self.cancelled += 1

        return _Stream(stream, cancel)


class _Stream:
    def __init__(self, inner: Any, cancel: Callable[[], None]) -> None:
        self._inner, self.cancel = inner, cancel

    def __aiter__(self) -> Any:
        return self._inner


def asked_of_front(body: bytes, **headers: str) -> Request:
    sent = [{"type": "http.request", "body": body[:5], "more_body": True}]
    sent.append({"type": "http.request", "body": body[5:], "more_body": False})

    async def receive() -> Any:
        return sent.pop(0)

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": raw,
    }
    return Request(scope, receive)


def test_front_forwards_requests_and_answers(tiny_model: Callable[..., Path]) -> None:
    async def play() -> None:
        async with started(tiny_model("qwen35")) as replica:
            handle = Remote(replica)
            front = Front(handle, max_body=1000)
            body = json.dumps({**CHAT, "max_tokens": 2}).encode()
            forged = {"content_type": "application/json", "x_llamahybrid_request": "1", "x_session_id": "s"}
            answer: Any = await front(asked_of_front(body, **forged))
            text = b"".join([part async for part in answer.body_iterator])
            assert answer.status_code == 200
            assert json.loads(text)["usage"]["completion_tokens"] >= 1
            assert handle.asked.body == body
            assert handle.asked.hints.session is not None
            assert b"x-llamahybrid-request" not in dict(handle.asked.headers)
            assert handle.cancelled == 0
            assert (await front(asked_of_front(b"x" * 2000))).status_code == 413
            long = json.dumps({**CHAT, "max_tokens": 400, "stream": True}).encode()
            answer = await front(asked_of_front(long, content_type="application/json"))
            await anext(answer.body_iterator)
            await answer.body_iterator.aclose()  # the client hung up
            assert handle.cancelled == 1

    asyncio.run(play())
