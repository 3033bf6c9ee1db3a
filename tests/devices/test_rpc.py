"""Addresses of RPC servers, and finding out whether one is there without ending the process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from llamahybrid.devices import rpc
from llamahybrid.errors import DeviceError
from tests.devices.conftest import has_rpc
from tests.lab.rpc import RpcServer


def test_addresses_are_distinct() -> None:
    assert rpc.endpoints(" a:1, b:2 ,a:1,") == ("a:1", "b:2")
    assert rpc.endpoints(["b:2", "a:1", "b:2"]) == ("b:2", "a:1")
    assert rpc.endpoints("") == ()


@pytest.mark.parametrize("wrong", ["a", "a:", ":1", "a:b", "a:1:2", "a:0", "a:65536", "a b:1", "a:-1", "a:²"])
def test_invalid_addresses_are_errors(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"RPC server|ports go"):
        rpc.endpoints(f"x:1,{wrong}")


def test_too_many_servers_are_an_error() -> None:
    with pytest.raises(ValueError, match="takes 16"):
        rpc.endpoints([f"a:{port}" for port in range(1, 18)])


@pytest.mark.skipif(has_rpc(), reason="this engine has RPC")
def test_engine_without_rpc_names_the_command(open_model: Callable[..., Any]) -> None:
    with pytest.raises(DeviceError, match=r"no RPC: `llamahybrid engine build`"):
        open_model(rpc_servers="127.0.0.1:1", n_gpu_layers=-1)


@contextmanager
def listening(answer: bytes | None) -> Iterator[str]:
    """A port that takes connections, and answers each with some bytes, or never."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                if answer is None:
                    held.append(client)
                else:
                    client.sendall(answer)
                    client.close()

        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        for client in held:
            client.close()


@pytest.mark.patched
@pytest.mark.skipif(not has_rpc(), reason="this engine has no RPC")
class TestConnecting:
    def test_unreachable_server_is_an_error_not_a_crash(self, open_model: Callable[..., Any]) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(DeviceError, match=rf"{address} cannot be used: Failed to connect"):
                open_model(rpc_servers=address, n_gpu_layers=-1)

    def test_server_of_another_protocol_is_an_error(self) -> None:
        refused = pytest.raises(DeviceError, match="cannot be used")
        with listening(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address, refused:
            rpc.connect([address])

    def test_silent_server_is_an_error(self) -> None:
        refused = pytest.raises(DeviceError, match="does not answer in time")
        with listening(None) as address, refused:
            rpc.connect([address], seconds=1)

    @pytest.mark.full
    def test_server_under_two_names_is_an_error(self, rpc: RpcServer) -> None:
        from llamahybrid.devices.rpc import connect

        other = f"localhost:{rpc.port}"
        with pytest.raises(DeviceError, match=f"{other} does not answer in time; it serves one program"):
            connect([rpc.address, other], seconds=10)
