"""A store behind two servers: the tier `remote` has its own name in usage, metrics and the page."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.lab.redis_server import PROGRAM, RedisServer
from tests.lab.serving import Serving, serving

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="neither redis-server nor valkey-server is installed")

ASKED = {"prompt": "A crow that counts what it hides finds all of it. " * 10, "max_tokens": 4}


def told(server: Serving) -> dict[str, Any]:
    """Return /cache/data after a request."""
    with server.client() as client:
        assert client.post("/v1/completions", json=ASKED).status_code == 200
        server.await_settled()
        assert server.llm.prompt_cache is not None
        assert server.llm.prompt_cache.flush()
        page: dict[str, Any] = client.get("/cache/data").json()
        return page


def test_server_resumes_from_another_server_s_store(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    with ExitStack() as stack:
        store = RedisServer(tmp_path)
        stack.callback(store.kill)
        model = {"remote": store.url}
        with serving(tiny_model("qwen35"), model=model) as first:
            told(first)
        with serving(tiny_model("qwen35"), model=model) as second:
            page = told(second)
            (past,) = page["requests"]
            assert past["source"] == "remote"
            assert page["tiers"]["remote"]["waiting"] == 0
            with second.client() as client:
                lines = client.get("/metrics").text.splitlines()
            assert "llamahybrid:cache_remote_errors_total 0.0" in lines
