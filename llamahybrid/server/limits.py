"""Limits: who has no key, says too much or takes too long is sent away before anything is read or parsed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llamahybrid.server.errors import Refusal, later, path_of
from llamahybrid.server.keys import ApiKeys, key_of, password_of

logger = logging.getLogger("llamahybrid.server")

OPEN = ("/health", "/v1/health")
"""Paths that need no key, as llama-server's."""

PAGE = "/cache"
"""What a browser shows: it and what lies below may be read with the key as a password.

A browser sends a password along with whatever any page makes it ask for, so this opens nothing that acts.
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
"""Paths whose requests may have to wait."""


class Body:
    """What came of a request's body so far."""

    size = 0
    """Bytes."""


class Guard:
    """ASGI middleware: keys, body sizes, slow bodies, and a full queue."""

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        max_body: int,
        max_bodies: int,
        body_seconds: float,
        require_room: Callable[[], None],
        refused: Callable[[str], None],
    ) -> None:
        """`max_body`, `max_bodies`: bytes of one body, and of all whose requests are in.

        `require_room` raises Refusal where the queue is full; `refused` is told why somebody was.
        """
        self._app = app
        self._keys = keys
        self._max_body = max_body
        self._max_bodies = max_bodies
        self._held = 0
        """Bytes of all bodies that are in."""
        self._seconds = body_seconds
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
        body = Body()
        try:
            await self._guard(scope, receive, send, body)
        finally:
            self._held -= body.size

    async def _guard(self, scope: Scope, receive: Receive, send: Send, body: Body) -> None:
        headers, path = Headers(scope=scope), path_of(scope)
        preflight = scope["method"] == "OPTIONS"
        try:
            key = key_of(headers)
            shown = scope["method"] in READS and (path == PAGE or path.startswith(f"{PAGE}/"))
            if shown and key is None:
                key = password_of(headers)
            if path not in OPEN and not preflight and not self._keys.admit(key):
                self._say("key", scope, path)
                message = "this server needs an API key" if key is None else "that API key is not known here"
                challenge = {"WWW-Authenticate": BROWSERS if shown else "Bearer"}
                # llama-server's type: an invalid request is a bad one to LiteLLM, whatever its status.
                kind = "authentication_error"
                raise Refusal(401, message, kind, code="invalid_api_key", headers=challenge)
            if not headers.get("content-length", "0").isdecimal():
                raise Refusal(400, "content-length is a number")
            if (path in OPEN or preflight) and _has_body(headers):  # nothing of strangers is held
                raise self._too_large(scope, path, 0)
            if int(headers.get("content-length", "0")) > self._max_body:
                raise self._too_large(scope, path, self._max_body)
            if path in WAITS_FOR_SLOTS and scope["method"] == "POST":
                try:
                    self._require_room()
                except Refusal:
                    self._say("queue", scope, path)
                    raise
            whole = await self._body(receive, scope, path, body)
        except Refusal as refusal:
            refusal.headers["Connection"] = "close"  # what follows of a body is not read
            await refusal.response(scope)(scope, receive, send)
            return
        if whole is None:
            return
        scope.setdefault("state", {})["api_key"] = key
        await self._app(scope, _replay(whole, receive), send)

    async def _body(self, receive: Receive, scope: Scope, path: str, body: Body) -> bytes | None:
        """All of the body; None where the client left. Raises Refusal."""
        try:
            return await asyncio.wait_for(self._read(receive, scope, path, body), self._seconds)
        except asyncio.TimeoutError:
            self._say("slow", scope, path)
            raise Refusal(408, f"the request's body was not there within {self._seconds:g} s") from None

    async def _read(self, receive: Receive, scope: Scope, path: str, body: Body) -> bytes | None:
        parts = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            body.size += len(part)
            self._held += len(part)
            if body.size > self._max_body:
                raise self._too_large(scope, path, self._max_body)
            if body.size < self._held > self._max_bodies:  # alone it is let in
                self._say("bodies", scope, path)
                raise later("the bodies of other requests fill this server; ask again later", 1)
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self, scope: Scope, path: str, most: int) -> Refusal:
        self._say("body", scope, path)
        return Refusal(413, f"the request's body is larger than {most:,} bytes")

    def _say(self, why: str, scope: Scope, path: str) -> None:
        self._refused(why)
        logger.warning("refused (%s): %r from %s", why, path[:200], (scope.get("client") or ("?",))[0])


def _has_body(headers: Headers) -> bool:
    return int(headers.get("content-length", "0")) > 0 or "transfer-encoding" in headers


def _replay(body: bytes, receive: Receive) -> Receive:
    """Give a body out once, then what else comes."""
    first = True

    async def again() -> Message:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return again
