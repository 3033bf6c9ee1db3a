"""RPC servers on this machine: device memory without a device.

The host reads this memory through copies of the backend alone, decodes are queued, and no abort callback is
polled inside. ``python -m tests.lab.rpc tests.lab.fuzz --seconds 60`` starts one, and runs a
campaign with all layers of the subject on it (see `reference.RPC`).
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys

from tests.lab.reference import RPC
from tests.lab.waiting import free_port, listens, wait_until


class RpcServer:
    """`llamahybrid rpc-server` in a process of its own, on a port of 127.0.0.1 that stays the same."""

    def __init__(self) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it listens. Raises AssertionError when it ends instead."""
        command = [sys.executable, "-m", "llamahybrid", "rpc-server", "--port", str(self.port)]
        null = subprocess.DEVNULL
        self._process = subprocess.Popen([*command, "--threads", "1"], stdin=null, stdout=null, stderr=null)
        wait_until(self._listens)

    def _listens(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, "the RPC server ended"
        return listens(self.port)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> RpcServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    with RpcServer() as started:
        os.environ[RPC] = started.address
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
