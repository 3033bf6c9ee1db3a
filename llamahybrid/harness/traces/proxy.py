"""A reverse proxy that records: clients talk to it as to the server behind, streams pass as they come."""

from __future__ import annotations

import hashlib
import http.client
import json
import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from llamahybrid.errors import TargetError
from llamahybrid.harness.targets.base import Ask
from llamahybrid.harness.traces.trace import Entry, TraceWriter

logger = logging.getLogger("llamahybrid")

RECORDED = ("/chat/completions", "/completions", "/completion")
SECONDS = 3600.0
MOST = 64 << 20
"""Bytes of a request that are taken."""

_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "trailers")
) | {"transfer-encoding", "upgrade", "host", "content-length", "accept-encoding"}


class RecordingProxy:
    """Before the server at `url`; `port` 0: any that is free. A context manager, or `serve`."""

    def __init__(self, url: str, writer: TraceWriter, port: int = 0, host: str = "127.0.0.1") -> None:
        """Raises TargetError for what is no URL, OSError for a port that is taken."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise TargetError(f"{url} is no http:// or https:// URL")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        base = parts.path.rstrip("/").removesuffix("/v1")
        hostname, upstream_port = parts.hostname, parts.port

        class Handler(_Handler):
            recorder = writer

            def connect(self) -> http.client.HTTPConnection:
                return kind(hostname, upstream_port, timeout=SECONDS)

            def target(self) -> str:
                return base + self.path

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self.url = f"http://{host}:{self.port}"

    def serve(self) -> None:
        """Until it is shut down, or interrupted."""
        try:
            self._server.serve_forever(0.1)
        finally:
            self._server.server_close()

    def __enter__(self) -> RecordingProxy:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    recorder: TraceWriter

    def connect(self) -> http.client.HTTPConnection:
        raise NotImplementedError

    def target(self) -> str:
        raise NotImplementedError

    def log_message(self, *args: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):
            return self._forward
        raise AttributeError(name)

    def _forward(self) -> None:
        try:
            body = self._body()
        except ValueError as error:
            self.close_connection = True
            self.send_error(400, str(error))
            return
        at, began = self.recorder.now(), time.perf_counter()
        connection = self.connect()
        try:
            headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
            connection.request(self.command, self.target(), body or None, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            self.send_error(502, f"the server behind does not answer: {type(error).__name__}")
            return
        try:
            said = _Said(began)
            self._pass_on(response, said)
        finally:
            connection.close()
            if response.status == 200 and self.path.partition("?")[0].endswith(RECORDED):
                self._record(body, said, at, time.perf_counter() - began)

    def _record(self, body: bytes, said: _Said, at: float, seconds: float) -> None:
        try:
            entry = entry_of(body, said, at, seconds)
            if entry is not None:
                self.recorder.add(entry)
        except (TypeError, ValueError, AttributeError, RecursionError) as error:  # servers say odd things
            logger.warning("a request was not recorded: %s: %s", type(error).__name__, error)

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", "").lower():
            return b"".join(self._chunks())
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 <= length <= MOST:
            raise ValueError("a request of that size is not taken")
        return self.rfile.read(length)

    def _chunks(self) -> Iterator[bytes]:
        taken = 0
        while size := int(self.rfile.readline(64).partition(b";")[0], 16):
            taken += size
            if size < 0 or taken > MOST:
                raise ValueError("a request of that size is not taken")
            yield self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline(8192).strip():
            pass

    def _pass_on(self, response: http.client.HTTPResponse, said: _Said) -> None:
        """What comes goes out at once."""
        self.send_response(response.status, response.reason)
        for name, value in response.getheaders():
            if name.lower() not in _HOP:
                self.send_header(name, value)
        length = response.getheader("Content-Length")
        plain = length is not None or self.command == "HEAD" or response.status in (204, 304)
        if length is not None:
            self.send_header("Content-Length", length)
        elif not plain:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            while piece := response.read1(65536):
                said.add(piece)
                self.wfile.write(piece if plain else b"%x\r\n%s\r\n" % (len(piece), piece))
                self.wfile.flush()
            if not plain:
                self.wfile.write(b"0\r\n\r\n")
        except (OSError, http.client.HTTPException):
            self.close_connection = True  # whoever hung up, the other is told by it


class _Said:
    """A reply as it went by."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._pieces: list[bytes] = []
        self.first: float | None = None

    def add(self, piece: bytes) -> None:
        """More of it came."""
        if self.first is None:
            self.first = time.perf_counter() - self._began
        self._pieces.append(piece)

    def events(self) -> list[dict[str, Any]]:
        """Of a stream, or the one object that it is."""
        data = b"".join(self._pieces)
        found: list[dict[str, Any]] = []
        streamed = [line[5:] for line in data.splitlines() if line.startswith(b"data:")]
        for text in streamed or [data]:
            try:
                event = json.loads(text)
            except ValueError:
                continue
            if isinstance(event, dict):
                found.append(event)
        return found


def entry_of(body: bytes, said: _Said, at: float, seconds: float) -> Entry | None:
    """What was asked and what came back; None: no request that can be asked again."""
    try:
        asked = json.loads(body)
        ask = _ask(asked)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    if ask is None:
        return None
    text: list[str] = []
    usage: dict[str, Any] = {}
    timings: dict[str, Any] = {}
    answer: list[int] = []
    for event in said.events():
        for choice in event.get("choices") or ():
            spoken = choice.get("delta") or choice.get("message") or {}
            text.append(str(spoken.get("content") or choice.get("text") or ""))
        text.append(str(event.get("content") or ""))
        answer += event.get("tokens") or ()
        usage, timings = event.get("usage") or usage, event.get("timings") or timings
    details = usage.get("prompt_tokens_details") or {}
    return Entry(
        at=at,
        ask=ask,
        text="".join(text),
        answer=tuple(answer),
        total=usage.get("prompt_tokens"),
        cached=details.get("cached_tokens", timings.get("cache_n")),
        seconds=seconds,
        ttft=said.first,
    )


def _ask(asked: dict[str, Any]) -> Ask | None:
    prompt = asked.get("prompt")
    most = asked.get("max_completion_tokens") or asked.get("max_tokens") or asked.get("n_predict")
    if not isinstance(most, int) or most < 1:
        most = 128
    greedy = asked.get("temperature") == 0
    seed = asked.get("seed")
    salt = str(asked.get("cache_salt") or "")
    common: dict[str, Any] = {
        "seed": None if greedy else seed if isinstance(seed, int) else 0,
        # who holds the salt finds the states: only its digest is written down
        "salt": hashlib.sha256(salt.encode("utf-8", "surrogatepass")).hexdigest()[:32] if salt else "",
    }
    if isinstance(asked.get("messages"), list):
        messages = tuple(dict(message) for message in asked["messages"])
        return Ask(most, messages=messages, tools=tuple(asked.get("tools") or ()), **common)
    if isinstance(prompt, str):
        return Ask(most, text=prompt, **common)
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return Ask(most, tokens=tuple(prompt), **common)
    return None
