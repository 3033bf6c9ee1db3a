"""The RPC server: what it refuses before native code would end without a word."""

from __future__ import annotations

import socket

import pytest

from llamahybrid.devices import ggml, server
from llamahybrid.errors import DeviceError


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(ggml, "require_rpc", lambda: None)
    monkeypatch.setattr(ggml, "serve", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(server.signal, "signal", lambda *_: None)
    return calls


def test_used_port_is_an_error(started: list[tuple[object, ...]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DeviceError, match=f"cannot listen at 127.0.0.1:{port}: Address already in use"):
            server.run("127.0.0.1", port)
    assert not started


def test_foreign_address_is_an_error(started: list[tuple[object, ...]]) -> None:
    with pytest.raises(DeviceError, match="cannot listen"):
        server.run("203.0.113.1", 50052)
    with pytest.raises(DeviceError, match="no address of this machine"):
        server.run("nowhere.invalid", 50052)
    assert not started
