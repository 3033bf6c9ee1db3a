"""Connections that say too little, or nothing."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from llamahybrid.server.protocol import protocol
from tests.lab.serving import wait_until

SECONDS = 0.3
PIECE, PIECES = b"x" * 100_000, 200
LITTLE = b"x" * 40_000
"""Less than what a transport holds before it tells the app to wait."""
ended: list[str] = []
"""Paths that the app has answered."""
refused: list[str] = []
connections: set[Any] = set()
"""Those that are open."""
WHOLE = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers after twice the time that headers may take."""
    assert scope["type"] == "http"
    if scope["path"] != "/":
        await large(scope["path"], send)
        ended.append(scope["path"])
        return
    await asyncio.sleep(2 * SECONDS)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def large(path: str, send: Any) -> None:
    """Sends more than any socket holds: in one piece, or in many; or a little."""
    if path == "/little":
        length = b"%d" % len(LITTLE)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
        await send({"type": "http.response.body", "body": LITTLE})
        return
    pieces = 1 if path == "/whole" else PIECES
    length = b"%d" % (PIECES * len(PIECE))
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
    for number in range(pieces):
        body = PIECE * (PIECES // pieces)
        await send({"type": "http.response.body", "body": body, "more_body": number + 1 < pieces})


@pytest.fixture(autouse=True)
def nothing_before() -> None:
    ended.clear()
    refused.clear()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    import threading

    impatient = protocol(SECONDS, 2 * SECONDS, refused.append)
    config = uvicorn.Config(app, http=impatient, lifespan="off", log_config=None, timeout_keep_alive=60)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        global connections
        connections = server.server_state.connections
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
    assert refused == ["headers"]


def test_an_answer_takes_as_long_as_it_takes(port: int) -> None:
    assert answer(port, WHOLE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")).endswith(b"ok")


def test_the_second_request_of_a_connection_is_not_waited_for_either(port: int) -> None:
    assert answer(port, WHOLE, b"GET / HT").endswith(b"ok")


@pytest.mark.parametrize("path", ["/whole", "/pieces"])
@pytest.mark.parametrize("close", [False, True])
def test_a_client_that_takes_nothing_is_cut_off(port: int, path: str, close: bool) -> None:
    """Also where the answer is complete but for what waits to be taken, and closing the connection waits."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port))
        more = b"Connection: close\r\n" if close else b""
        connection.sendall(b"GET %s HTTP/1.1\r\nHost: x\r\n%s\r\n" % (path.encode(), more))
        wait_until(lambda: refused == ["reader"] and ended == [path] and not connections, 10)


@pytest.mark.parametrize("close", [False, True])
def test_the_little_that_is_left_of_an_answer_is_not_kept_for_it_either(port: int, close: bool) -> None:
    """The app was never told to wait, as it had sent everything."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port))
        wait_until(lambda: len(connections) == 1)
        (server_side,) = connections
        sending = server_side.transport.get_extra_info("socket")
        sending.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        more = b"Connection: close\r\n" if close else b""
        connection.sendall(b"GET /little HTTP/1.1\r\nHost: x\r\n%s\r\n" % more)
        wait_until(lambda: refused == ["reader"] and ended == ["/little"] and not connections, 10)


@pytest.mark.parametrize("path", ["/whole", "/pieces"])
def test_one_that_takes_it_slowly_is_not(port: int, path: str) -> None:
    """It needs longer than the limit for all of it."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 200_000)
        connection.connect(("127.0.0.1", port))
        connection.sendall(b"GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % path.encode())
        got, clock = 0, time.monotonic()
        while part := connection.recv(1 << 20):
            got += len(part)
            if time.monotonic() - clock < 4 * SECONDS:
                time.sleep(SECONDS / 10)
    assert got > PIECES * len(PIECE)
    assert not refused
