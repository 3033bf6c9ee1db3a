"""Devices as ggml tells of them, on machines that are made up; and the library that is really loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamahybrid.devices import ggml
from llamahybrid.devices.ggml import CPU, GPU, IGPU, Device
from llamahybrid.engine import bindings
from llamahybrid.errors import DeviceError

Machine = Callable[..., None]
"""`machine((kind, backend), ...)`: its devices, whose handles count from 100."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """One that has such devices, and `more` functions; no other function of ggml is there."""

    def make(*devices: tuple[int, str], **more: Callable[..., Any]) -> None:
        there: dict[str, Callable[..., Any]] = {
            "ggml_backend_dev_count": lambda: len(devices),
            "ggml_backend_dev_get": lambda n: 100 + n,
            "ggml_backend_dev_type": lambda handle: devices[handle - 100][0],
            "ggml_backend_dev_backend_reg": lambda handle: handle,
            "ggml_backend_reg_name": lambda handle: devices[handle - 100][1].encode(),
            "ggml_backend_dev_name": lambda handle: f"name {handle}".encode(),
            "ggml_backend_dev_description": lambda handle: b"a card\xff",
            "ggml_backend_dev_by_type": lambda kind: {CPU: 7}[kind],
            "ggml_backend_reg_by_name": lambda name: None,
            **more,
        }

        def function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
            if name not in there:
                raise AttributeError(name)
            return there[name]

        monkeypatch.setattr(ggml, "_function", function)

    return make


def _handles() -> list[int]:
    return [device.handle for device in ggml.local()]


def test_integrated_gpus_are_taken_where_there_is_no_other(machine: Machine) -> None:
    machine((CPU, "CPU"), (IGPU, "Vulkan"), (GPU, "CUDA"), (GPU, "CUDA"))
    assert _handles() == [102, 103]
    machine((CPU, "CPU"), (IGPU, "Vulkan"))
    assert _handles() == [101]
    machine((CPU, "CPU"))
    assert _handles() == []


def test_gpus_behind_servers_are_not_this_machines(machine: Machine) -> None:
    machine((GPU, "RPC"), (IGPU, "Vulkan"), (CPU, "CPU"))
    assert _handles() == [101]


def test_a_server_computes_with_the_cpu_where_there_is_no_gpu(machine: Machine) -> None:
    machine((CPU, "CPU"))
    assert ggml.computing() == [Device(7, "CPU")]
    machine((CPU, "CPU"), (GPU, "CUDA"))
    assert [device.handle for device in ggml.computing()] == [101]


def test_without_the_backend_or_its_function_there_is_no_rpc(machine: Machine) -> None:
    with_backend = {"ggml_backend_reg_by_name": {b"RPC": 5}.get}
    machine()
    with pytest.raises(DeviceError, match=r"no RPC: `llamahybrid engine build`"):
        ggml.require_rpc()
    machine(**with_backend, ggml_backend_reg_get_proc_address=lambda backend, name: None)
    with pytest.raises(DeviceError, match="no RPC"):
        ggml.require_rpc()
    machine(**with_backend, ggml_backend_reg_get_proc_address=lambda backend, name: 1)
    ggml.require_rpc()


def _serving(machine: Machine, count: int, server: int | None = 5) -> list[bytes]:
    """A machine whose servers have so many devices each; the addresses that are connected to."""
    asked: list[bytes] = []

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)
    def add(endpoint: bytes) -> int | None:
        asked.append(endpoint)
        return server

    address = ctypes.cast(add, ctypes.c_void_p).value
    machine(
        ggml_backend_reg_by_name={b"RPC": 5}.get,
        ggml_backend_reg_get_proc_address=lambda backend, name: {b"ggml_backend_rpc_add_server": address}[
            name
        ],
        ggml_backend_reg_dev_count=lambda server: count,
        ggml_backend_reg_dev_get=lambda server, n: 200 + n,
        kept=add,
    )
    return asked


@pytest.mark.parametrize(("count", "server"), [(0, 5), (2, None)])
def test_a_server_without_devices_is_an_error(machine: Machine, count: int, server: int | None) -> None:
    _serving(machine, count, server)
    with pytest.raises(DeviceError, match="the RPC server a:1 offers no device"):
        ggml.add_server("a:1")


@pytest.mark.parametrize("empty", [False, True])
def test_libraries_that_cannot_be_found_are_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty: bool
) -> None:
    monkeypatch.setattr(bindings, "loaded_from", lambda: tmp_path if empty else None)
    with pytest.raises(DeviceError, match="cannot be found"):
        ggml.file()
