"""Several prompts in one completion request: each choice is what its prompt alone gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from tests.lab.serving import Held, Serving, wait_until

Stock = Callable[[], Any]
PROMPTS = ["The Danube", "A bicycle is", "Graz", "Once upon a time there", "Ten"]
PLAIN: dict[str, Any] = {"temperature": 0.0, "max_tokens": 10, "repeat_penalty": 1.0}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 10, "extra_body": {"repeat_penalty": 1.0}}
WARM: dict[str, Any] = {"temperature": 0.9, "seed": 11, "max_tokens": 10}


def texts(chunks: Any) -> dict[int, str]:
    """Return the text of each choice of a stream, by its index."""
    said = dict[int, str]()
    for chunk in chunks:
        for choice in chunk.choices:
            said[choice.index] = said.get(choice.index, "") + choice.text
    return said


@pytest.mark.parametrize("kind", ["texts", "ids"])
@pytest.mark.parametrize("stream", [False, True])
def test_each_prompt_is_completed_as_stock_does(
    client: openai.OpenAI, stock: Stock, stream: bool, kind: str
) -> None:
    fresh = stock()
    ids = [fresh.tokenize(prompt.encode(), special=True) for prompt in PROMPTS]
    right = [stock().create_completion(prompt, **PLAIN) for prompt in PROMPTS]
    prompt: Any = PROMPTS if kind == "texts" else ids
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    got = client.completions.create(model="any", prompt=prompt, stream=stream, **options, **GREEDY)
    if stream:
        chunks = list(got)
        said, usage = texts(chunks), chunks[-1].usage
        assert len({chunk.id for chunk in chunks}) == 1
        ends = Counter(c.index for chunk in chunks for c in chunk.choices if c.finish_reason)
        assert ends == dict.fromkeys(range(len(PROMPTS)), 1)
    else:
        assert [choice.index for choice in got.choices] == list(range(len(PROMPTS)))
        said, usage = {choice.index: choice.text for choice in got.choices}, got.usage
    assert said == {at: each["choices"][0]["text"] for at, each in enumerate(right)}
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(usage, name) == sum(each["usage"][name] for each in right), name


def test_answers_of_a_prompt_are_next_to_each_other(client: openai.OpenAI) -> None:
    pair = PROMPTS[:2]
    got = client.completions.create(model="any", prompt=pair, n=3, **WARM)
    alone = [client.completions.create(model="any", prompt=prompt, n=3, **WARM) for prompt in pair]
    assert [choice.index for choice in got.choices] == list(range(6))
    assert [c.text for c in got.choices] == [c.text for one in alone for c in one.choices]
    streamed = client.completions.create(model="any", prompt=pair, n=3, stream=True, **WARM)
    assert texts(streamed) == {choice.index: choice.text for choice in got.choices}
    assert got.usage
    assert got.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone if one.usage)


def test_scores_tokens_and_timings_of_several_prompts(http: httpx.Client) -> None:
    asked = {"prompt": PROMPTS, "max_tokens": 6, "temperature": 0, "return_tokens": True}
    first = http.post("/v1/completions", json=asked).raise_for_status().json()
    assert [len(choice["tokens"]) for choice in first["choices"]] == [6] * len(PROMPTS)
    again = http.post("/v1/completions", json=asked).raise_for_status().json()
    assert again["choices"] == first["choices"]
    usage, timings = again["usage"], again["timings"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert timings["cache_n"] == cached
    assert timings["prompt_n"] == usage["prompt_tokens"] - cached
    assert timings["predicted_n"] == 6 * len(PROMPTS)


def test_one_impossible_prompt_refuses_the_request(server: Serving, http: httpx.Client) -> None:
    for wrong in ([[1, 2], [999_999]], [[1, 2], [5] * 5000], ["a", "b " * 5000]):
        refused = http.post("/v1/completions", json={"prompt": wrong, "max_tokens": 3})
        assert refused.status_code == 400, wrong
        server.await_settled()
    assert http.post("/v1/completions", json={"prompt": [[1], "a"]}).status_code == 400


def test_a_client_that_hangs_up_ends_all_its_prompts(
    server: Serving, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch, after=10)
    asked = {"prompt": PROMPTS * 20, "max_tokens": 500, "min_tokens": 500}
    server.hang_up("/v1/completions", asked, lambda: held.batches > 10)
    wait_until(lambda: all(job.cancelled for job in list(server.service.jobs)))
    held.go_on()
    server.await_settled()
    assert held.batches < 200
    assert http.post("/v1/completions", json={"prompt": PROMPTS[:2], **PLAIN}).status_code == 200
