"""Separation of users by salts and keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llamahybrid.server.keys import salt_of, salt_of_request
from tests.lab.serving import Serving, parts, serving


def test_a_salt_is_the_request_s_own_below_its_key_s() -> None:
    assert salt_of_request(None, "key", by_key=False) == ""
    assert salt_of_request("mine", "key", by_key=False) == "mine"
    assert salt_of_request(None, "key", by_key=True) == salt_of("key")
    assert salt_of_request("mine", "key", by_key=True) == f"{salt_of('key')}/mine"
    assert salt_of_request("mine", "key", by_key=True) != salt_of_request("mine", "other", by_key=True)


@pytest.fixture(scope="module")
def by_key(tiny_model: Callable[..., Path]) -> Iterator[Serving]:
    """A server where each key has its own."""
    with serving(tiny_model("qwen35"), salt_by_key=True, api_keys=["one", "two"]) as server:
        yield server


def cached(server: Serving, prompt: str, key: str = "none", **said: Any) -> int:
    """Prompt tokens that were not decoded, of 380."""
    asked = {"prompt": prompt + "a word and another " * 20, "max_tokens": 3, "temperature": 0.0, **said}
    with server.client(headers={"authorization": f"Bearer {key}"}) as client:
        if said.get("stream"):
            asked["stream_options"] = {"include_usage": True}
        usage = parts(client.post("/v1/completions", json=asked))[-1]["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


MESSAGES = [{"role": "user", "content": "Hello"}]
SAID: list[dict[str, Any]] = [{}, {"stream": True}, {"n": 2}]


@pytest.mark.parametrize("said", SAID)
def test_salts_in_bodies_part_users(server: Serving, said: dict[str, Any]) -> None:
    prompt = f"{said}"
    assert cached(server, prompt, cache_salt="one", **said) == 0
    assert cached(server, prompt, cache_salt="two", **said) == 0
    assert cached(server, prompt, **said) == 0
    for own in ({"cache_salt": "one"}, {"cache_salt": "two"}, {}):
        assert cached(server, prompt, **own, **said) > 350


@pytest.mark.parametrize("said", SAID)
def test_keys_part_users(by_key: Serving, said: dict[str, Any]) -> None:
    """And a salt in a body parts what one key asks for, and joins nobody."""
    prompt = f"{said}"
    assert cached(by_key, prompt, "one", **said) == 0
    assert cached(by_key, prompt, "two", **said) == 0
    for own in ("mine", salt_of("one"), salt_of("one") + "/mine"):
        assert cached(by_key, prompt, "two", cache_salt=own, **said) == 0
    assert cached(by_key, prompt, "one", cache_salt="mine", **said) == 0
    for key in ("one", "two"):
        assert cached(by_key, prompt, key, **said) > 350
    assert cached(by_key, prompt, "one", cache_salt="mine", **said) > 350


def test_an_operator_may_take_no_requests_that_share_with_everybody(tiny_model: Callable[..., Path]) -> None:
    asked = {"prompt": "x", "max_tokens": 1}
    chat = {"messages": MESSAGES, "max_tokens": 1}
    with serving(tiny_model("qwen35"), require_salt=True) as server, server.client() as client:
        for path, body in (("completions", asked), ("chat/completions", chat)):
            for own, status in ({}, 400), ({"cache_salt": ""}, 400), ({"cache_salt": "mine"}, 200):
                answer = client.post(f"/v1/{path}", json={**body, **own})
                assert answer.status_code == status, own
                assert status == 200 or answer.json()["error"]["param"] == "cache_salt"
    with (
        serving(tiny_model("qwen35"), require_salt=True, salt_by_key=True, api_key="one") as server,
        server.client(headers={"authorization": "Bearer one"}) as client,
    ):
        assert client.post("/v1/completions", json=asked).status_code == 200
