"""Runs a llama-server on a free port and asks it things."""

from __future__ import annotations

import os
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.lab.waiting import free_port, wait_until


@dataclass(frozen=True)
class Answer:
    """An answer and the server's count of decoded tokens."""

    text: str
    decoded: int
    cached: int
    tokens: tuple[int, ...] = ()
    """Token ids, if asked for (`return_tokens`)."""


class ServerDied(Exception):
    """The process ended; the message is the end of its log."""


class LlamaServer:
    """A server process with one slot, greedy, one thread; a context manager."""

    def __init__(self, program: Path, model: Path, *options: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._client = httpx.Client(base_url=self.url, timeout=60, trust_env=False)
        self._log = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115 - closed in __exit__
        # flash attention's logits depend on how a prompt is cut into batches, and here the text must not
        which = "--models-dir" if model.is_dir() else "--model"  # a folder: the router
        command = [str(program), which, str(model), "--host", "127.0.0.1", "--port", str(port)]
        command += ["-np", "1", "-t", "1", "-c", "4096", "-fa", "off", "--no-warmup", *options]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
        self._process = subprocess.Popen(
            command, env={**environment, "GGML_NO_BACKTRACE": "1"}, stdout=self._log, stderr=self._log
        )

    def __enter__(self) -> LlamaServer:
        wait_until(self._healthy)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._client.close()
        self._log.close()

    def _healthy(self) -> bool:
        if self._process.poll() is not None:
            raise self._death()
        with suppress(httpx.TransportError):
            return self._client.get("/health").is_success
        return False

    def complete(self, prompt: list[int], n: int = 8, **options: Any) -> Answer:
        """`n` tokens after a prompt of token ids."""
        body = {"prompt": prompt, "n_predict": n, "temperature": 0, "ignore_eos": True, **options}
        return self._answer("/completion", body, lambda reply: reply["content"])

    def chat(self, messages: list[dict[str, str]], n: int = 12, **options: Any) -> Answer:
        """The assistant's next message, thinking and all."""
        body = {"messages": messages, "max_tokens": n, "temperature": 0, "ignore_eos": True, **options}
        body["reasoning_format"] = "none"
        path = "/v1/chat/completions"
        return self._answer(path, body, lambda reply: reply["choices"][0]["message"]["content"])

    def log(self) -> str:
        """All that it wrote so far."""
        return Path(self._log.name).read_text(errors="replace")

    def _answer(self, path: str, body: dict[str, Any], text: Any) -> Answer:
        try:
            reply = self._client.post(path, json=body).raise_for_status().json()
        except httpx.TransportError:
            self._process.wait(timeout=60)
            raise self._death() from None
        timings = reply["timings"]
        return Answer(text(reply), timings["prompt_n"], timings["cache_n"], tuple(reply.get("tokens", ())))

    def _death(self) -> ServerDied:
        return ServerDied(f"exit {self._process.returncode}: {self.log()[-1000:]}")
