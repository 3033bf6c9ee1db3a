"""The ggml that llama_cpp has loaded: its devices, and its RPC backend (ggml-backend.h, ggml-rpc.h).

llama_cpp declares none of these functions. The RPC backend is one of the library's own parts; what adds a
server to it is asked for by name, so that it is found wherever a build has put it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from llamahybrid.engine import bindings, installed
from llamahybrid.errors import DeviceError

CPU, GPU, IGPU = 0, 1, 2
"""Kinds of devices (enum ggml_backend_dev_type)."""

_pointer, _text = ctypes.c_void_p, ctypes.c_char_p


@dataclass(frozen=True)
class Device:
    """One device, of this machine or behind an RPC server."""

    handle: int
    """The ``ggml_backend_dev_t``; the library keeps it for good."""
    identity: str
    """What it is, in any process: a server and the number of its device, or the library's own names."""


def file() -> Path:
    """The library that has the backends in it.

    Raises:
        DeviceError: it cannot be told.
    """
    import llama_cpp  # noqa: F401 - loads it

    folder = bindings.loaded_from()
    found = folder and (installed.library(folder, "ggml") or installed.library(folder, "llama"))
    if not found:
        raise DeviceError("the libraries of llama.cpp cannot be found")
    return found


def files() -> list[Path]:
    """All libraries that may have functions of ggml, which a build puts into one or into several."""
    main = file()
    more = (installed.library(main.parent, name) for name in ("ggml-base", "ggml-rpc", "llama"))
    return [main, *filter(None, more)]


def local() -> list[Device]:
    """This machine's GPUs, as llama.cpp takes them by itself: integrated ones where there is no other."""
    found: dict[int, list[Device]] = {GPU: [], IGPU: []}
    for n in range(_function("ggml_backend_dev_count", ctypes.c_size_t)()):
        handle = _function("ggml_backend_dev_get", _pointer, ctypes.c_size_t)(n)
        kind = _function("ggml_backend_dev_type", ctypes.c_int, _pointer)(handle)
        if kind in found and _backend(handle) != "RPC":
            found[kind].append(Device(handle, f"{_named(handle, 'name')}: {_named(handle, 'description')}"))
    return found[GPU] or found[IGPU]


def gpus() -> list[str]:
    """What the GPUs of this machine are called."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    return [device.identity for device in local()]


def computing() -> list[Device]:
    """What an RPC server of this machine computes with: its GPUs, else its CPU."""
    return local() or [Device(_function("ggml_backend_dev_by_type", _pointer, ctypes.c_int)(CPU), "CPU")]


def require_rpc() -> None:
    """Raise DeviceError where the library has no RPC backend."""
    _by_name("ggml_backend_rpc_add_server", _pointer, _text)


def add_server(endpoint: str) -> list[Device]:
    """The devices of an RPC server, which is connected to; the library ends the process where it cannot be.

    They are not registered: models that do not name them never see them. Asked again, the same devices.

    Raises:
        DeviceError: the library has no RPC, or the server no device.
    """
    add = _by_name("ggml_backend_rpc_add_server", _pointer, _text)
    server = add(endpoint.encode())
    count = _function("ggml_backend_reg_dev_count", ctypes.c_size_t, _pointer)(server) if server else 0
    if not count:
        raise DeviceError(f"the RPC server {endpoint} offers no device")
    get = _function("ggml_backend_reg_dev_get", _pointer, _pointer, ctypes.c_size_t)
    return [Device(get(server, n), f"{endpoint}/{n}") for n in range(count)]


def ask(endpoint: str) -> None:
    """Send something to a server that is connected, and wait for its answer."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    memory = _function("ggml_backend_dev_memory", None, _pointer, *[ctypes.POINTER(ctypes.c_size_t)] * 2)
    memory(add_server(endpoint)[0].handle, ctypes.byref(free), ctypes.byref(total))


def serve(endpoint: str, threads: int, folder: Path | None) -> None:
    """Be an RPC server until the process ends; it returns where it cannot listen.

    Args:
        endpoint: address and port to listen at.
        threads: of the CPU.
        folder: where large tensors are kept, so that a model need not be sent twice.

    Raises:
        DeviceError: the library has no RPC.
    """
    devices = [device.handle for device in computing()]
    start = _by_name(
        "ggml_backend_rpc_start_server", None, _text, _text, ctypes.c_size_t, ctypes.c_size_t, _pointer
    )
    handles = (_pointer * len(devices))(*devices)
    start(endpoint.encode(), str(folder).encode() if folder else None, threads, len(devices), handles)


def losses(endpoint: str) -> int | None:
    """Connections to a server that broke off in this process; None where the library does not say.

    It then ends the process when one breaks off (RPC_STATUS_ASSERT of ggml-rpc.cpp), as stock does.
    """
    try:
        return int(_function("ggml_backend_rpc_losses", ctypes.c_uint32, _text)(endpoint.encode()))
    except AttributeError:
        return None


def _backend(device: int) -> str:
    registered = _function("ggml_backend_dev_backend_reg", _pointer, _pointer)(device)
    name: bytes = _function("ggml_backend_reg_name", _text, _pointer)(registered)
    return name.decode(errors="replace")


def _named(device: int, what: str) -> str:
    name: bytes = _function(f"ggml_backend_dev_{what}", _text, _pointer)(device)
    return name.decode(errors="replace")


def _rpc() -> int | None:
    found: int | None = _function("ggml_backend_reg_by_name", _pointer, _text)(b"RPC")
    return found


def _by_name(name: str, result: Any, *arguments: Any) -> Any:
    registered = _rpc()
    address = registered and _function("ggml_backend_reg_get_proc_address", _pointer, _pointer, _text)(
        registered, name.encode()
    )
    if not address:
        raise DeviceError(
            "this llama.cpp has no RPC: `llamahybrid engine build` makes a patched engine that has, "
            'CMAKE_ARGS="-DGGML_RPC=on" a llama-cpp-python'
        )
    return ctypes.CFUNCTYPE(result, *arguments)(address)


@cache
def _function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of ggml. Raises AttributeError where no library has it."""
    libraries = (ctypes.CDLL(str(path)) for path in files())
    function = next((found for library in libraries if (found := getattr(library, name, None))), None)
    if function is None:
        raise AttributeError(f"ggml has no {name}")
    function.argtypes = arguments
    function.restype = result
    return function
