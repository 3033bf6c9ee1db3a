"""Models that are closed and opened again: nobody is cut off, and no token is decoded twice for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import llama_cpp
import pytest

from llamahybrid.server.settings import ModelSettings
from tests.lab.serving import SMALL, Held, Serving, serving, wait_until

TinyModel = Callable[..., Path]
SYSTEM = {"role": "system", "content": "You tell stories. " * 12}


@contextmanager
def two_models(
    tiny_model: TinyModel, models_bytes: int, model: dict[str, Any] | None = None, **more: Any
) -> Iterator[Serving]:
    settings = [
        ModelSettings(model=str(tiny_model(arch)), model_alias=arch, **{**SMALL, **(model or {})})
        for arch in ("qwen35", "gemma3")
    ]
    with serving(*settings, models_bytes=models_bytes, **more) as server:
        yield server


def opened(server: Serving) -> list[str]:
    with server.client() as client:
        data = client.get("/v1/models").json()["data"]
    return [each["id"] for each in data if each["status"]["value"] == "loaded"]


def test_requests_name_a_model_by_any_of_its_names(tiny_model: TinyModel) -> None:
    settings = [
        ModelSettings(model=str(tiny_model("qwen35")), model_alias=names, vocab_only=True)
        for names in ("first,gpt-4o", "second")
    ]
    with serving(*settings) as server, server.client() as client:
        data = client.get("/v1/models").json()["data"]
        assert [(each["id"], each["aliases"]) for each in data] == [("first", ["gpt-4o"]), ("second", [])]
        for name, status in (("first", 200), ("gpt-4o", 200), (None, 200), ("frist", 404)):
            got = client.post("/tokenize", json={"model": name, "content": "x"})
            assert got.status_code == status, got.text
        hello = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        for path, asked in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", hello),
            ("/v1/embeddings", {"input": "x"}),
            ("/v1/responses", {"input": "x"}),
            ("/completion", {"prompt": "x"}),
            ("/cache/warm", {"prompt": "x"}),
        ):
            got = client.post(path, json={**asked, "model": "frist"})
            assert (got.status_code, got.json()["error"]["code"]) == (404, "model_not_found"), path
        claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
        with claude, pytest.raises(anthropic.NotFoundError):
            claude.messages.create(model="frist", max_tokens=1, messages=[{"role": "user", "content": "x"}])
        assert client.get("/props", params={"model": "gpt-4o"}).json()["model_alias"] == "first"
        copilot = client.post("/v1/engines/copilot-codex/completions", json={"prompt": "x"})
        assert "vocab_only" in copilot.text, "the default model's error"


def turn(server: Serving, model: str, messages: list[Any]) -> dict[str, Any]:
    """Ask, and add the answer; what the request took."""
    asked = {"model": model, "messages": messages, "max_tokens": 12, "temperature": 0}
    with server.client() as client:
        made: dict[str, Any] = client.post("/v1/chat/completions", json=asked).raise_for_status().json()
    messages.append(made["choices"][0]["message"])
    return made


def conversation(server: Serving, others: bool) -> tuple[list[int], list[Any], int]:
    """Three turns with each model, in turn or one after the other: tokens of prompts that were decoded by
    each turn, what was said, and the tokens that the library decoded in prompts for the last turn."""
    chats = {model: [dict(SYSTEM)] for model in ("qwen35", "gemma3")}
    decoded, said = list[int](), list[Any]()
    rounds = [(n, model) for n in range(3) for model in chats]
    native = 0
    for n, model in rounds if others else sorted(rounds, key=lambda each: list(chats).index(each[1])):
        chats[model].append({"role": "user", "content": f"Story number {n}, please. " * 3})
        made = turn(server, model, chats[model])
        usage = made["usage"]
        decoded.append(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])
        assert made["timings"]["prompt_n"] == decoded[-1]
        said.append((model, n, made["choices"][0]["message"]["content"]))
        native = llama_cpp.llama_perf_context(server.llm._ctx.ctx).n_p_eval
    order = sorted(range(len(said)), key=lambda at: said[at][:2])
    return [decoded[at] for at in order], [said[at] for at in order], native


@pytest.mark.parametrize("n_parallel", [1, 3])
def test_a_conversation_goes_on_after_its_model_was_away(tiny_model: TinyModel, n_parallel: int) -> None:
    """As many tokens are decoded as where both models stayed open, and the answers are the same."""
    with two_models(tiny_model, 1 << 40, model={"n_parallel": n_parallel}) as server:
        stayed, right, _ = conversation(server, others=True)
        assert opened(server) == ["qwen35", "gemma3"]
    with two_models(tiny_model, 1, model={"n_parallel": n_parallel}) as server:
        came_back, said, native = conversation(server, others=True)
        assert opened(server) == ["gemma3"]
        text = server.metrics()
        assert 'llamahybrid:model_open{model="gemma3"} 1.0' in text
        assert 'llamahybrid:model_open{model="qwen35"} 0.0' in text
    assert said == right
    assert came_back == stayed
    assert max(came_back[1:3] + came_back[4:]) < came_back[0] // 2, "only what is new"
    # The context that answered last was new, and has decoded no more than that, and its answer's first token.
    last = came_back[2]
    assert 0 < native <= last + 12


def test_an_answer_that_runs_is_not_cut_off_for_another_model(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_models(tiny_model, 1) as server, server.client() as client, ThreadPoolExecutor(2) as pool:
        asked = {"model": "qwen35", "prompt": "Once", "max_tokens": 40, "min_tokens": 40, "temperature": 0}
        right = client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
        held = Held(monkeypatch, after=5)
        first = pool.submit(client.post, "/v1/completions", json=asked)
        wait_until(lambda: held.batches > 5)
        other = pool.submit(client.post, "/v1/completions", json={"model": "gemma3", "prompt": "x"})
        wait_until(lambda: server.service.admission.waiting == 1)
        assert opened(server) == ["qwen35"]
        held.go_on()
        choice = first.result().json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (right, "length")
        assert other.result().status_code == 200
        assert opened(server) == ["gemma3"]


def test_idle_model_closes_and_reopens_by_name(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Its cache is on disk, too."""
    asked = {"model": "qwen35", "prompt": "A long beginning. " * 20, "max_tokens": 4, "temperature": 0}
    tired = two_models(tiny_model, 1 << 40, idle_unload="0.2s", model={"disk_dir": str(tmp_path)})
    with tired as server, server.client() as client:
        first = client.post("/v1/completions", json=asked).json()
        wait_until(lambda: opened(server) == [])
        assert any(file.is_file() and file.stat().st_size > 1000 for file in tmp_path.rglob("*"))
        assert client.get("/cache/data").json()["model"] is None
        assert "llamahybrid:slots 0.0" in client.get("/metrics").text
        again = client.post("/v1/completions", json=asked).json()
    assert again["choices"] == first["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"]


def test_waiting_request_ends_a_stream_of_its_model(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With interrupt_requests; the stream that has run longest is another model's."""
    settings: dict[str, Any] = {"model": {"n_parallel": 1}, "interrupt_requests": True}
    endless = {"prompt": "Once", "max_tokens": 300, "min_tokens": 300, "stream": True}
    with (
        two_models(tiny_model, 1 << 40, **settings) as server,
        server.client() as client,
        ThreadPoolExecutor(3) as pool,
    ):
        for model in ("gemma3", "qwen35"):
            client.post("/v1/completions", json={"model": model, "prompt": "x", "max_tokens": 1})
        held, admission = Held(monkeypatch, after=0), server.service.admission
        streams = list[Any]()
        for count, model in enumerate(("gemma3", "qwen35"), 1):
            streams.append(pool.submit(client.post, "/v1/completions", json={**endless, "model": model}))
            wait_until(lambda count=count: admission.running == count)  # type: ignore[misc]
        third = pool.submit(client.post, "/v1/completions", json={"model": "qwen35", "prompt": "y"})
        wait_until(lambda: any(job.cancelled for job in list(server.service.jobs)))
        held.go_on()
        others, own = (stream.result().text for stream in streams)
        assert third.result().status_code == 200
    assert '"finish_reason": "cancelled"' in own
    assert '"cancelled"' not in others
