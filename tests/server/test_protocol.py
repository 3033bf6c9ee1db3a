"""Connections that say too little, or nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from llamahybrid.server.protocol import protocol
from tests.lab.serving import wait_until

SECONDS = 0.3
WHOLE = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers after twice the time that headers may take."""
    assert scope["type"] == "http"
    await asyncio.sleep(2 * SECONDS)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    import threading

    config = uvicorn.Config(
        app, http=protocol(SECONDS), lifespan="off", log_config=None, timeout_keep_alive=60
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
        thread.start()
        wait_until(lambda: server.started)
        yield listening.getsockname()[1]
        server.should_exit = True
        thread.join()


def answer(port: int, *parts: bytes) -> bytes:
    """What comes until the connection is closed, or nothing for ten seconds."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        got = b""
        try:
            for part in parts:
                connection.sendall(part)
                if part.endswith(b"\r\n\r\n"):
                    while not got.endswith(b"ok"):
                        more = connection.recv(1000)
                        if not more:
                            return got
                        got += more
            while more := connection.recv(1000):
                got += more
        except ConnectionResetError:
            pass
        return got


@pytest.mark.parametrize("said", [b"", b"GET / HT", WHOLE[:-2]])
def test_headers_that_do_not_come_close_the_connection(port: int, said: bytes) -> None:
    assert answer(port, *([said] if said else [])) == b""


def test_an_answer_takes_as_long_as_it_takes(port: int) -> None:
    assert answer(port, WHOLE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")).endswith(b"ok")


def test_the_second_request_of_a_connection_is_not_waited_for_either(port: int) -> None:
    assert answer(port, WHOLE, b"GET / HT").endswith(b"ok")
