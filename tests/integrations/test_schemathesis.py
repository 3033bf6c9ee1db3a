"""Requests made up from the OpenAPI that our server tells of itself: none is a fault of the server."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import TinyModel
from tests.integrations.sides import needed

schemathesis = needed("schemathesis", "schemathesis")
hypothesis = needed("hypothesis", "schemathesis")

EXAMPLES = int(os.environ.get("LLAMAHYBRID_EXAMPLES", "60"))
"""Of each route."""

BOUNDS = {"max_tokens": 4, "min_tokens": 4, "max_completion_tokens": 4, "n_predict": 4, "n": 2, "best_of": 2}
"""No more than these are asked for where more would be answered: tokens take time."""


@pytest.fixture(scope="module")
def server(tiny_model: TinyModel) -> Iterator[Any]:
    from tests.lab.serving import serving

    with serving(tiny_model("qwen35"), model={"logits_all": True}) as server:
        yield server


def bounded(body: Any) -> Any:
    """A body that is answered soon, or as wrong as it was."""
    if not isinstance(body, dict):
        return body
    if "n_predict" not in body:
        body = {"max_tokens": 4, **body}
    for name, most in BOUNDS.items():
        if type(body.get(name)) in (int, float) and body[name] > most:
            body[name] = most
    if body.get("max_tokens") is None and "n_predict" not in body:
        body["max_tokens"] = 4
    if body.get("n_predict") == -1:
        body["n_predict"] = 4
    return body


def test_no_request_is_a_fault_of_the_server(server: Any) -> None:
    schema = schemathesis.openapi.from_dict(server.server.config.app.openapi())
    seen: dict[str, int] = {}
    for made in schema.get_all_operations():
        operation = made.ok()

        @hypothesis.given(case=operation.as_strategy())
        @hypothesis.settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        def ask(case: Any) -> None:
            with server.client() as client:
                options: dict[str, Any] = {"params": case.query or None}
                if not isinstance(case.body, schemathesis.core.NotSet):
                    options["content"] = json.dumps(bounded(case.body)).encode()
                    options["headers"] = {"Content-Type": "application/json"}
                answer = client.request(case.method, case.formatted_path, **options)
            told = f"{case.method} {case.formatted_path} {options}: {answer.status_code} {answer.text[:500]}"
            assert answer.status_code < 500 or case.path == "/infill", told  # 501: the model cannot
            if answer.headers["content-type"].startswith("text/event-stream"):
                assert "internal_server_error" not in answer.text, told
            key = f"{case.method} {case.path} {answer.status_code // 100}xx"
            seen[key] = seen.get(key, 0) + 1

        ask()
    print(seen)
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert seen.get(f"POST {path} 2xx"), "some are answered"
    server.await_settled()
