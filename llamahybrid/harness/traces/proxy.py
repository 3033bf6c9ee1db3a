"""A recording reverse proxy: requests and streams pass unchanged and at once."""

from __future__ import annotations

import hashlib
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from llamahybrid.errors import TargetError
from llamahybrid.harness.conversation import Request
from llamahybrid.harness.targets.http import Heard, base_url, events
from llamahybrid.harness.traces.trace import Entry, TraceWriter

try:
    import anyio
    import anyio.to_thread
    import httpx
    import uvicorn
    from starlette.requests import Request as Incoming
    from starlette.responses import PlainTextResponse, Response, StreamingResponse
except ImportError as error:
    raise TargetError(f"{error}; `record --proxy` needs llamahybrid[server]") from error

logger = logging.getLogger("llamahybrid")

RECORDED = ("/chat/completions", "/completions", "/completion")
SECONDS = 3600.0
LARGEST_REQUEST = 64 << 20

_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "trailers")
) | {"transfer-encoding", "upgrade", "host", "accept-encoding"}


class RecordingProxy:
    """A proxy before the server at `url`; `port` 0: a free one. A context manager, or `serve`."""

    def __init__(self, url: str, writer: TraceWriter, port: int = 0, host: str = "127.0.0.1") -> None:
        """Listen. Raises TargetError for a malformed URL, OSError for a port that is taken."""
        self._base, self._writer = base_url(url), writer
        self._listening = socket.create_server((host, port))
        self.port = int(self._listening.getsockname()[1])
        self.url = f"http://{host}:{self.port}"
        self._client = httpx.AsyncClient(
            timeout=SECONDS,
            limits=httpx.Limits(max_connections=None),
            headers={"Accept-Encoding": "identity"},
            trust_env=False,
        )
        quiet: dict[str, Any] = {"log_level": "error", "access_log": False}
        config = uvicorn.Config(self._app, interface="asgi3", lifespan="off", **quiet)
        config.timeout_graceful_shutdown = 5
        self._server = uvicorn.Server(config)

    def serve(self) -> None:
        """Serve until SIGINT or SIGTERM."""
        try:
            self._server.run(sockets=[self._listening])
        finally:
            self._listening.close()

    def __enter__(self) -> RecordingProxy:
        self._thread = threading.Thread(target=self.serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        exchange = _Exchange(self._writer.now())
        response = await self._forward(Incoming(scope, receive), exchange)
        try:
            await response(scope, receive, send)
        finally:
            if exchange.recorded:
                exchange.seconds = time.perf_counter() - exchange.began
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(self._record, exchange)  # a slow disk delays no client

    async def _forward(self, request: Incoming, exchange: _Exchange) -> Response:
        """Send a request on and stream the response."""
        async for piece in request.stream():
            exchange.body += piece
            if len(exchange.body) > LARGEST_REQUEST:
                return PlainTextResponse("the request is too large", 413)
        raw_path = self._base.raw_path.rstrip(b"/") + request.scope["raw_path"]
        if query := request.scope["query_string"]:
            raw_path += b"?" + query
        headers = [(name, value) for name, value in request.headers.items() if name not in _HOP]
        url = self._base.copy_with(raw_path=raw_path)
        body = bytes(exchange.body)
        outgoing = self._client.build_request(request.method, url, headers=headers, content=body)
        try:
            response = await self._client.send(outgoing, stream=True)
        except httpx.HTTPError as error:
            return PlainTextResponse(f"the server behind does not answer: {type(error).__name__}", 502)
        exchange.recorded = response.status_code == 200 and request.url.path.endswith(RECORDED)
        answer = StreamingResponse(_pass_on(response, exchange), response.status_code)
        answer.raw_headers = [pair for pair in response.headers.raw if pair[0].lower().decode() not in _HOP]
        return answer

    def _record(self, exchange: _Exchange) -> None:
        try:
            entry = exchange.entry()
            if entry is not None:
                self._writer.add(entry)
        except (TypeError, ValueError, AttributeError, RecursionError) as error:  # of an odd reply
            logger.warning("a request was not recorded: %s: %s", type(error).__name__, error)


@dataclass
class _Exchange:
    """A request and its response."""

    at: float
    """Seconds since the trace began."""
    began: float = field(default_factory=time.perf_counter)
    body: bytearray = field(default_factory=bytearray)
    reply: bytearray = field(default_factory=bytearray)
    first: float | None = None
    seconds: float = 0.0
    recorded: bool = False

    def entry(self) -> Entry | None:
        """Return the request for the trace; None: it cannot be repeated."""
        try:
            ask = _ask(json.loads(self.body))
        except (ValueError, TypeError, AttributeError, RecursionError):
            return None
        if ask is None:
            return None
        heard = Heard()
        for event in _events(self.reply.decode(errors="replace")):
            heard.add(event)
        answer = tuple(heard.tokens)
        return Entry(self.at, ask, heard.text, answer, heard.total, heard.cached, self.seconds, self.first)


async def _pass_on(response: httpx.Response, exchange: _Exchange) -> AsyncIterator[bytes]:
    """Yield a response as it comes."""
    try:
        async for piece in response.aiter_raw():
            exchange.first = exchange.first or time.perf_counter() - exchange.began
            exchange.reply += piece
            yield piece
    finally:
        with anyio.CancelScope(shield=True):
            await response.aclose()


def _events(reply: str) -> list[dict[str, Any]]:
    """Return the events of a stream before its first error, or the one object that a reply is."""
    found: list[dict[str, Any]] = []
    try:
        if any(line.startswith("data:") for line in reply.split("\n")):
            found.extend(events(reply.split("\n")))
        elif isinstance(whole := json.loads(reply), dict):
            found.append(whole)
    except (TargetError, ValueError):
        pass
    return found


def _ask(asked: dict[str, Any]) -> Request | None:
    prompt, seed = asked.get("prompt"), asked.get("seed")
    most = asked.get("max_completion_tokens") or asked.get("max_tokens") or asked.get("n_predict")
    if not isinstance(most, int) or most < 1:
        most = 128
    salt = str(asked.get("cache_salt") or "")
    common: dict[str, Any] = {
        "seed": None if asked.get("temperature") == 0 else seed if isinstance(seed, int) else 0,
        # the salt gives access to stored state: its digest alone is written
        "salt": hashlib.sha256(salt.encode("utf-8", "surrogatepass")).hexdigest()[:32] if salt else "",
    }
    if isinstance(asked.get("messages"), list):
        messages = tuple(dict(message) for message in asked["messages"])
        return Request(most, messages=messages, tools=tuple(asked.get("tools") or ()), **common)
    if isinstance(prompt, str):
        return Request(most, text=prompt, **common)
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return Request(most, tokens=tuple(prompt), **common)
    return None
