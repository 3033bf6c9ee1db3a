"""`return_progress`: a stream tells how far its prompt is, as llama-server's does; so does /metrics."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.lab.serving import Held, Serving, parts, serving, wait_until

from .conftest import TinyModel

LONG = "a word and another " * 40
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": LONG},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
}


@pytest.fixture(scope="module")
def slow(tiny_model: TinyModel) -> Iterator[Serving]:
    """A server whose prompts take many batches."""
    with serving(tiny_model("qwen35"), model={"n_batch": 64, "n_ubatch": 64}) as server:
        yield server


def chunks(server: Serving, path: str, **more: Any) -> list[dict[str, Any]]:
    asked = {**ASKED[path], "max_tokens": 4, "temperature": 0, "stream": True, **more}
    with server.client() as client:
        return parts(client.post(path, json=asked))


def said(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["delta"].get("content") or ""


@pytest.mark.parametrize("path", ASKED)
def test_a_stream_tells_how_far_its_prompt_is(slow: Serving, path: str) -> None:
    salt = {"cache_salt": path}
    got = chunks(slow, path, return_progress=True, stream_options={"include_usage": True}, **salt)
    told = [each["prompt_progress"] for each in got if "prompt_progress" in each]
    total = got[-1]["usage"]["prompt_tokens"]
    assert all(each.keys() == {"total", "cache", "processed", "time_ms"} for each in told)
    assert {(each["total"], each["cache"]) for each in told} == {(total, 0)}
    far = [each["processed"] for each in told]
    assert far == sorted(set(far))
    assert (far[0], far[-1]) == (0, total)
    assert len(far) > total // 64
    assert got[: len(told)] == [each for each in got if "prompt_progress" in each], "all before the answer"
    assert len({each["id"] for each in got}) == len({each["created"] for each in got}) == 1
    assert not any(said(choice) for each in got[: len(told)] for choice in each["choices"])
    plain = chunks(slow, path, cache_salt="another " + path)
    texts = ["".join(said(c) for each in every for c in each["choices"]) for every in (got, plain)]
    assert texts[0] == texts[1] != ""
    assert not any("prompt_progress" in each for each in plain)
    again = chunks(slow, path, return_progress=True, **salt)
    told = [each["prompt_progress"] for each in again if "prompt_progress" in each]
    assert told[0]["processed"] == told[0]["cache"] > total - 64


def test_llama_server_s_route_has_its_own_progress_form(slow: Serving) -> None:
    asked = {"prompt": "y " + LONG, "n_predict": 3, "stream": True, "return_progress": True}
    with slow.client() as client:
        events = parts(client.post("/completion", json=asked))
        several = client.post("/completion", json={"prompt": ["x", "y"], "n_predict": 3})
    told = [each["prompt_progress"] for each in events if "prompt_progress" in each]
    assert told[-1]["processed"] == told[-1]["total"] == events[-1]["tokens_evaluated"]
    assert not any(each["content"] or each["stop"] for each in events[: len(told)])
    assert all("content" in each and "choices" not in each for each in events)
    assert several.status_code == 400
    assert several.json()["error"]["param"] == "prompt"


def test_metrics_show_the_rest_of_prompts(slow: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    def gauges() -> list[float]:
        lines = [line.split() for line in slow.metrics().splitlines()]
        names = ("llamahybrid:prompts_processing", "llamahybrid:prompt_tokens_left")
        return [float(value) for name, *_, value in lines if name in names]

    assert gauges() == [0, 0]
    held = Held(monkeypatch, after=3)
    with slow.client() as client, ThreadPoolExecutor(1) as pool:
        asked = {"prompt": "x " + LONG, "max_tokens": 1, "cache_salt": "metrics"}
        answer = pool.submit(client.post, "/v1/completions", json=asked)
        wait_until(lambda: held.batches == 4)
        prompts, left = gauges()
        held.go_on()
        total = answer.result().json()["usage"]["prompt_tokens"]
    assert prompts == 1
    assert total - 3 * 64 <= left < total
    assert gauges() == [0, 0]
