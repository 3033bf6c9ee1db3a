"""Error responses of exceptions."""

from __future__ import annotations

import errno
import json

import jinja2
import pytest

from llamahybrid.errors import (
    Busy,
    ContextOverflow,
    DecodeError,
    DeviceLost,
    LlamaHybridError,
    ModelClosed,
    RequestCancelled,
    RequestSuperseded,
)
from llamahybrid.server.errors import Refusal, bad, later, refusal
from llamahybrid.server.prompts import PromptEmpty, PromptTooLong
from llamahybrid.server.request_fields import Route, fault


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("Requested tokens (900) exceed context window of 512"), 400),
        (ContextOverflow("900 tokens do not fit"), 400),
        (PromptTooLong("too long"), 413),
        (PromptEmpty("empty"), 400),
        (LlamaHybridError("an image is answered once"), 400),
        (Busy(""), 503),
        (ModelClosed(""), 503),
        (RequestSuperseded("gone"), 503),
        (RequestCancelled("ended"), 503),
        (DeviceLost("192.168.0.2:50052 is gone"), 503),
        (ValueError("n counts answers"), 400),
        (jinja2.TemplateError("roles must alternate"), 400),
        (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"), 400),
        (RecursionError("maximum recursion depth exceeded"), 400),
        (DecodeError(1, "no room"), 500),
        (RuntimeError("/secret/path"), 500),
        (MemoryError(), 500),
        (OSError(errno.EMFILE, "/secret/path"), 503),
        (OSError(errno.EIO, "/secret/path"), 500),
    ],
)
def test_each_has_its_status(error: Exception, status: int) -> None:
    told = refusal(error)
    assert told.status == status
    assert set(told.body["error"]) == {"message", "type", "param", "code"}
    assert "secret" not in json.dumps(told.body)
    assert ("Retry-After" in told.headers) == (status in (429, 503))


def test_an_overflow_says_how_long_the_prompt_was() -> None:
    told = refusal(ValueError("Requested tokens (900) exceed context window of 512"))
    assert told.code == "context_length_exceeded"
    assert "900" in told.message
    assert "512" in told.message


def test_refusal_is_its_own_response() -> None:
    error = bad("no", "prompt", "code")
    assert refusal(error) is error
    assert error.response().status_code == 400
    assert json.loads(bytes(later("x", 0, 429).response().body))["error"]["type"] == "rate_limit_error"
    assert later("x", 0).headers["Retry-After"] == "1"


def test_error_with_lone_surrogates_is_sent() -> None:
    assert b"ud800" in bytes(Refusal(400, "a lone \ud800").response().body)


def test_a_message_is_bounded() -> None:
    for error in (bad("x" * 10_000, "y" * 10_000), ValueError("x" * 10_000)):
        assert len(json.dumps(refusal(error).body)) < 4200


def test_a_long_name_gets_a_hint_in_time() -> None:
    refused = fault(Route.CHAT, {"x" * 30_000_000: 1})
    assert refused is not None
    assert refused.status == 400
