"""Limits on requests: API keys, body sizes, slow bodies, slow readers and a full queue.

A request is refused before its body is read or parsed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import anyio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llamahybrid.server.errors import Refusal, later, path_of
from llamahybrid.server.keys import ApiKeys, key_of, password_of
from llamahybrid.server.settings import ServerSettings

logger = logging.getLogger("llamahybrid.server")

OPEN = ("/health", "/v1/health")
"""Paths that need no key, as llama-server's."""

OVERVIEW = ("/metrics",)
"""Paths that are served beyond `max_connections`, too: overload is what a monitor has to see."""

PAGE = "/cache"
"""The web page. GET requests for this path and those below may send the key as a password.

Browsers send a password with every request to this host, so no other method accepts one.
"""

BROWSERS = 'Basic realm="llamahybrid: the API key is the password", charset="UTF-8"'

READS = ("GET", "HEAD")

WAITS_FOR_SLOTS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/completion",
    "/completions",
    "/infill",
    "/v1/engines/copilot-codex/completions",
    "/cache/warm",
)
"""Paths whose requests may wait for a slot."""


class RequestLimits:
    """ASGI middleware that refuses requests beyond the limits."""

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        require_room: Callable[[], None],
        refused: Callable[[str], None],
    ) -> None:
        """`require_room` raises Refusal if the queue is full. `refused` gets the reason of each refusal.

        Raises as `ServerSettings.keys`.
        """
        self._app = app
        self._settings = settings
        self._keys = ApiKeys(settings.keys())
        self._requests = 0
        """Requests in progress; connections between two requests do not count."""
        self._held = 0
        """Bytes of all bodies in progress."""
        self._require_room = require_room
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        answering, body = anyio.CancelScope(), bytearray()
        call_later = asyncio.get_running_loop().call_later

        async def send_in_time(message: Message) -> None:
            timer = call_later(self._settings.send_seconds, answering.cancel)
            try:
                await send(message)
            finally:
                timer.cancel()

        self._requests += 1
        try:
            with answering:
                await self._guard(scope, receive, send_in_time, body)
            if answering.cancelled_caught:
                self._count("reader", scope)
        finally:
            self._held -= len(body)
            self._requests -= 1

    async def _guard(self, scope: Scope, receive: Receive, send: Send, body: bytearray) -> None:
        try:
            key = self._admit(scope)
            whole = await self._receive(receive, scope, body)
        except Refusal as refusal:
            refusal.headers["Connection"] = "close"  # the rest of the body stays unread
            await refusal.response(scope)(scope, receive, send)
            return
        if whole:
            scope.setdefault("state", {})["api_key"] = key
            size, replay = len(body), _replay(bytes(body), receive)
            body.clear()  # not held twice while it is answered
            try:
                await self._app(scope, replay, send)
            finally:
                self._held -= size

    def _admit(self, scope: Scope) -> str | None:
        """Return the API key of a request. Raises Refusal by its headers alone."""
        headers, path, method = Headers(scope=scope), path_of(scope), scope["method"]
        key = key_of(headers)
        shown = method in READS and (path == PAGE or path.startswith(f"{PAGE}/"))
        if shown and key is None:
            key = password_of(headers)
        unguarded = path in OPEN or method == "OPTIONS"
        if not unguarded and not self._keys.admit(key):
            self._count("key", scope)
            message = "this server needs an API key" if key is None else "that API key is not known here"
            challenge = {"WWW-Authenticate": BROWSERS if shown else "Bearer"}
            # llama-server's type: LiteLLM takes an invalid_request_error for a 400, whatever the status.
            kind = "authentication_error"
            raise Refusal(401, message, kind, code="invalid_api_key", headers=challenge)
        length = headers.get("content-length", "0")
        if not length.isdecimal():
            raise Refusal(400, "content-length is a number")
        if unguarded and (int(length) or "transfer-encoding" in headers):
            raise self._too_large(scope, 0)  # no memory for requests without a key
        if self._requests > self._settings.max_connections and not unguarded and path not in OVERVIEW:
            self._count("requests", scope)
            raise later(f"{self._settings.max_connections:,} requests are in progress; ask again later", 1)
        if int(length) > self._settings.max_body_bytes:
            raise self._too_large(scope, self._settings.max_body_bytes)
        if path in WAITS_FOR_SLOTS and method == "POST":
            try:
                self._require_room()
            except Refusal:
                self._count("queue", scope)
                raise
        return key

    async def _receive(self, receive: Receive, scope: Scope, body: bytearray) -> bool:
        """Receive the body; return False if the client disconnected. Raises Refusal."""
        try:
            return await asyncio.wait_for(self._read(receive, scope, body), self._settings.body_seconds)
        except asyncio.TimeoutError:
            self._count("slow", scope)
            message = f"the request's body was not there within {self._settings.body_seconds:g} s"
            raise Refusal(408, message) from None

    async def _read(self, receive: Receive, scope: Scope, body: bytearray) -> bool:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            part = message.get("body", b"")
            body += part
            self._held += len(part)
            if len(body) > self._settings.max_body_bytes:
                raise self._too_large(scope, self._settings.max_body_bytes)
            # a single body is bounded by max_body_bytes alone
            if len(body) < self._held > self._settings.max_bodies_bytes:
                self._count("bodies", scope)
                raise later("the bodies of other requests fill this server; ask again later", 1)
            if not message.get("more_body", False):
                return True

    def _too_large(self, scope: Scope, most: int) -> Refusal:
        self._count("body", scope)
        return Refusal(413, f"the request's body is larger than {most:,} bytes")

    def _count(self, why: str, scope: Scope) -> None:
        self._refused(why)
        client = (scope.get("client") or ("?",))[0]
        logger.warning("refused (%s): %r from %s", why, path_of(scope)[:200], client)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body once, then continues with the real one."""
    first = True

    async def again() -> Message:
        nonlocal first, body
        if first:
            first, given, body = False, body, b""
            return {"type": "http.request", "body": given, "more_body": False}
        return await receive()

    return again
