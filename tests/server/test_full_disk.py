"""A disk that is full, and then is not."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from llamahybrid.prompt_cache.disk import DiskRows
from tests.lab.serving import Serving, serving


def errors(client: httpx.Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith("llamahybrid:cache_disk_errors_total")]
    return float(line.split()[1])


def say(server: Serving, client: httpx.Client, word: str) -> None:
    asked = {"prompt": f"{word} and what it means. " * 20, "max_tokens": 4, "temperature": 0.0}
    assert client.post("/v1/completions", json=asked).status_code == 200
    assert server.llm.prompt_cache is not None
    server.llm.prompt_cache.flush()


def test_a_full_disk_is_warned_of_once_counted_and_tried_again(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    full = True
    inner = DiskRows.write

    def write(rows: DiskRows, *record: Any) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        inner(rows, *record)

    monkeypatch.setattr(DiskRows, "write", write)
    model = {"disk_dir": str(tmp_path)}
    with serving(tiny_model("qwen35"), model=model) as server, server.client() as client:
        with caplog.at_level(logging.WARNING, "llamahybrid"):
            for word in ("one", "two", "three"):
                say(server, client, word)
        warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
        (warning,) = [record for record in warnings if record.name.startswith("llamahybrid")]
        assert "No space left" in warning.getMessage()
        counted = errors(client)
        assert counted > 0
        assert client.get("/health").status_code == 200
        full = False
        cache: Any = server.llm.prompt_cache
        cache.disk.writing._until = 0.0
        say(server, client, "four")
        assert errors(client) == counted
        assert cache.stats().extra["disk_bytes"] > 0
