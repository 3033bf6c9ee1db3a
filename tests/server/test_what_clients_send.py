"""Requests that clients of other servers send, and that attackers do."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from llamahybrid.server.messages import MOST_MESSAGES, normalized
from tests.lab.serving import Serving, serving

from .conftest import TinyModel

HI = {"role": "user", "content": "hi"}
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
ALONE = {"n_parallel": None}
FORGED = "x\nrefused (key): '/v1/completions' from 8.8.8.8\n\x1b[31mred"


def chat(http: httpx.Client, *messages: Any, **more: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json={"messages": [*messages], "max_tokens": 2, **more})


def test_openai_messages_come_back_as_they_were_given(client: openai.OpenAI) -> None:
    ask: Any = client.chat.completions.create
    said = ask(model="q", messages=[HI], max_tokens=3).choices[0].message
    for sent in (said, said.model_dump()):
        assert ask(model="q", messages=[HI, sent, HI], max_tokens=2).choices


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": PARTS}, HI],
        [{"role": "developer", "content": PARTS}, HI],
        [HI, {"role": "assistant", "content": PARTS}, HI],
        [HI, CALL, {"role": "tool", "tool_call_id": "1", "content": PARTS}],
    ],
)
def test_text_parts_are_content_of_any_role(http: httpx.Client, messages: list[Any]) -> None:
    assert chat(http, *messages).status_code == 200
    assert "a\nb" in [message.get("content") for message in normalized(messages)]


def test_nulls_inside_of_fields_count_as_left_out(http: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": None, "parameters": None}}
    assert chat(http, HI, tools=[tool], stream=True, stream_options={"include_usage": None}).is_success


def test_pictures_are_refused_by_models_that_read_text(http: httpx.Client) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo=", "detail": None}}
    for parts in ([image], [*PARTS, image]):
        refused = chat(http, {"role": "user", "content": parts})
        assert refused.status_code == 400
        assert "image_url" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "message",
    [{"role": "user", "content": ""}, {"role": "user", "content": [{"type": "text", "text": ""}] * 1000}],
)
def test_messages_and_their_parts_are_bounded_together(http: httpx.Client, message: Any) -> None:
    content = message["content"]
    refused = chat(http, *[message] * (MOST_MESSAGES // (len(content) or 1) + 1))
    assert refused.status_code == 400
    assert f"{MOST_MESSAGES:,} messages" in refused.json()["error"]["message"]


def test_tokenizing_does_not_depend_on_earlier_requests(server: Serving, http: httpx.Client) -> None:
    text = {"input": "hello " * 4000}

    def count(_: int) -> Any:
        return http.post("/extras/tokenize/count", json=text).json()["count"]

    before = count(0)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda i: chat(http, {"role": "user", "content": f"x{i}"}), range(4)))
        assert set(threads.map(count, range(12))) == {before}


def test_a_vocabulary_alone_answers_no_prompts(tiny_model: TinyModel) -> None:
    with serving(tiny_model("qwen35"), model=ALONE | {"vocab_only": True}) as server, server.client() as http:
        for refused in (http.post("/v1/completions", json={"prompt": "x"}), chat(http, HI)):
            assert refused.status_code == 400
            assert "vocab_only" in refused.json()["error"]["message"]
        assert http.post("/extras/tokenize", json={"input": "x"}).is_success


def test_several_answers_look_their_prompt_up_once(tiny_model: TinyModel) -> None:
    with serving(tiny_model("qwen35")) as server, server.client() as http:
        told = http.post("/v1/completions", json={"prompt": "a b c", "n": 2, "max_tokens": 2}).json()
        server.await_settled()
        assert f"prefix_cache_queries_total {told['usage']['prompt_tokens']:.1f}" in server.metrics()


@pytest.mark.parametrize(
    "grammar",
    [FORGED, 'root ::= "a', "root ::= (" + FORGED, 'root ::= "a"{5,2}', f'root ::= "{"a" * 999}"{{2000}}'],
)
def test_a_bad_grammar_is_refused_and_never_printed(
    http: httpx.Client, capfd: pytest.CaptureFixture[str], grammar: str
) -> None:
    refused = http.post("/v1/completions", json={"prompt": "x", "grammar": grammar})
    assert refused.status_code == 400
    assert "grammar" in refused.json()["error"]["message"]
    printed = capfd.readouterr()
    assert grammar[:20] not in printed.err + printed.out
    assert "8.8.8.8" not in printed.err + printed.out
