"""The devices of a `Llama` with RPC servers: the servers' first, then this machine's GPUs."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any

import llama_cpp

from llamahybrid.devices import ggml, rpc
from llamahybrid.devices.ggml import Device
from llamahybrid.errors import DeviceError

logger = logging.getLogger("llamahybrid")

_known: dict[int, str] = {}
"""All devices offered to models so far, by handle; the library never frees them."""


class Offload:
    """An explicit list of devices for a model, in place of all that llama.cpp knows; falsy: no list."""

    def __init__(self, servers: Sequence[str] = (), watched: bool = True) -> None:
        """Connect to RPC servers. `watched`: detect lost servers. Raises DeviceError."""
        self.servers = tuple(servers)
        self.watch: rpc.Watch | None = None
        self._array: Any = None
        if not servers:
            return
        devices = rpc.connect(self.servers)
        self.watch = rpc.Watch(self.servers if watched else ())
        self._offer([*devices, *ggml.local()])

    @classmethod
    def of(cls, rpc_servers: object, n_gpu_layers: object, watched: bool) -> Offload:
        """The devices for upstream's arguments. Raises DeviceError; ValueError for invalid addresses.

        `watched`: the caller checks `watch` after each computation; otherwise a loss ends the process.
        """
        if not rpc_servers:
            return cls()
        if not isinstance(rpc_servers, (str, list, tuple)):
            raise ValueError('rpc_servers is a text, as "192.168.0.2:50052,192.168.0.3:50052"')
        offload = cls(rpc.endpoints(rpc_servers), watched)
        if offload and not n_gpu_layers:
            logger.warning("rpc_servers are given and n_gpu_layers is 0: no layer goes there; -1 means all")
        return offload

    def computes(self, n_gpu_layers: object) -> bool:
        """Layers lie on a GPU of this machine or on an RPC server, given upstream's argument."""
        if not n_gpu_layers or self:
            return bool(n_gpu_layers)
        try:
            return bool(ggml.gpus())
        except (DeviceError, AttributeError):  # a library that hides ggml's symbols
            return bool(llama_cpp.llama_supports_gpu_offload())

    @property
    def lost(self) -> bool:
        """A server of the model is lost; the model can only be closed."""
        return self.watch is not None and bool(self.watch.lost)

    def __bool__(self) -> bool:
        return bool(self.servers)

    def ask_for(self, params: Any) -> Any:
        """Set the devices in `llama_model_params`, which must not outlive this object, and return them."""
        if self:
            params.devices = ctypes.addressof(self._array)
        return params

    def opened(self, model: Any) -> None:
        """Register an opened model (llama_cpp's `LlamaModel`), whose connections other models may share."""
        if self.watch is not None:
            rpc.used_by(self.watch, self.servers, model)

    def _offer(self, devices: Sequence[Device]) -> None:
        handles = [device.handle for device in devices]
        _known.update((device.handle, device.identity) for device in devices)
        self._array = (ctypes.c_void_p * (len(handles) + 1))(*handles, None)


def identities(address: int) -> list[str] | None:
    """Identities of the NULL-terminated devices of `llama_model_params`; None if any is not ours."""
    found: list[str] = []
    array = ctypes.cast(address, ctypes.POINTER(ctypes.c_void_p))
    while handle := array[len(found)]:
        if handle not in _known:
            return None
        found.append(_known[handle])
    return found
