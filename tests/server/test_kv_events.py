"""The server tells routers what it can resume, while a model is open; a port that is taken stops nothing."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.events.subscriber import Subscriber
from tests.lab.serving import serving
from tests.lab.waiting import free_port


def test_a_router_hears_of_conversations(tiny_model: Callable[..., Path]) -> None:
    at = f"tcp://127.0.0.1:{free_port()}"
    told = {"kv_events": at, "kv_events_topic": "kv@here@tiny", "kv_block_size": 4}
    with serving(tiny_model("qwen35"), model=told) as server, server.client() as client:
        router = Subscriber(at, "kv@here@")
        asked = {"prompt": "What is a crow, and where does it live?", "max_tokens": 8}
        assert client.post("/v1/completions", json=asked).status_code == 200
        router.until(lambda: router.paths().get("GPU"))
        assert router.topics == {"kv@here@tiny"}
        router.close()


def test_port_in_use_costs_a_warning(
    tiny_model: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        at = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with serving(tiny_model("llama"), model={"kv_events": at}) as server, server.client() as client:
            answer = client.post("/v1/completions", json={"prompt": "What is a crow?", "max_tokens": 2})
            assert answer.status_code == 200
    assert "KV events are not published" in caplog.text
