"""A server of ours for tests: the real uvicorn on 127.0.0.1, in a thread here or in a process."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from llamahybrid.capi.calls import NativeContext
from llamahybrid.llama import Llama
from llamahybrid.server.app import app_of
from llamahybrid.server.loading import load
from llamahybrid.server.serve import Server, server_of
from llamahybrid.server.service import Service
from llamahybrid.server.settings import ModelSettings, ServerSettings
from tests.lab.waiting import SECONDS, free_port, wait_until

COMMAND = [sys.executable, "-m", "llamahybrid", "serve"]

SMALL: dict[str, Any] = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "n_parallel": 3}


def client(url: str, **more: Any) -> httpx.Client:
    """A client for as many threads as want it; `more` as for httpx."""
    limits = httpx.Limits(max_connections=1000, max_keepalive_connections=1000)
    options = {"timeout": SECONDS, "limits": limits, "trust_env": False, "verify": False, **more}
    return httpx.Client(base_url=url, **options)


def parts(got: httpx.Response) -> list[Any]:
    """The answer, or the data of the events of a stream, without [DONE]. Raises HTTPStatusError."""
    if not got.raise_for_status().headers["content-type"].startswith("text/event-stream"):
        return [got.json()]
    return [json.loads(line[6:]) for line in got.text.splitlines() if line.startswith("data: {")]


class Serving:
    """A server that runs."""

    def __init__(self, server: Server, service: Service, listening: socket.socket) -> None:
        self.service = service
        self.server = server
        self.listening = listening
        self.port: int = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)

    def _run(self) -> None:
        asyncio.run(self.server.serve(sockets=[self.listening]))

    @property
    def llm(self) -> Llama:
        llm = self.service.models.llm
        assert llm is not None, "it has started"
        return llm

    def start(self) -> None:
        """Return when it answers. Raises AssertionError where it does not within `SECONDS`."""
        self._thread.start()
        wait_until(self._started)

    def _started(self) -> bool:
        assert self._thread.is_alive(), "the server did not start"
        return self.server.started

    def stop(self) -> None:
        """Shut down as a signal does. Raises AssertionError where that takes more than `SECONDS`."""
        self.server.should_exit = True
        self._thread.join(SECONDS)
        assert not self._thread.is_alive(), "the server did not stop"

    def metrics(self) -> str:
        return self.service.metrics.text().decode()

    def client(self, **more: Any) -> httpx.Client:
        return client(self.url, **more)

    def hang_up(self, path: str, asked: dict[str, Any], when: Callable[[], bool]) -> None:
        """Ask, wait until it is so, and hang up without having read a byte."""
        body = json.dumps(asked).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}"
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
            wait_until(when)

    def settled(self) -> bool:
        """No request runs or waits, and every slot is free."""
        admission = self.service.admission
        return not (admission.running or admission.waiting or self.llm.slots.seated)

    def await_settled(self, seconds: float = SECONDS) -> None:
        """Wait until `settled`. Raises AssertionError after `seconds`."""
        wait_until(self.settled, seconds)


class Held:
    """Native batches, of which all but the first ones wait until they may go on; how many have begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        """`after`: batches that do not wait."""
        self.batches, going, inner = 0, threading.Event(), NativeContext.decode_parts
        self.go_on = going.set

        def decode(context: NativeContext, *args: Any, **kwargs: Any) -> Any:
            self.batches += 1
            assert self.batches <= after or going.wait(120)
            return inner(context, *args, **kwargs)

        monkeypatch.setattr(NativeContext, "decode_parts", decode)


class ServerProcess:
    """`llamahybrid serve` on a free port."""

    def __init__(
        self,
        model: Path | dict[str, Any],
        log: Path,
        *more: str,
        stdout: int | None = None,
        closed: bool = False,
    ) -> None:
        """`model`: a file, or what a config file says. `log`: where its output goes, unless `stdout` is
        given, or all standard streams are `closed`.

        Raises AssertionError where it does not answer within `SECONDS`.
        """
        self.port = free_port()
        self.log = log
        threads = ("--n-threads", "1", "--n-threads-batch", "1")
        options = [str(model), "--host", "127.0.0.1", "--port", str(self.port), *threads]
        if isinstance(model, dict):
            config = log.with_suffix(".json")
            config.write_text(json.dumps({"host": "127.0.0.1", "port": self.port, **model}))
            options = ["--config-file", str(config)]
        with log.open("ab") as out:
            command = [*COMMAND, *options, *more]
            if closed:
                command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command]
            written = out if stdout is None else stdout
            self.process = subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT)
        self.client = client(f"http://127.0.0.1:{self.port}")
        wait_until(self._answers, SECONDS)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return self.client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def metrics(self) -> dict[str, float]:
        """Values of /metrics, by name with labels."""
        lines = self.client.get("/metrics").text.splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[:1] != "#"}

    def end(self, how: signal.Signals) -> str:
        """End it; what it printed. Raises TimeoutExpired where that takes more than `SECONDS`."""
        self.process.send_signal(how)
        try:
            self.process.wait(SECONDS)
        finally:
            self.process.kill()  # one that does not end; harmless to one that has
        self.client.close()
        return self.log.read_text()


@contextmanager
def serving(
    *models: Path | ModelSettings,
    loader: Callable[[ModelSettings], Llama] | None = None,
    model: dict[str, Any] | None = None,
    **server: Any,
) -> Iterator[Serving]:
    """A server of these models until the block ends; `model`: settings of those that are paths."""
    opened: Sequence[ModelSettings] = [
        ModelSettings(model=str(each), **{**SMALL, **(model or {})}) if isinstance(each, Path) else each
        for each in models
    ]
    settings = ServerSettings(**{"shutdown_seconds": 5.0, **server})
    service = Service(settings, opened, loader or load)
    # asyncio sends at once on sockets that say they are TCP; with create_server's each answer took 40 ms more
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(128)
        runs = Serving(server_of(app_of(service), log_config=None), service, listening)
        runs.start()
        try:
            yield runs
        finally:
            runs.stop()
