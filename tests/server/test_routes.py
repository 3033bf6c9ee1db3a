"""Routes, asked by OpenAI's client: each greedy answer is that of a fresh stock context."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import llama_cpp
import llama_cpp.llama_cpp as upstream
import openai
import pytest

from tests.lab.serving import Serving, parts, serving

from .conftest import TinyModel

Stock = Callable[[], Any]

CHAT: list[Any] = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "What is the capital of France?"},
]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "extra_body": {"repeat_penalty": 1.0}}
PLAIN: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "repeat_penalty": 1.0}
JSON = {"content-type": "application/json"}


def text(chunks: Any, index: int = 0) -> str:
    """Return the text of the chunks of one answer."""
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def test_a_chat(client: openai.OpenAI, stock: Stock) -> None:
    got = client.chat.completions.create(model="any", messages=CHAT, **GREEDY)
    right = stock().create_chat_completion(CHAT, **PLAIN)
    assert got.choices[0].message.content == right["choices"][0]["message"]["content"]
    assert got.choices[0].finish_reason == "length"
    assert got.usage
    assert got.usage.total_tokens == right["usage"]["total_tokens"]
    assert got.model.endswith(".gguf")
    assert "/" not in got.model


def test_a_chat_that_goes_on_is_cached(client: openai.OpenAI, stock: Stock) -> None:
    messages = [*CHAT, {"role": "user", "content": "And that of Italy, where I was last summer?"}]
    first = client.chat.completions.create(model="any", messages=messages, **GREEDY)
    said = first.choices[0].message.content
    longer = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "Sure?"}]
    second = client.chat.completions.create(model="any", messages=longer, **GREEDY)
    right = stock().create_chat_completion(longer, **PLAIN)
    assert second.choices[0].message.content == right["choices"][0]["message"]["content"]
    assert first.usage
    assert second.usage
    assert second.usage.prompt_tokens_details
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 8
    timings = second.model_extra["timings"] if second.model_extra else {}
    assert timings["cache_n"] == second.usage.prompt_tokens_details.cached_tokens
    assert timings["prompt_n"] + timings["cache_n"] == second.usage.prompt_tokens
    assert timings["predicted_n"] == 12
    assert timings["predicted_ms"] > 0 < timings["predicted_per_second"]


def test_a_streamed_chat(client: openai.OpenAI, stock: Stock) -> None:
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model="any", messages=CHAT, stream=True, stream_options=options, **GREEDY
    )
    chunks = list(stream)
    right = stock().create_chat_completion(CHAT, **PLAIN)
    assert text(chunks) == right["choices"][0]["message"]["content"]
    *others, last = chunks
    assert last.choices == []
    assert last.usage
    details = {"prompt_tokens_details", "completion_tokens_details"}
    assert last.usage.model_dump(exclude_none=True, exclude=details) == right["usage"]
    assert last.usage.prompt_tokens_details
    assert all(chunk.usage is None for chunk in others)
    assert others[-1].choices[0].finish_reason == "length"
    assert last.model_extra
    assert last.model_extra["timings"]["predicted_n"] == 12
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_ends_with_timings_where_usage_was_not_asked_for(http: httpx.Client) -> None:
    asked = {"messages": CHAT, "stream": True, **PLAIN}
    got = http.post("/v1/chat/completions", json=asked)
    assert got.headers["content-type"].startswith("text/event-stream")
    assert got.text.endswith("data: [DONE]\n\n")
    chunks = parts(got)
    assert [bool("timings" in chunk) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion(client: openai.OpenAI, stock: Stock, stream: bool) -> None:
    prompt = "It was a dark and stormy night"
    got = client.completions.create(model="any", prompt=prompt, stream=stream, **GREEDY)
    said = "".join(chunk.choices[0].text for chunk in got) if stream else got.choices[0].text
    assert said == stock().create_completion(prompt, **PLAIN)["choices"][0]["text"]


def test_a_completion_of_token_ids(client: openai.OpenAI, stock: Stock, http: httpx.Client) -> None:
    prompt = "It was a bright cold day"
    tokens = http.post("/extras/tokenize", json={"input": prompt}).json()["tokens"]
    assert http.post("/extras/tokenize/count", json={"input": prompt}).json() == {"count": len(tokens)}
    assert http.post("/extras/detokenize", json={"tokens": tokens}).json() == {"text": prompt}
    got = client.completions.create(model="any", prompt=tokens, **GREEDY)
    assert got.choices[0].text == stock().create_completion(tokens, **PLAIN)["choices"][0]["text"]


def test_copilot_s_route(http: httpx.Client, stock: Stock) -> None:
    got = http.post("/v1/engines/copilot-codex/completions", json={"prompt": "def f(", **PLAIN}).json()
    assert got["choices"][0]["text"] == stock().create_completion("def f(", **PLAIN)["choices"][0]["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_chat(client: openai.OpenAI, stock: Stock, stream: bool) -> None:
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 3}
    got = client.chat.completions.create(model="any", messages=CHAT, stream=stream, **asked, **GREEDY)
    right = stock().create_chat_completion(CHAT, **asked, **PLAIN)["choices"][0]["logprobs"]["content"]
    if stream:
        lists = [c.logprobs.content for chunk in got for c in chunk.choices if c.logprobs]
        said = [(each.token, each.logprob) for content in lists for each in content]
    else:
        said = [(each.token, each.logprob) for each in got.choices[0].logprobs.content]
        assert len(got.choices[0].logprobs.content[0].top_logprobs) in (3, 4)
    assert [token for token, _ in said] == [each["token"] for each in right]
    assert [p for _, p in said] == pytest.approx([each["logprob"] for each in right], abs=1e-2)


def test_logprobs_of_the_tokens_alone(client: openai.OpenAI) -> None:
    got = client.completions.create(model="any", prompt="Once upon", logprobs=0, **GREEDY)
    assert got.choices[0].logprobs
    assert len(got.choices[0].logprobs.token_logprobs or ()) == 12


def test_request_with_logprobs_leaves_shared_state_of_others(client: openai.OpenAI) -> None:
    """Only that request keeps rows of logits: with `logits_all` in the context nothing is restored."""
    for _ in range(2):
        got = client.chat.completions.create(model="any", messages=CHAT, **GREEDY)
    assert got.usage
    assert got.usage.prompt_tokens_details
    assert got.usage.prompt_tokens_details.cached_tokens == got.usage.prompt_tokens


def test_models_are_listed_without_their_paths(client: openai.OpenAI, server: Serving) -> None:
    (one,) = client.models.list().data
    assert one.id == server.service.models.default
    assert "/" not in one.id
    assert isinstance(one.created, int)  # OpenAI's clients in typed languages read no list without it


def test_usage_timings_metrics_and_the_cache_page_tell_the_same(tiny_model: TinyModel) -> None:
    """Each request counts once, and a prompt that differs in its middle as far as it was restored."""
    text = "A crow that counts what it hides finds all of it. " * 10
    with serving(tiny_model("qwen35")) as server, server.client() as http:

        def ask(prompt: str, **more: Any) -> Any:
            asked = {"prompt": prompt, "max_tokens": 5, "min_tokens": 5, "temperature": 0.0, **more}
            return parts(http.post("/v1/completions", json=asked))[-1]

        stream: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        answers = [ask(text + "Why?"), ask(text[:333] + "Where?"), ask(text[:333] + "When?", **stream)]
        server.await_settled()
        lines = [line.rpartition(" ") for line in http.get("/metrics").text.splitlines() if line[0] != "#"]
        told = {name: float(value) for name, _, value in lines}
        pasts = http.get("/cache/data").json()["requests"][::-1]
        assert http.get("/health").json() == http.get("/v1/health").json() == {"status": "ok"}
    assert all(past["matched"] > past["cached"] > 0 for past in pasts[1:])
    for answer, past in zip(answers, pasts, strict=True):
        usage, timings = answer["usage"], answer["timings"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == past["cached"] == timings["cache_n"]
        assert usage["prompt_tokens"] == past["prompt"] == timings["cache_n"] + timings["prompt_n"]
        assert usage["completion_tokens"] == timings["predicted_n"] == 5
    prompts, cached = (sum(past[name] for past in pasts) for name in ("prompt", "cached"))
    assert told['llamahybrid:requests_total{end="done"}'] == 3
    assert told["llamacpp:tokens_predicted_total"] == 15
    assert told["llamacpp:prompt_tokens_total"] == prompts - cached
    assert told["vllm:prefix_cache_queries_total"] == prompts
    assert told["vllm:prefix_cache_hits_total"] == cached
    assert told["vllm:time_to_first_token_seconds_count"] == 3
    assert told["llamahybrid:slots"] == 3
    assert told['llamahybrid:cache_bytes{tier="ram"}'] > 0
    assert told["llamahybrid:cache_disk_errors_total"] == 0


def test_a_stream_does_not_spell_its_answer_anew_for_each_token(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, spelt = upstream.llama_token_to_piece, [0]

    def counted(*args: Any) -> Any:
        spelt[0] += 1
        return inner(*args)

    monkeypatch.setattr(upstream, "llama_token_to_piece", counted)
    asked = {"prompt": "x", "max_tokens": 400, "min_tokens": 400, "temperature": 0.0, "stream": True}
    assert http.post("/v1/completions", json=asked).text.endswith("data: [DONE]\n\n")
    assert spelt[0] < 400 * 20
    assert http.post("/extras/detokenize", json={"tokens": [70] * 400}).is_success
    assert spelt[0] >= 400, "these are counted"


def test_error_keeps_the_connection_open(http: httpx.Client) -> None:
    """An error outside of a request's thread, too, where uvicorn would close the connection."""
    biased = {"prompt": "a", "logit_bias": {"\ud800": 1}, "logit_bias_type": "tokens"}
    with httpx.Client(base_url=http.base_url, limits=httpx.Limits(max_connections=1)) as one:
        for _ in range(3):
            reply = one.post("/v1/completions", content=json.dumps(biased), headers=JSON)
            assert reply.status_code == 400
            assert reply.headers.get("connection") != "close"
            assert one.get("/health").status_code == 200


def test_malformed_json_is_reported(http: httpx.Client) -> None:
    told = http.post("/v1/completions", content=b"{1", headers=JSON).json()["error"]
    assert told["param"] is None
    assert "JSON" in told["message"]
    for said in ({}, {"Content-Type": "application/x-www-form-urlencoded"}):  # curl -d
        told = http.post("/v1/completions", content=b'{"prompt": "a"}', headers=said).json()["error"]
        assert "content-type: application/json" in told["message"]
    told = http.post("/v1/completions", content=b"[]", headers=JSON).json()["error"]
    assert "content-type" not in told["message"]


@pytest.mark.parametrize("prompt", ["", [], [[]], [""]])
def test_an_empty_prompt_is_no_overflow(http: httpx.Client, prompt: Any) -> None:
    told = http.post("/v1/completions", json={"prompt": prompt}).json()["error"]
    assert (told["code"], told["param"]) == (None, "prompt")


@pytest.mark.parametrize("n", [1, 3])
def test_biases_and_a_shortest_length_count_together(server: Serving, http: httpx.Client, n: int) -> None:
    vocab = server.llm._model.vocab
    ends = [t for t in range(server.llm.n_vocab()) if llama_cpp.llama_vocab_is_eog(vocab, t)]
    assert len(ends) > 1
    wished = ord("a")  # the tiny vocabulary begins with all bytes
    for end in ends:
        asked = {"prompt": "hello", "temperature": 0.0, "max_tokens": 8, "min_tokens": 4, "n": n}
        bias = {str(end): 200.0, str(wished): 100.0}
        told = http.post("/v1/completions", json={**asked, "logit_bias": bias}).json()
        assert [choice["text"] for choice in told["choices"]] == ["aaaa"] * n
        assert {choice["finish_reason"] for choice in told["choices"]} == {"stop"}


def test_health_has_a_head_and_lets_no_origin_in(http: httpx.Client) -> None:
    for path in ("/health", "/v1/health"):
        got = http.head(path, headers={"origin": "https://a.example"})
        assert got.status_code == 200
        assert "access-control-allow-origin" not in got.headers


def test_embeddings_as_openai_s_client_asks_for_them(tiny_model: TinyModel) -> None:
    with (
        serving(tiny_model("llama"), model={"embedding": True, "n_parallel": 1}) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        (floats,) = client.embeddings.create(model="any", input="hello", encoding_format="float").data
        (asked,) = client.embeddings.create(model="any", input="hello").data  # for base64
        assert asked.embedding == floats.embedding
        for nothing in ("", [], ["a", ""]):
            with pytest.raises(openai.BadRequestError, match="nothing to embed"):
                client.embeddings.create(model="any", input=nothing)
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            client.embeddings.create(model="any", input="a", dimensions=3)
