"""The log of a server that nobody reads, or whose streams are closed."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from llamahybrid.server.log import MOST_LINES, Background
from tests.lab.serving import ServerProcess, wait_until

from .conftest import TinyModel

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="pipes and signals"),
    pytest.mark.xdist_group("serial"),
]


def line(text: str) -> logging.LogRecord:
    return logging.LogRecord("x", logging.WARNING, "", 0, text, None, None)


def test_unread_lines_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as read, os.fdopen(writing, "w") as write:
        monkeypatch.setattr(sys, "stdout", write)
        handler = Background("stdout")
        for number in range(3 * MOST_LINES):
            handler.emit(line(f"line {number}"))
        written = dropped = 0
        while written + dropped < 3 * MOST_LINES:
            got = read.readline()
            if "were dropped" in got:
                dropped += int(got.split()[0])
            else:
                assert dropped or got == f"line {written}\n"
                written += 1
        assert written + dropped == 3 * MOST_LINES
        assert dropped >= MOST_LINES // 2
        handler.emit(line("forged\nline\x1b[31m"))
        assert [read.readline(), read.readline()] == ["forged\n", "  line\\x1b[31m\n"]
        handler.close()


def test_unread_output_stops_neither_answers_nor_shutdown(tiny_model: TinyModel, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    try:
        os.set_blocking(writing, False)
        with suppress(BlockingIOError):
            while True:
                os.write(writing, b"x" * 512)
        os.set_blocking(writing, True)
        server = ServerProcess(tiny_model("qwen35"), tmp_path / "log", stdout=writing)
        for _ in range(20):
            assert server.client.get("/health").is_success
        server.end(signal.SIGTERM)
    finally:
        os.close(reading)
        os.close(writing)


def test_a_server_without_streams_runs_and_ends_in_order(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Also where its terminal is closed."""
    kept = tmp_path / "kept"
    server = ServerProcess(tiny_model("qwen35"), tmp_path / "log", "--disk_dir", str(kept), closed=True)
    asked = {"prompt": "Tell me a story. " * 30, "max_tokens": 5}
    assert server.client.post("/v1/completions", json=asked).is_success
    server.end(signal.SIGHUP)
    assert sum(file.stat().st_size for file in kept.rglob("*") if file.is_file()) > 10_000


def test_client_without_an_answer_leaves_a_line(tiny_model: TinyModel, tmp_path: Path) -> None:
    """A client that shuts its sending side has hung up: uvicorn closes the connection."""
    server = ServerProcess(tiny_model("qwen35"), tmp_path / "log", "--n_ctx", "65536")
    body = b'{"prompt": "Tell me a story. ", "max_tokens": 65000, "ignore_eos": true}'
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head.encode() + body)
        wait_until(lambda: server.metrics()["llamacpp:requests_processing"] == 1)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    wait_until(lambda: server.metrics()["llamacpp:requests_processing"] == 0)
    assert server.end(signal.SIGTERM).count("a client hung up before the end of its answer") == 1
