"""Recorded sessions of clients, replayed over HTTP: what they cost, and what the least would have been."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.lab.serving import Serving, parts

FOLDER = Path(__file__).parents[1] / "server" / "sessions"


def session(name: str, **more: Any) -> list[dict[str, Any]]:
    """The requests of a session in `FOLDER`; `more`: what each says besides. None leaves a field out."""
    common, *each = map(json.loads, (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines())
    asked = [{**common, **own, **more} for own in each]
    return [{name: value for name, value in one.items() if value is not None} for one in asked]


def replay(server: Serving, path: str, requests: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Send requests one after the other; the events of each, or its answer alone.

    Raises AssertionError where one is refused, or a stream tells of an error or does not end.
    """
    told = []
    with server.client() as client:
        for asked in requests:
            answer = client.post(path, json=asked)
            assert answer.status_code == httpx.codes.OK, answer.text
            if asked.get("stream") and path != "/v1/messages":
                assert answer.text.rstrip().endswith("data: [DONE]")
            told.append(parts(answer))
            assert not any("error" in event for event in told[-1]), told[-1][-1]
            server.await_settled()
    return told
