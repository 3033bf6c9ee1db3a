"""Connections that say too little, or nothing. Time goes by when the test says so."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import uvicorn

from llamahybrid.server.protocol import LOOK_SECONDS, protocol
from tests.lab.serving import wait_until

HEADERS, READING = 3.0, 6.0
"""Seconds that a request's headers may take, and that a client may take nothing."""

PIECE, PIECES = b"x" * 100_000, 200
ended: list[str] = []
"""Paths that the app has answered."""
refused: list[str] = []
connections: set[Any] = set()
"""Those that are open."""
asked, answers = threading.Event(), threading.Event()
"""The app was asked for `/`, and may answer."""
WHOLE = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers when it may."""
    assert scope["type"] == "http"
    if scope["path"] != "/":
        await large(scope["path"], send)
        ended.append(scope["path"])
        return
    asked.set()
    while not answers.is_set():
        await asyncio.sleep(0.005)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})
    ended.append("/")


async def large(path: str, send: Any) -> None:
    """Sends more than any socket holds: in one piece, or in many."""
    pieces = 1 if path == "/whole" else PIECES
    length = b"%d" % (PIECES * len(PIECE))
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
    for number in range(pieces):
        body = PIECE * (PIECES // pieces)
        await send({"type": "http.response.body", "body": body, "more_body": number + 1 < pieces})


class Timer:
    """What is to be called later."""

    def __init__(self, clock: Clock, seconds: float, call: Callable[[], object]) -> None:
        self.seconds, self.due, self.call = seconds, clock.now + seconds, call
        self._clock = clock

    def cancel(self) -> None:
        self._clock.timers.pop(self, None)


class Clock:
    """Stands for an event loop whose timers wait until the test has let their time go by."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: dict[Timer, None] = {}
        self._loop: Any = None

    def of(self, loop: Any) -> Clock:
        self._loop = loop
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def call_later(self, seconds: float, call: Callable[[], object]) -> Timer:
        timer = Timer(self, seconds, call)
        self.timers[timer] = None
        return timer

    def runs(self, seconds: float) -> bool:
        """Something that takes so long is waited for."""
        return any(timer.seconds == seconds for timer in list(self.timers))

    def let_pass(self, seconds: float) -> None:
        """So much time has gone by when this returns, and what was due has been called."""
        done = threading.Event()

        def tick() -> None:
            self.now += seconds
            for timer in sorted(self.timers, key=lambda timer: timer.due):
                if timer in self.timers and timer.due <= self.now:
                    timer.cancel()
                    timer.call()
            done.set()

        self._loop.call_soon_threadsafe(tick)
        assert done.wait(60)


@pytest.fixture(autouse=True)
def nothing_before() -> None:
    for each in (ended, refused, asked, answers):
        each.clear()


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def port(clock: Clock) -> Iterator[int]:
    class Impatient(protocol(HEADERS, READING, refused.append)):  # type: ignore[misc]
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self.loop = clock.of(self.loop)

    config = uvicorn.Config(app, http=Impatient, lifespan="off", log_config=None, timeout_keep_alive=60)
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


@pytest.fixture
def connection(port: int) -> Iterator[socket.socket]:
    with socket.socket() as made:
        made.settimeout(60)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.connect(("127.0.0.1", port))
        wait_until(lambda: len(connections) == 1)
        yield made
    wait_until(lambda: not connections)


def rest(connection: socket.socket) -> bytes:
    """What comes until the connection is closed."""
    got = b""
    with suppress(ConnectionResetError):
        while more := connection.recv(1000):
            got += more
    return got


@pytest.mark.parametrize("said", [b"", b"GET / HT", WHOLE[:-2]])
def test_headers_that_do_not_come_close_the_connection(
    connection: socket.socket, clock: Clock, said: bytes
) -> None:
    connection.sendall(said)
    wait_until(lambda: clock.runs(HEADERS))
    clock.let_pass(HEADERS - 1)
    assert not refused
    clock.let_pass(1)
    assert rest(connection) == b""
    assert refused == ["headers"]


def test_an_answer_takes_as_long_as_it_takes(connection: socket.socket, clock: Clock) -> None:
    connection.sendall(WHOLE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert asked.wait(60)
    clock.let_pass(2 * HEADERS)
    answers.set()
    assert rest(connection).endswith(b"ok")
    assert not refused


def test_the_second_request_of_a_connection_is_not_waited_for_either(
    connection: socket.socket, clock: Clock
) -> None:
    answers.set()
    connection.sendall(WHOLE)
    got = b""
    while not got.endswith(b"ok"):
        got += connection.recv(1000)
    assert not clock.runs(HEADERS), "only the server's own patience with a connection that says nothing"
    connection.sendall(b"GET / HT")
    wait_until(lambda: clock.runs(HEADERS))
    clock.let_pass(HEADERS)
    assert rest(connection) == b""
    assert refused == ["headers"]


def test_a_client_that_sends_nothing_more_gets_its_answer(connection: socket.socket, clock: Clock) -> None:
    connection.sendall(WHOLE)
    assert asked.wait(60)
    connection.shutdown(socket.SHUT_WR)
    wait_until(lambda: clock.runs(LOOK_SECONDS))
    for _ in range(20):
        clock.let_pass(LOOK_SECONDS)
    answers.set()
    got = rest(connection)
    assert got.startswith(b"HTTP/1.1 200 OK\r\n")
    assert got.endswith(b"\r\n\r\nok")


def test_a_client_that_has_left_is_noticed_before_there_is_an_answer(
    connection: socket.socket, clock: Clock
) -> None:
    connection.sendall(WHOLE)
    assert asked.wait(60)
    connection.close()
    wait_until(lambda: clock.runs(LOOK_SECONDS))

    def noticed() -> bool:
        clock.let_pass(LOOK_SECONDS)
        return not connections

    wait_until(noticed)
    answers.set()
    wait_until(lambda: ended == ["/"])


def cut_off(clock: Clock, path: str) -> bool:
    """So it is once enough time has gone by; what the sockets hold may still have gone before."""
    clock.let_pass(READING)
    return refused == ["reader"] and ended == [path] and not connections


@pytest.mark.parametrize("path", ["/whole", "/pieces"])
@pytest.mark.parametrize("close", [False, True])
def test_a_client_that_takes_nothing_is_cut_off(
    connection: socket.socket, clock: Clock, path: str, close: bool
) -> None:
    """Also where the answer is complete but for what waits to be taken, and closing the connection waits."""
    more = b"Connection: close\r\n" if close else b""
    connection.sendall(b"GET %s HTTP/1.1\r\nHost: x\r\n%s\r\n" % (path.encode(), more))
    wait_until(lambda: clock.runs(READING))
    clock.let_pass(READING - 1)
    assert not refused
    wait_until(lambda: cut_off(clock, path))


@pytest.mark.parametrize("path", ["/whole", "/pieces"])
def test_one_that_takes_it_slowly_is_not(connection: socket.socket, clock: Clock, path: str) -> None:
    """It needs longer than the limit for all of it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 200_000)
    connection.sendall(b"GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % path.encode())
    wait_until(lambda: clock.runs(READING))
    got, started = 0, clock.now
    while part := connection.recv(1 << 18):
        got += len(part)
        if got > (clock.now - started) * PIECES * len(PIECE) / 20:  # which takes twenty seconds
            clock.let_pass(1)
    assert got > PIECES * len(PIECE)
    assert clock.now > started + 2 * READING
    assert not refused
