"""Refusals before the body is parsed; no model runs."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from llamahybrid.server.errors import later
from llamahybrid.server.keys import ApiKeys
from llamahybrid.server.limits import RequestLimits

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
) -> Asked:
    """A request whose body comes in parts, one after the other."""
    asked, coming = Asked(), list(parts)

    async def receive() -> dict[str, Any]:
        if not coming and gone:
            return {"type": "http.disconnect"}
        part = coming.pop(0) if coming else b""
        asked.read += len(part)
        return {"type": "http.request", "body": part, "more_body": bool(coming) or gone}

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

    guard = RequestLimits(app, ApiKeys(keys), 10, 100, 1000, 60, 60, require_room, asked.why.append)
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "client": ("1.2.3.4", 5)}
    asyncio.run(asyncio.wait_for(guard(scope, receive, send), 60))
    return asked


def test_valid_request_passes_in_one_piece() -> None:
    asked = ask([b"hel", b"lo"], KEY)
    assert asked.body == b"hello"
    assert not asked.why


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


def test_body_without_a_length_is_read_up_to_the_limit() -> None:
    asked = ask([b"x" * 60] * 1000, KEY)
    assert (asked.status, asked.read) == (413, 120)


@pytest.mark.parametrize("length", [b"-1", b"ten", b"1e3", b""])
def test_a_length_is_a_number(length: bytes) -> None:
    assert ask([b"x"], KEY, (b"content-length", length)).status == 400


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

        guard = RequestLimits(app, ApiKeys([]), 10, 100, 1000, 60, 0.01, lambda: None, why.append)
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
