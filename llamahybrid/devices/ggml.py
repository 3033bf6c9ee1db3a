"""The ggml that llama_cpp has loaded: its devices, and its RPC backend (ggml-backend.h, ggml-rpc.h).

llama_cpp declares none of these functions. Functions of the RPC backend are looked up by name in ggml's
registry, so that they are found in any build.
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
    """A device of this machine or of an RPC server."""

    handle: int
    """The ``ggml_backend_dev_t``; the library never frees it."""
    identity: str
    """A name that is the same in any process: the server and the device's number, or the library's names."""


def file() -> Path:
    """The library with the backends.

    Raises:
        DeviceError: not found.
    """
    import llama_cpp  # noqa: F401 - loads it

    folder = bindings.loaded_from()
    found = folder and (installed.library(folder, "ggml") or installed.library(folder, "llama"))
    if not found:
        raise DeviceError("the libraries of llama.cpp cannot be found")
    return found


def files() -> list[Path]:
    """All libraries with functions of ggml: one or several, depending on the build."""
    main = file()
    more = (installed.library(main.parent, name) for name in ("ggml-base", "ggml-rpc", "llama"))
    return [main, *filter(None, more)]


def local() -> list[Device]:
    """This machine's GPUs, in llama.cpp's own order; integrated GPUs only if there are no others."""
    found: dict[int, list[Device]] = {GPU: [], IGPU: []}
    for n in range(_function("ggml_backend_dev_count", ctypes.c_size_t)()):
        handle = _function("ggml_backend_dev_get", _pointer, ctypes.c_size_t)(n)
        kind = _function("ggml_backend_dev_type", ctypes.c_int, _pointer)(handle)
        if kind in found and _backend(handle) != "RPC":
            found[kind].append(Device(handle, f"{_named(handle, 'name')}: {_named(handle, 'description')}"))
    return found[GPU] or found[IGPU]


def gpus() -> list[str]:
    """The names of this machine's GPUs."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    return [device.identity for device in local()]


def computing() -> list[Device]:
    """The devices that an RPC server of this machine offers: its GPUs, else its CPU."""
    return local() or [Device(_function("ggml_backend_dev_by_type", _pointer, ctypes.c_int)(CPU), "CPU")]


def require_rpc() -> None:
    """Raise DeviceError if the library has no RPC backend."""
    _by_name("ggml_backend_rpc_add_server", _pointer, _text)


def add_server(endpoint: str) -> list[Device]:
    """Connect to an RPC server and return its devices; the library ends the process if the connection fails.

    The devices are not registered, so only models that name them use them. A second call returns the same.

    Raises:
        DeviceError: the library has no RPC backend, or the server no device.
    """
    add = _by_name("ggml_backend_rpc_add_server", _pointer, _text)
    server = add(endpoint.encode())
    count = _function("ggml_backend_reg_dev_count", ctypes.c_size_t, _pointer)(server) if server else 0
    if not count:
        raise DeviceError(f"the RPC server {endpoint} offers no device")
    get = _function("ggml_backend_reg_dev_get", _pointer, _pointer, ctypes.c_size_t)
    return [Device(get(server, n), f"{endpoint}/{n}") for n in range(count)]


def start(device: Device) -> None:
    """Open a device. Raises DeviceError if it cannot be."""
    if not _function("ggml_backend_dev_init", _pointer, _pointer, _text)(device.handle, None):
        raise DeviceError(f"{device.identity} cannot be used")


def ask(endpoint: str) -> None:
    """Send a small request to a connected server, and wait for the answer."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    memory = _function("ggml_backend_dev_memory", None, _pointer, *[ctypes.POINTER(ctypes.c_size_t)] * 2)
    memory(add_server(endpoint)[0].handle, ctypes.byref(free), ctypes.byref(total))


def serve(endpoint: str, threads: int, folder: Path | None) -> None:
    """Run an RPC server until the process ends; returns if it cannot listen.

    Args:
        endpoint: address and port to listen on.
        threads: CPU threads.
        folder: keeps large tensors, so that a model is sent once; None: not kept.

    Raises:
        DeviceError: the library has no RPC backend.
    """
    devices = [device.handle for device in computing()]
    start = _by_name(
        "ggml_backend_rpc_start_server", None, _text, _text, ctypes.c_size_t, ctypes.c_size_t, _pointer
    )
    handles = (_pointer * len(devices))(*devices)
    start(endpoint.encode(), str(folder).encode() if folder else None, threads, len(devices), handles)


def losses(endpoint: str) -> int | None:
    """The number of connections to a server that this process has lost; None if the library does not count.

    Such a library (stock) ends the process at the first loss (RPC_STATUS_ASSERT of ggml-rpc.cpp).
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


def _by_name(name: str, result: Any, *arguments: Any) -> Any:
    registered = _function("ggml_backend_reg_by_name", _pointer, _text)(b"RPC")
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
    """A function of ggml. Raises AttributeError if no library has it."""
    libraries = (ctypes.CDLL(str(path)) for path in files())
    function = next((found for library in libraries if (found := getattr(library, name, None))), None)
    if function is None:
        raise AttributeError(f"ggml has no {name}")
    function.argtypes = arguments
    function.restype = result
    return function
