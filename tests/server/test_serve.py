"""A server as a process: shutdown by signals, and the cache after a restart."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from uvicorn.lifespan.on import LifespanOn

from llamahybrid.server.app import app_of
from llamahybrid.server.serve import server_of
from llamahybrid.server.service import Service
from llamahybrid.server.settings import ModelSettings, ServerSettings
from tests.lab.serving import ServerProcess, serving

TinyModel = Callable[..., Path]
STORY = {"prompt": "Tell me a story. " * 30, "max_tokens": 5, "temperature": 0.0}


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_sigterm_ends_requests_and_writes_the_cache(tiny_model: TinyModel, tmp_path: Path) -> None:
    model, kept = tiny_model("qwen35"), ("--disk_dir", str(tmp_path / "kept"), "--shutdown-seconds", "0.5")
    first = ServerProcess(model, tmp_path / "log", *kept)
    said = first.client.post("/v1/completions", json=STORY).json()["choices"][0]["text"]
    endless = {"prompt": "x", "max_tokens": 2000, "min_tokens": 2000, "stream": True}
    with first.client.stream("POST", "/v1/completions", json=endless) as response:
        lines = response.iter_lines()
        next(lines)
        first.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] in ("cancelled", "length")
    printed = first.end(signal.SIGTERM)
    assert "Application shutdown complete" in printed
    assert "Traceback" not in printed

    second = ServerProcess(model, tmp_path / "log", *kept)
    again = second.client.post("/v1/completions", json=STORY).json()
    second.end(signal.SIGINT)
    assert again["choices"][0]["text"] == said
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 100


def test_forced_exit_closes_the_app_in_order(tiny_model: TinyModel) -> None:
    """A second Ctrl-C; cancelled tasks of uvicorn would print a traceback."""
    with serving(tiny_model("qwen35")) as server:
        server.server.force_exit = True
        server.stop()
        lifespan = server.server.lifespan
        assert isinstance(lifespan, LifespanOn)
        assert not lifespan.error_occurred


@pytest.mark.parametrize(("seconds", "graceful"), [(5.5, 15), (float("inf"), None)])
def test_shutdown_may_wait_without_limit(seconds: float, graceful: int | None) -> None:
    service = Service(ServerSettings(shutdown_seconds=seconds), [ModelSettings(model="x.gguf")])
    assert server_of(app_of(service)).config.timeout_graceful_shutdown == graceful


def test_idle_connections_outlive_those_of_clients() -> None:
    """Else a client's request may meet a connection that the server closes."""
    config = server_of(app_of(Service(ServerSettings(), [ModelSettings(model="x.gguf")]))).config
    assert config.timeout_keep_alive > 2 * (httpx.Limits().keepalive_expiry or 0)


@pytest.mark.skipif(os.name != "posix", reason="limits of processes")
@pytest.mark.xdist_group("serial")
def test_connections_are_not_bounded_by_the_soft_limit_of_open_files(tiny_model: TinyModel) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = max(map(int, os.listdir("/dev/fd"))) + 64
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
        server = stack.enter_context(serving(tiny_model("qwen35"), max_connections=low))
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        assert stack.enter_context(server.client()).get("/health").status_code == 200
