"""`llamahybrid rpc-server`: what this machine computes with, lent to models on others."""

from __future__ import annotations

import ipaddress
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
    """The IPv4 address of a name, which llama.cpp's server takes alone. Raises DeviceError."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise DeviceError(f"{host} is no address of this machine: {error}") from error


def is_private(address: str) -> bool:
    """Nobody outside of this machine reaches it."""
    return ipaddress.ip_address(address).is_loopback


def run(host: str, port: int, threads: int | None = None, folder: Path | None = None) -> None:
    """Serve until the process is ended, as by Ctrl-C. Args as `ggml.serve`.

    Raises:
        DeviceError: it cannot listen there, or the library has no RPC.
    """
    address = address_of(host)
    ggml.require_rpc()
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
    except OSError as error:
        raise DeviceError(f"cannot listen at {address}:{port}: {error.strerror}") from error
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would wait for native code, which stays
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    ggml.serve(f"{address}:{port}", threads or os.cpu_count() or 1, folder)
    raise DeviceError(f"llama.cpp could not listen at {address}:{port}")
