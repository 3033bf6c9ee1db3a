"""POST /cache/warm, /cache/pin and /cache/forget, and requests with a `prompt_cache_key`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import httpx
import pytest

from tests.lab.serving import Held, Serving, serving
from tests.lab.waiting import wait_until

from .conftest import TinyModel

CHAT: list[Any] = [
    {"role": "system", "content": "You answer in verse. " * 12},
    {"role": "user", "content": "Who are you? " * 6},
]
TEXT = "The Danube rises in the Black Forest. " * 8
OTHERS = [f"{n} is a number that is asked for once. " * 8 for n in range(12)]


@pytest.fixture
def small(tiny_model: TinyModel) -> Iterator[Serving]:
    """A server whose cache has room for about three prompts of those, and anybody is the operator."""
    with serving(tiny_model("qwen35"), model={"ram_bytes": 3 << 19}, open_page=True) as server:
        yield server


def post(server: Serving, path: str, **asked: Any) -> dict[str, Any]:
    with server.client() as client:
        answer: dict[str, Any] = client.post(path, json=asked).raise_for_status().json()
    return answer


def cached(server: Serving, **asked: Any) -> int:
    path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
    made = post(server, path, max_tokens=1, temperature=0, **asked)
    return int(made["usage"]["prompt_tokens_details"]["cached_tokens"])


def flood(server: Serving) -> None:
    for prompt in OTHERS:
        cached(server, messages=[{"role": "system", "content": prompt}, CHAT[1]])


@pytest.mark.parametrize("asked", [{"messages": CHAT}, {"prompt": TEXT}, {"prompt": list(range(40, 200))}])
def test_warmed_prompt_is_not_decoded_again(small: Serving, asked: dict[str, Any]) -> None:
    told = post(small, "/cache/warm", **asked)
    assert told["prompt_tokens"] == told["decoded_tokens"] > 100
    assert told["cached_tokens"] == 0
    again = post(small, "/cache/warm", **asked)
    assert again["cached_tokens"] == told["prompt_tokens"]
    assert cached(small, **asked) == told["prompt_tokens"]


def test_a_prompt_is_warmed_for_a_salt(small: Serving) -> None:
    post(small, "/cache/warm", prompt=TEXT, cache_salt="mine")
    assert cached(small, prompt=TEXT) == 0
    assert cached(small, prompt=TEXT, cache_salt="mine") > 100


@pytest.mark.timeout(90)  # a job that nobody drops is waited for: less than a planted fault may take
def test_warming_ends_when_its_client_hangs_up(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of some thirty batches is decoded to the end of the one that runs; its state is kept."""
    with serving(tiny_model("qwen35"), model={"n_batch": 32}) as server:
        held, asked = Held(monkeypatch, after=2), {"prompt": [40 + n % 200 for n in range(960)]}
        server.hang_up("/cache/warm", asked, lambda: held.batches == 3)
        wait_until(lambda: all(job.cancelled for job in server.service.jobs))
        held.go_on()
        server.await_settled()
        assert held.batches <= 4
        assert 0 < post(server, "/cache/warm", **asked)["cached_tokens"] < 200


@pytest.mark.parametrize("keep", ["pin", "key", "unpinned", "nothing"])
def test_pinned_and_keyed_prompts_outlive_others(small: Serving, keep: str) -> None:
    key = {"prompt_cache_key": "my chat"} if keep == "key" else {}
    cached(small, messages=CHAT, **key)
    if keep in ("pin", "unpinned"):
        told = post(small, "/cache/pin", messages=CHAT)
        assert told["pinned"] is True
        assert told["checkpoints"] > 0
        assert told["tokens"] > 300
    if keep == "unpinned":
        assert post(small, "/cache/pin", messages=CHAT, pinned=False)["pinned"] is False
    flood(small)
    assert (cached(small, messages=CHAT) > 300) is (keep in ("pin", "key"))


def test_keys_keep_no_more_than_their_share(small: Serving) -> None:
    """The one used last stays, however many there are."""
    for n, prompt in enumerate(OTHERS):
        cached(small, prompt=prompt, prompt_cache_key=f"chat {n}")
    assert small.llm.prompt_cache is not None
    assert small.llm.prompt_cache.stats().bytes_ram <= small.llm.prompt_cache.ram_bytes
    cached(small, prompt=OTHERS[0], prompt_cache_key="the last")
    for prompt in OTHERS[1:]:
        cached(small, prompt="x" + prompt)
    assert cached(small, prompt=OTHERS[0]) > 250
    assert cached(small, prompt=OTHERS[1]) < 250


def test_forgotten_prompt_is_decoded_again(small: Serving) -> None:
    for asked in ({"messages": CHAT}, {"prompt": TEXT}):
        cached(small, **asked)
    assert post(small, "/cache/forget", prompt=TEXT)["freed_bytes"] > 0
    assert cached(small, prompt=TEXT) == 0
    assert cached(small, messages=CHAT) > 300
    post(small, "/cache/forget", all=True)
    assert small.llm.prompt_cache is not None
    assert small.llm.prompt_cache.stats().entries == 0


def test_body_without_a_prompt_gets_400(small: Serving) -> None:
    wrong: list[Any] = [{}, {"prompt": ""}, {"prompt": ["a", "b"]}, {"prompt": [999_999]}, {"messages": []}]
    wrong += [{"prompt": "a", "messages": CHAT}, {"prompt": "a", "no_such_field": 1}, {"prompt": 5}]
    wrong.append({"prompt": "a", "pinned": 1, "all": 1})
    with small.client() as client:
        for path, body in product(("warm", "pin", "forget"), wrong):
            refused = client.post(f"/cache/{path}", json=body)
            assert refused.status_code == 400, (path, body)
            assert "/v1/" not in refused.json()["error"]["message"], "another route"


def test_pinning_and_forgetting_are_the_operator_s(tiny_model: TinyModel) -> None:
    def status(http: httpx.Client, path: str, key: str | None) -> int:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return http.post(f"/cache/{path}", json={"prompt": "a text"}, headers=headers).status_code

    with (
        serving(tiny_model("qwen35"), api_keys=["one"], operator_key="boss") as server,
        server.client() as http,
    ):
        for path, for_one in (("warm", 200), ("pin", 403), ("forget", 403)):
            assert [status(http, path, key) for key in ("boss", "one", None)] == [200, for_one, 401]
        auth = httpx.BasicAuth("", "boss")  # a browser sends it along with what any page asks for
        assert http.post("/cache/forget", json={"all": True}, auth=auth).status_code == 401
