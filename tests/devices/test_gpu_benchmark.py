"""The measurements of `make gpu`, on layers that an RPC server holds."""

from __future__ import annotations

import pytest

from benchmarks import gpu
from llamahybrid.devices.rpc import connect, endpoints
from tests.lab.rpc import RpcServer


@pytest.mark.patched
def test_all_measurements_run(rpc: RpcServer, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"PARAMETERS": 1_000_000, "PROMPT": 256, "ANSWER": 8, "ROUNDS": 1}
    for name, value in small.items():
        monkeypatch.setattr(gpu, name, value)
    found = gpu.fast({"rpc_servers": rpc.address}, connect(endpoints(rpc.address))[0])
    requests = {f"ours {what}" for what in ("prefill", "decode", "end", "stream", "grows", "stripped")}
    assert found.keys() >= {*requests, "snapshot", "restore", "copy out", "copy in", "ours cut tokens"}
    assert min(found[name] for name in (*requests, "snapshot", "restore", "copy out", "ours cut tokens")) > 0
