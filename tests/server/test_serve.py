"""A server as a process: it stops when it is told to, and what was said is there when it comes back."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.lab.serving import wait_until

TinyModel = Callable[..., Path]
STORY = {"prompt": "Tell me a story. " * 30, "max_tokens": 5, "temperature": 0.0}


class Process:
    """`llamahybrid serve` on a free port."""

    def __init__(self, model: Path, *more: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        arguments = (
            "serve",
            str(model),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--n-threads",
            "1",
            *more,
        )
        command = [sys.executable, "-c", "from llamahybrid.cli.main import app; app()", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60)
        wait_until(self._answers, 60)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.process.communicate()[0]
        try:
            return self.client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def ask(self) -> httpx.Response:
        return self.client.post("/v1/completions", json=STORY)

    def end(self, how: signal.Signals) -> tuple[int, str]:
        """Its status, and what it printed."""
        self.process.send_signal(how)
        printed = self.process.communicate(timeout=30)[0].decode()
        self.client.close()
        return self.process.returncode, printed


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_told_to_end_it_ends_what_runs_and_writes_what_was_said(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    model, kept = tiny_model("qwen35"), ("--disk_dir", str(tmp_path), "--shutdown-seconds", "0.5")
    first = Process(model, *kept)
    said = first.ask().json()["choices"][0]["text"]
    endless = {"prompt": "x", "max_tokens": 2000, "min_tokens": 2000, "stream": True}
    with first.client.stream("POST", "/v1/completions", json=endless) as response:
        lines = response.iter_lines()
        next(lines)
        first.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] in ("cancelled", "length")
    _, printed = first.end(signal.SIGTERM)
    assert "Application shutdown complete" in printed
    assert "Traceback" not in printed

    second = Process(model, *kept)
    again = second.ask().json()
    second.end(signal.SIGINT)
    assert again["choices"][0]["text"] == said
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 100


def test_a_model_that_is_none_ends_it_with_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"nothing")
    command = [
        sys.executable,
        "-c",
        "from llamahybrid.cli.main import app; app()",
        "serve",
        str(tmp_path / "x.gguf"),
    ]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    run = subprocess.run([*command, "--port", port], capture_output=True, text=True, timeout=60)
    assert run.returncode != 0
    assert "x.gguf" in run.stderr
