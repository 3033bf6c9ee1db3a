"""Sessions of agents, as they are recorded in `sessions/`, replayed on three APIs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llamahybrid import Llama
from llamahybrid.harness.counters import DecodeCounter
from tests.lab.costs import decide_by
from tests.lab.in_process import heard, oracle_ratio
from tests.lab.serving import Serving, serving
from tests.lab.sessions import replay, session

TinyModel = Callable[..., Path]


@pytest.fixture(scope="module")
def api(tiny_model: TinyModel) -> Iterator[Serving]:
    """A server with room for the longest session in bytes, which are the tokens of this vocabulary."""
    with serving(tiny_model("qwen35"), model={"n_ctx": 12288}) as server:
        decide_by(server.llm)  # the ratio follows from what a snapshot costs, and that from the machine
        yield server


def check(server: Serving, path: str, requests: list[dict[str, Any]]) -> list[list[Any]]:
    """No errors, little more than the least is decoded, and the last answer is a fresh context's."""
    with heard(server.llm, DecodeCounter(server.llm)) as records:
        told = replay(server, path, requests)
    assert len(records) == len(requests)
    assert all(record.generated for record in records)
    assert oracle_ratio(records) <= 1.05
    last = records[-1]
    options: dict[str, Any] = {"n_threads": 1, "n_threads_batch": 1, "verbose": False}
    model, n_ctx = server.llm.model_path, server.llm.n_ctx()
    fresh = Llama(model, n_ctx=n_ctx, prompt_cache=False, **options)
    try:
        tokens = fresh.generate(list(last.prompt), temp=0.0, repeat_penalty=1.0)
        assert tuple(next(tokens) for _ in last.generated) == last.generated
    finally:
        fresh.close()
    return told


def test_an_opencode_shaped_session(api: Serving) -> None:
    requests = session("opencode", repeat_penalty=1.0)
    told = check(api, "/v1/chat/completions", requests)
    for events in told:
        *others, last = events
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] > 0
        assert others[-1]["choices"][0]["finish_reason"] == "length"
    assert told[-1][-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 1000


def test_a_codex_shaped_session(api: Serving) -> None:
    requests = session("codex", temperature=0.0, max_output_tokens=24)
    told = check(api, "/v1/responses", requests)
    for events in told:
        kinds = [event["type"] for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.incomplete"  # 24 tokens
        assert [event["sequence_number"] for event in events] == list(range(1, len(events) + 1))
    usage = told[-1][-1]["response"]["usage"]
    assert usage["output_tokens"] == 24
    assert usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"] < 400


def test_a_claude_code_shaped_session(api: Serving) -> None:
    requests = session("claude-code", temperature=0.0)
    counted = []
    with api.client() as client:
        for asked in requests:
            got = client.post("/v1/messages/count_tokens", json=asked)
            assert got.status_code == 200, got.text
            counted.append(got.json()["input_tokens"])
    told = check(api, "/v1/messages", requests)
    for events, count in zip(told, counted, strict=True):
        begun, end = events[0]["message"]["usage"], events[-2]["usage"]
        assert events[-1] == {"type": "message_stop"}
        assert events[-2]["delta"]["stop_reason"] == "max_tokens"
        assert end["output_tokens"] >= 16
        assert begun["input_tokens"] + begun["cache_read_input_tokens"] == count
        assert {**end, "output_tokens": 0} == {**begun, "output_tokens": 0}
    turns = [events[0]["message"]["usage"]["cache_read_input_tokens"] for events in (told[0], *told[2:])]
    prompts = [counted[0], *counted[2:]]
    assert turns[0] < prompts[0]
    for cached, before in zip(turns[1:], prompts, strict=False):
        assert cached >= before - 16, "a turn reads the prompt before it from the cache"
