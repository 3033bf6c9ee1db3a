"""The log of a server that nobody reads, or whose streams are closed."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llamahybrid.server.log import MOST_LINES, Background
from tests.lab.serving import ServerProcess

from .conftest import TinyModel

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="pipes and signals"),
    pytest.mark.xdist_group("serial"),
]


def line(text: str) -> logging.LogRecord:
    return logging.LogRecord("x", logging.WARNING, "", 0, text, None, None)


def test_lines_that_nobody_reads_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as read, os.fdopen(writing, "w") as write:
        monkeypatch.setattr(sys, "stdout", write)
        handler = Background("stdout")
        for number in range(3 * MOST_LINES):
            handler.emit(line(f"line {number}"))
        got: list[str] = []
        while not got or "were dropped" not in got[-1]:
            got.append(read.readline())
        assert got[0] == "line 0\n"
        assert len(got) - 1 + int(got[-1].split()[0]) == 3 * MOST_LINES
        handler.emit(line("forged\nline\x1b[31m"))
        assert [read.readline(), read.readline()] == ["forged\n", "  line\\x1b[31m\n"]
        handler.close()


def test_a_server_answers_and_ends_though_nobody_reads_its_output(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    reading, writing = os.pipe()
    try:
        server = ServerProcess(tiny_model("qwen35"), tmp_path / "log", stdout=writing)
        for _ in range(1500):
            assert server.client.get("/health").is_success
        server.end(signal.SIGTERM)
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP])
def test_a_server_without_streams_runs_and_ends_in_order(
    tiny_model: TinyModel, tmp_path: Path, how: signal.Signals
) -> None:
    kept = tmp_path / "kept"
    server = ServerProcess(tiny_model("qwen35"), tmp_path / "log", "--disk_dir", str(kept), closed=True)
    asked = {"prompt": "Tell me a story. " * 30, "max_tokens": 5}
    assert server.client.post("/v1/completions", json=asked).is_success
    server.end(how)
    assert sum(file.stat().st_size for file in kept.rglob("*") if file.is_file()) > 10_000


def test_a_port_in_use_is_told_before_the_model_is_opened(tmp_path: Path) -> None:
    import socket

    from tests.lab.serving import COMMAND

    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = ["--host", "127.0.0.1", "--port", str(taken.getsockname()[1])]
        command = [*COMMAND, str(tmp_path / "absent.gguf"), *where]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    assert run.stderr.startswith("error: cannot listen at 127.0.0.1:")
    assert len(run.stderr.splitlines()) == 1
