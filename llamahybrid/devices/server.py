"""`llamahybrid rpc-server`: lend this machine's devices to models on other machines."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

from llamahybrid.devices import ggml
from llamahybrid.errors import DeviceError

WARNING = (
    "whoever reaches this port can read and change what is computed, and make the process do other things: "
    "llama.cpp's RPC has no passwords and no encryption. Use it in a network of your own, or through a tunnel"
)


def address_of(host: str) -> str:
    """The IPv4 address of a host name: llama.cpp's server accepts only addresses. Raises DeviceError."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise DeviceError(f"{host} is no address of this machine: {error}") from error


def run(host: str, port: int, threads: int | None = None, folder: Path | None = None) -> None:
    """Serve until the process is ended, as by Ctrl-C. Arguments as of `ggml.serve`.

    Raises:
        DeviceError: the address cannot be bound, or the library has no RPC backend.
    """
    address = address_of(host)
    ggml.require_rpc()
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
    except OSError as error:
        raise DeviceError(f"cannot listen at {address}:{port}: {error.strerror}") from error
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would wait for native code to return
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    ggml.serve(f"{address}:{port}", threads or os.cpu_count() or 1, folder)
    raise DeviceError(f"llama.cpp could not listen at {address}:{port}")
