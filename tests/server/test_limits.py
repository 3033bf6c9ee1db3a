"""Refusals before the body is parsed."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from llamahybrid.server.errors import later
from llamahybrid.server.limits import RequestLimits
from llamahybrid.server.settings import ServerSettings
from tests.lab.serving import Held, serving, wait_until

TinyModel = Callable[..., Path]
KEY = (b"authorization", b"Bearer one")


class Asked:
    """The outcome of one request."""

    def __init__(self) -> None:
        self.body: bytes | None = None
        """The body that the app received; None: no request reached it."""
        self.read = 0
        """Bytes that were taken from the connection."""
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.told: dict[str, Any] = {}
        self.why: list[str] = []


def ask(
    parts: Sequence[bytes],
    *headers: tuple[bytes, bytes],
    path: str = "/v1/completions",
    method: str = "POST",
    full: bool = False,
    keys: Sequence[str] = ("one",),
    gone: bool = False,
    slow: bool = False,
) -> Asked:
    """A request whose body comes in parts, one after the other; `slow`: and does not end."""
    asked, coming = Asked(), list(parts)

    async def receive() -> dict[str, Any]:
        if not coming and gone:
            return {"type": "http.disconnect"}
        if not coming and slow:
            await asyncio.Event().wait()
        part = coming.pop(0) if coming else b""
        asked.read += len(part)
        return {"type": "http.request", "body": part, "more_body": bool(coming) or gone or slow}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            asked.status, asked.headers = message["status"], dict(message["headers"])
        else:
            asked.told = json.loads(message["body"])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        assert not message["more_body"]
        asked.body = message["body"]
        assert scope["state"]["api_key"] in (None, *keys)

    def require_room() -> None:
        if full:
            raise later("full", 7, 429)

    seconds = 0.01 if slow else 60
    settings = ServerSettings(api_keys=list(keys), max_body_bytes=100, body_seconds=seconds)
    guard = RequestLimits(app, settings, require_room, asked.why.append)
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "client": ("1.2.3.4", 5)}
    asyncio.run(asyncio.wait_for(guard(scope, receive, send), 60))
    return asked


def test_valid_request_passes_in_one_piece() -> None:
    asked = ask([b"hel", b"lo"], KEY)
    assert asked.body == b"hello"
    assert not asked.why


def test_a_body_is_held_once_while_it_is_answered() -> None:
    parts, held, size = [b"x" * (1 << 20)] * 16, list[int](), 16 << 20

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": parts.pop(), "more_body": bool(parts)}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        assert len(message["body"]) == size
        held.append(tracemalloc.get_traced_memory()[0])
        del message
        held.append(tracemalloc.get_traced_memory()[0])

    guard = RequestLimits(app, ServerSettings(max_body_bytes=size), lambda: None, lambda *_: None)
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": (), "client": None}
    tracemalloc.start()
    try:
        asyncio.run(guard(scope, receive, receive))
    finally:
        tracemalloc.stop()
    assert held[0] < 1.2 * size
    assert held[1] < 0.2 * size, "the app alone decides how long"


@pytest.mark.parametrize("headers", [(), ((b"authorization", b"Bearer two"),), ((b"x-api-key", b"two"),)])
def test_without_a_key_no_body_is_read(headers: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        asked = ask([b"x" * 10] * 1000, *headers)
    assert (asked.status, asked.read, asked.body) == (401, 0, None)
    assert asked.told["error"]["type"] == "authentication_error"
    assert asked.told["error"]["code"] == "invalid_api_key"
    assert asked.why == ["key"]
    assert "1.2.3.4" in caplog.text
    assert "two" not in caplog.text


def test_only_health_needs_no_key() -> None:
    assert ask([], path="/health", method="GET").body == b""
    for path in ("/metrics", "/v1/models", "/docs", "/openapi.json", "/health/", "//health", "/nothing"):
        assert ask([], path=path, method="GET").status == 401, path


def test_cors_preflight_needs_no_key() -> None:
    assert ask([], method="OPTIONS").body == b""


@pytest.mark.parametrize("length", [b"-1", b"ten", b"1e3", b""])
def test_a_length_is_a_number(length: bytes) -> None:
    assert ask([b"x"], KEY, (b"content-length", length)).status == 400


def test_large_and_slow_bodies_are_refused() -> None:
    huge = ask([b"x"] * 9, KEY, (b"content-length", b"101"))
    assert (huge.status, huge.read, huge.why) == (413, 0, ["body"])
    chunked = ask([b"x" * 60] * 9, KEY, (b"transfer-encoding", b"chunked"))
    assert (chunked.status, chunked.read, chunked.why) == (413, 120, ["body"])
    late = ask([b"{"], KEY, (b"content-length", b"9"), slow=True)
    assert (late.status, late.body, late.why) == (408, None, ["slow"])
    assert {each.headers[b"connection"] for each in (huge, chunked, late)} == {b"close"}, "the rest is unread"


def test_full_queue_refuses_before_the_body_is_read() -> None:
    asked = ask([b"x" * 10], KEY, full=True)
    assert (asked.status, asked.read, asked.why) == (429, 0, ["queue"])
    assert asked.headers[b"retry-after"] == b"7"
    assert ask([], KEY, full=True, path="/v1/models", method="GET").body == b""


def test_disconnect_within_the_body_gets_no_response() -> None:
    asked = ask([b"x"], KEY, gone=True)
    assert (asked.body, asked.status) == (None, 0)


def test_a_reader_that_takes_nothing_is_counted_and_given_up() -> None:
    why = list[str]()

    async def play() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})

        async def send(message: Any) -> None:
            await asyncio.Event().wait()

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        guard = RequestLimits(app, ServerSettings(send_seconds=0.01), lambda: None, why.append)
        scope = {"type": "http", "method": "GET", "path": "/metrics", "headers": (), "client": None}
        await asyncio.wait_for(guard(scope, receive, send), 60)

    asyncio.run(play())
    assert why == ["reader"]


def test_a_path_writes_no_lines_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "llamahybrid.server"):
        ask([b""], path="/x\nrefused (key): /y from 8.8.8.8")
    (said,) = caplog.records
    assert "\n" not in said.getMessage()


@pytest.mark.parametrize(("path", "method"), [("/health", "GET"), ("/v1/completions", "OPTIONS")])
@pytest.mark.parametrize("header", [(b"content-length", b"1"), (b"transfer-encoding", b"chunked")])
def test_requests_without_a_key_hold_no_memory(path: str, method: str, header: Any) -> None:
    asked = ask([b"x"] * 10, header, path=path, method=method)
    assert (asked.status, asked.read, asked.body) == (413, 0, None)
    assert asked.headers[b"connection"] == b"close"


# -- connections to a server that runs ------------------------------------------------------------------


def test_bodies_beyond_the_memory_for_them_get_503(tiny_model: TinyModel) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n"
    with serving(tiny_model("qwen35"), max_bodies_bytes=1000) as server, server.client() as client:

        def refused(why: str) -> bool:
            return f'llamahybrid:refused_total{{why="{why}"}} 1.0' in client.get("/metrics").text

        asked = {"prompt": "x" * 500, "max_tokens": 1}
        with socket.create_connection(("127.0.0.1", server.port)) as slow:
            slow.sendall(head + b" " * 800)

            def full() -> bool:
                response = client.post("/v1/completions", json=asked)
                return response.status_code == 503 and int(response.headers["retry-after"]) > 0

            wait_until(full)
            assert refused("bodies")
        wait_until(lambda: client.post("/v1/completions", json=asked).status_code == 200)


def test_unread_stream_is_ended(tiny_model: TinyModel) -> None:
    """Few tokens fill the buffers, long before the kernel gives the connection up."""
    with serving(tiny_model("qwen35"), model={"logits_all": True}, send_seconds=2) as server:
        server.listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        asked = {"prompt": "x", "max_tokens": 1000, "stream": True, "ignore_eos": True, "logprobs": 20}
        body = json.dumps(asked).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(("127.0.0.1", server.port))
            reader.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            wait_until(lambda: 'llamahybrid:refused_total{why="reader"} 1.0' in server.metrics())
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # its connection does not wait for it
                wait_until(lambda: not server.server.server_state.connections)
        server.await_settled()


def test_requests_in_progress_count_and_idle_connections_do_not(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tiny_model("qwen35"), max_connections=1) as server, server.client() as client:
        held = Held(monkeypatch, after=0)
        asked = {"prompt": "x", "max_tokens": 2, "stream": True}
        with ExitStack() as stack:
            for _ in range(3):  # connections without a request
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 60))
            pool = stack.enter_context(ThreadPoolExecutor(1))
            first = pool.submit(client.post, "/v1/completions", json=asked)
            wait_until(lambda: held.batches == 1)
            refused = client.get("/v1/models")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert client.get("/health").status_code == 200
            assert client.get("/metrics").status_code == 200
            held.go_on()
            assert first.result().status_code == 200
            assert client.get("/v1/models").status_code == 200
