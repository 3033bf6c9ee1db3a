"""Errors in OpenAI's form: a status, and `{"error": {message, type, param, code}}`.

Below `/v1/messages` they have Anthropic's form.
"""

from __future__ import annotations

import errno
import json
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jinja2
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Scope

from llamahybrid.errors import (
    Busy,
    ContextOverflow,
    DeviceError,
    LlamaHybridError,
    ModelClosed,
    RequestCancelled,
    RequestSuperseded,
)
from llamahybrid.server.prompts import PromptEmpty, PromptTooLong

logger = logging.getLogger("llamahybrid.server")

ANTHROPIC = "/v1/messages"

_ANTHROPIC_TYPES = {
    **{400: "invalid_request_error", 401: "authentication_error", 403: "permission_error"},
    **{404: "not_found_error", 408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error"},
    503: "overloaded_error",
}
"""Types by status (https://docs.anthropic.com/en/api/errors); "api_error" else."""

_OVERFLOW = re.compile(r"Requested tokens \((\d+)\) exceed context window of (\d+)")
"""Upstream's message (llama_cpp/llama.py, Llama._create_completion)."""


MOST_LETTERS = 2000
"""Letters of a message, which may quote the request."""


_PASSING: tuple[tuple[type[BaseException], str, int], ...] = (
    (Busy, "the model is busy; ask again later", 1),
    (DeviceError, "a machine that computes for this server is gone; ask again later", 10),
    (ModelClosed, "the server is shutting down", 5),
    (RequestSuperseded, "", 1),
    (RequestCancelled, "the request was cancelled; ask again", 1),
)
"""Errors after which a request may be sent again: the message, or theirs, and the seconds until then."""


class Refusal(Exception):
    """An error response."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message[:MOST_LETTERS]
        self.kind = kind
        self.code = code
        self.param = param and param[:MOST_LETTERS]
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The body in OpenAI's form."""
        told = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": told}

    @property
    def anthropic(self) -> dict[str, Any]:
        """The body in Anthropic's form."""
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
        details = {"details": {"error_code": self.code}} if self.code else {}
        return {"type": "error", "error": {"type": kind, "message": self.message, **details}}

    def response(self, scope: Scope | None = None) -> Response:
        """Return the response to the request of a scope; ASCII, as quoted text may have lone surrogates."""
        theirs = scope is not None and path_of(scope).startswith(ANTHROPIC)
        body = json.dumps(self.anthropic if theirs else self.body)
        return Response(body, self.status, dict(self.headers), media_type="application/json")


def path_of(scope: Scope) -> str:
    """Return the path of a request below the root path of the app."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def bad(message: str, param: str | None = None, code: str | None = None) -> Refusal:
    """Return the error of a request that cannot be served."""
    return Refusal(400, message, param=param, code=code)


def require_tokens(n_vocab: int, tokens: Iterable[int] | None, param: str) -> None:
    """Raise Refusal for a token id outside of the vocabulary."""
    if any(not 0 <= token < n_vocab for token in tokens or ()):
        raise bad(f"token ids lie in [0, {n_vocab})", param)


def later(message: str, seconds: int, status: int = 503) -> Refusal:
    """Return an error with a Retry-After."""
    kind = "rate_limit_error" if status == 429 else "service_unavailable"
    return Refusal(status, message, kind, headers={"Retry-After": str(max(1, seconds))})


def refusal(error: BaseException) -> Refusal:
    """Return the error response of an exception; an internal error shows no details."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, (RequestValidationError, ValidationError)):
        return _invalid(error.errors()[0])
    if isinstance(error, HTTPException):
        return Refusal(error.status_code, str(error.detail), headers=error.headers)
    if isinstance(error, PromptTooLong):
        return Refusal(413, str(error), code="context_length_exceeded", param="messages")
    if isinstance(error, PromptEmpty):
        return bad(str(error), "prompt")
    overflow = _OVERFLOW.search(str(error))
    if isinstance(error, ContextOverflow) or (isinstance(error, ValueError) and overflow):
        return bad(_overflow(error, overflow), "messages", "context_length_exceeded")
    if isinstance(error, DeviceError):
        logger.error("%s", error)
    for kind, message, seconds in _PASSING:
        if isinstance(error, kind):
            return later(message or str(error), seconds)
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        logger.error("%s", error)
        return later("this server has too many open files; ask again later", 1)
    if isinstance(error, RecursionError):
        return bad("the request nests too deeply")
    if type(error) is LlamaHybridError:  # a fault of the request
        return bad(str(error))
    if isinstance(error, (ValueError, jinja2.TemplateError, NotImplementedError)):
        return bad(str(error))
    logger.error("a request failed", exc_info=error)
    return Refusal(500, "the server failed on this request; its log says more", "internal_server_error")


def _overflow(error: BaseException, found: re.Match[str] | None) -> str:
    if found is None:
        return str(error)
    prompt, window = found.groups()
    return (
        f"This model's maximum context length is {window} tokens, but the prompt has {prompt}. "
        "Please reduce the length of the messages."
    )


def install(app: FastAPI) -> None:
    """Use this form for all errors of an app."""

    async def told(request: Request, error: Exception) -> Response:
        refused = refusal(error)
        of_body = isinstance(error, RequestValidationError) and error.errors()[0]["loc"] == ("body",)
        if of_body and "json" not in request.headers.get("content-type", ""):
            refused = bad("the body is JSON: say so, with content-type: application/json")
        if refused.status == 500:
            refused.headers["Connection"] = "close"  # starlette raises it again, and uvicorn closes
        return refused.response(request.scope)

    kinds = (Refusal, RequestValidationError, HTTPException, ValueError, NotImplementedError, Exception)
    for kind in (*kinds, OSError, LlamaHybridError, jinja2.TemplateError):
        app.add_exception_handler(kind, told)


def _invalid(first: Any) -> Refusal:
    """Return the error of the first fault of a body."""
    if first["type"] == "json_invalid":
        return bad(f"the body is no JSON: {first['ctx']['error']}")
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    message = str(first["msg"]).removeprefix("Value error, ")
    return bad(f"{where}: {message}" if where else message, where or None)
