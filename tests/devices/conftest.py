"""RPC servers for tests, on engines that have RPC."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llamahybrid.devices import ggml
from llamahybrid.errors import DeviceError
from tests.lab.rpc import RpcServer


def has_rpc() -> bool:
    """The engine of this run has the RPC backend."""
    try:
        ggml.require_rpc()
    except DeviceError:
        return False
    return True


@pytest.fixture(scope="session")
def rpc() -> Iterator[RpcServer]:
    """A server that stays up."""
    if not has_rpc():
        pytest.skip("this engine has no RPC")
    with RpcServer() as server:
        yield server


@pytest.fixture
def mortal() -> Iterator[RpcServer]:
    """A server that a test may kill and start again."""
    if not has_rpc():
        pytest.skip("this engine has no RPC")
    if ggml.losses("127.0.0.1:1") is None:
        pytest.skip("this engine ends the process when a server is gone")
    with RpcServer() as server:
        yield server
