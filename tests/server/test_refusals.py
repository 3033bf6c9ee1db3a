"""Connections to a server that runs: too large, too slow, without its key."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.lab.serving import Held, serving, wait_until

TinyModel = Callable[..., Path]


def test_large_and_slow_bodies_are_refused(tiny_model: TinyModel) -> None:
    """By a connection of its own, of which no more is read."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Api-Key: one\r\n"
    huge, slow = b"Content-Length: %d\r\n\r\n" % (1 << 30), b"Content-Length: 9\r\n\r\n{"
    chunked = b"Transfer-Encoding: chunked\r\n\r\n"
    chunks = (b"%x\r\n" % 4096 + b" " * 4096 + b"\r\n") * 3
    too_much = {
        head + huge: b"413",
        head.replace(b"one", b"two") + huge: b"401",
        head + chunked + chunks: b"413",
    }
    limits: tuple[tuple[dict[str, Any], dict[bytes, bytes], dict[str, int]], ...] = (
        ({"max_body_bytes": 5000}, too_much, {"body": 2, "key": 1}),
        ({"body_seconds": 0.2}, {head + slow: b"408"}, {"slow": 1}),  # a server each: nobody else is late
    )
    for limit, sent, refused in limits:
        with serving(tiny_model("qwen35"), api_key="one", **limit) as server:
            for said, status in sent.items():
                with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
                    connection.sendall(said)
                    told = connection.recv(5000)
                    assert told[9:12] == status, said[:200]
                    with suppress(ConnectionResetError):
                        while connection.recv(5000):
                            pass
            for why, count in refused.items():
                assert f'llamahybrid:refused_total{{why="{why}"}} {count}.0' in server.metrics()
            if sent is too_much:
                with server.client(headers={"x-api-key": "one"}) as client:
                    asked = {"prompt": "x", "max_tokens": 1}
                    assert client.post("/v1/completions", json=asked).status_code == 200


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
    """The transport pauses at once, so that a few bytes in the buffers of the kernel are enough."""
    with serving(tiny_model("qwen35"), send_seconds=2) as server:
        server.listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        asked = {"prompt": "x", "max_tokens": 1000, "stream": True, "ignore_eos": True}
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
            held.go_on()
            assert first.result().status_code == 200
            assert client.get("/v1/models").status_code == 200
