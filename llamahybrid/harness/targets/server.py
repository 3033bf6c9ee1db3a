"""A llama-server binary, started and stopped for each workload."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from llamahybrid.children import ending
from llamahybrid.errors import TargetError
from llamahybrid.harness.targets.base import ModelFile, Session, Shape, Target
from llamahybrid.harness.targets.http import Client, HttpSession
from llamahybrid.harness.targets.local import LocalTarget

STARTS_WITHIN = 600.0
"""Seconds, in which a large model is read from disk."""


class ServerTarget(Target):
    """`server:PATH`."""

    def __init__(self, name: str, program: Path, options: Sequence[str] = ()) -> None:
        if not program.is_file() or not os.access(program, os.X_OK):
            raise TargetError(f"{program} is no program")
        super().__init__(name, "llama-server")
        self._program, self._options = program, options
        self._known: dict[Path, Session] = {}

    @contextmanager
    def open(self, model: ModelFile | None, shape: Shape) -> Iterator[Session]:
        """Start a server on a free port. Raises TargetError if it does not answer."""
        if model is None:
            raise TargetError(f"{self.name} needs a model")
        about = self._about(model)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        slots = ("-np", str(shape.parallel), "-c", str(shape.n_ctx * shape.parallel))
        # without flash attention, whose logits depend on the cut into batches
        command = [str(self._program), "--model", str(model.path), "--host", "127.0.0.1", "--port", str(port)]
        command += [*slots, "-t", "1", "-fa", "off", "--no-warmup", *model.server, *self._options]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            process = subprocess.Popen(
                command, env={**environment, "GGML_NO_BACKTRACE": "1"}, stdout=log, stderr=log
            )
            client = Client(f"http://127.0.0.1:{port}", timeout=self.timeout)
            try:
                _await(client, process, min(STARTS_WITHIN, self.timeout()))
                self.versions["llama-server"] = str(client.json("/props").get("build_info", ""))
                session = HttpSession(client, True, about.vocabulary, shape.parallel)
                session.pid, session.takes_chats = process.pid, about.takes_chats
                session.known_state_bytes = about.state_bytes
                yield session
            except TargetError as error:
                if process.poll() is None:
                    raise
                log.seek(0)
                said = f"llama-server died, {ending(process.returncode)}: {log.read()[-400:]}"
                raise TargetError(said.rstrip(": ")) from error
            finally:
                client.close()
                process.kill()
                process.wait()

    def _about(self, model: ModelFile) -> Session:
        """Return a session of llama_cpp with the model, since servers hide vocabulary and state size."""
        if model.path not in self._known:
            about = LocalTarget("stock", "stock")
            try:
                with about.open(model, Shape(256)) as session:
                    _ = session.state_bytes  # kept for later
                    self._known[model.path] = session
            finally:
                about.close()
        return self._known[model.path]


def _await(client: Client, process: subprocess.Popen[bytes], seconds: float) -> None:
    until = time.monotonic() + seconds
    while True:
        try:
            client.json("/health")
            return
        except TargetError:
            if process.poll() is not None or time.monotonic() > until:
                raise TargetError("it does not answer") from None
            time.sleep(0.03)
