"""The recording proxy forwards requests unchanged, and writes neither keys nor salts down."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from llamahybrid.harness.traces.proxy import RecordingProxy
from llamahybrid.harness.traces.trace import TraceWriter, read
from tests.harness.fake_server import FakeServer
from tests.harness.traces.said import MESSAGES
from tests.lab.serving import wait_until


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url + "/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer SECRETKEY"},
    )
    return urllib.request.urlopen(request, timeout=60)


def test_proxy_passes_requests_on_and_records_them(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", "proxy")
    with FakeServer() as server, RecordingProxy(server.url + "/v1", writer) as proxy:
        body = {"messages": list(MESSAGES), "max_tokens": 5, "temperature": 0, "cache_salt": "Berta"}
        with _post(proxy.url, body) as reply:
            direct = json.load(reply)
        with _post(proxy.url, {**body, "stream": True}) as reply:
            streamed = reply.read().decode()
        with urllib.request.urlopen(proxy.url + "/v1/models", timeout=60) as reply:
            assert json.load(reply)["data"][0]["id"] == "fake"
        assert server.keys == ["Bearer SECRETKEY"] * 2, "it reaches the server"
        assert server.bodies[0] == body
        wait_until(lambda: len((tmp_path / "t").read_text().splitlines()) == 3)
    writer.close()
    assert streamed.endswith("data: [DONE]\n\n")
    text = (tmp_path / "t").read_text()
    assert "SECRETKEY" not in text
    assert "Berta" not in text
    one, two = read(tmp_path / "t")
    assert one.ask.messages == two.ask.messages == MESSAGES
    assert (one.ask.max_tokens, one.ask.seed) == (5, None)
    assert one.ask.salt == two.ask.salt != ""
    assert one.text == direct["choices"][0]["message"]["content"]
    assert two.text == one.text.replace("|", "")
    assert (one.cached, one.total) == (0, direct["usage"]["prompt_tokens"])
    assert two.cached is not None
    assert two.cached > 0


def test_proxy_forwards_events_at_once(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", "proxy")
    body = {"messages": list(MESSAGES), "stream": True}
    with (
        FakeServer(split=True) as server,
        RecordingProxy(server.url, writer) as proxy,
        _post(proxy.url, body) as reply,
    ):
        assert reply.readline().startswith(b"data: "), "the server waits with the next one until this came"
        server.go.set()
        assert reply.read().endswith(b"data: [DONE]\n\n")
    writer.close()


def test_slow_recording_delays_no_client(tmp_path: Path) -> None:
    passed = threading.Event()

    class Slow(TraceWriter):
        def add(self, *entry: Any) -> None:
            assert passed.wait(60)
            super().add(*entry)

    writer = Slow(tmp_path / "t", "proxy")
    with FakeServer() as server, RecordingProxy(server.url, writer) as proxy:
        for _ in range(2):
            with _post(proxy.url, {"messages": list(MESSAGES)}) as reply:
                assert json.load(reply)["choices"]
        passed.set()
    writer.close()
    assert len(read(tmp_path / "t")) == 2


def test_proxy_without_a_server_answers_502(tmp_path: Path) -> None:
    with FakeServer() as server:
        url = server.url
    with (
        RecordingProxy(url, TraceWriter(tmp_path / "t", "proxy")) as proxy,
        pytest.raises(urllib.error.HTTPError, match="502"),
    ):
        _post(proxy.url, {"messages": list(MESSAGES)})
