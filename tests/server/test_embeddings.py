"""/v1/embeddings of a model that chats, too, and llama-server's /embedding."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from llamahybrid.server.admission import Admission
from tests.lab.serving import Serving, serving, wait_until

TinyModel = Callable[..., Path]


@pytest.fixture
def server(tiny_model: TinyModel) -> Iterator[Serving]:
    with serving(tiny_model("qwen35"), model={"embedding": True, "n_parallel": 1}) as server:
        yield server
        server.await_settled()


@pytest.fixture
def http(server: Serving) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def vectors(http: httpx.Client, texts: Any) -> list[Any]:
    answer = http.post("/v1/embeddings", json={"input": texts})
    assert answer.status_code == 200, answer.text
    return [each["embedding"] for each in answer.json()["data"]]


@pytest.mark.parametrize("arch", ["qwen35", "llama", "bert"])
def test_token_ids_and_several_texts_are_embedded_as_each_text(tiny_model: TinyModel, arch: str) -> None:
    """LangChain's OpenAIEmbeddings sends them."""
    with (
        serving(tiny_model(arch), model={"embedding": True, "n_parallel": 1}) as server,
        server.client() as client,
    ):
        texts = ["one", "two words", "three other words"]
        ids = [server.llm.tokenize(text.encode()) for text in texts]
        alone = [vectors(client, text)[0] for text in texts]
        together = vectors(client, texts)
        assert vectors(client, ids) == together
        if arch != "bert":  # its texts share a batch
            assert together == alone
        assert vectors(client, ids[1]) == alone[1:2]
        for wrong in ([[1 << 70]], [[-1]], [1, 10**6], [[]], [[1], []]):
            refused = client.post("/v1/embeddings", json={"input": wrong})
            assert refused.status_code == 400, wrong
            assert refused.json()["error"]["param"] == "input"


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
def test_pooled_vectors_in_llama_server_s_form_have_a_norm(tiny_model: TinyModel, path: str) -> None:
    model = {"embedding": True, "n_parallel": 1}
    with serving(tiny_model("bert"), model=model) as server, server.client() as client:
        one, two = vectors(client, ["one", "two words"])
        for norm, size in ((0, max(map(abs, one)) / 32760), (1, sum(map(abs, one))), (2, math.hypot(*one))):
            got = client.post(path, json={"content": "one", "embd_normalize": norm}).raise_for_status().json()
            ((vector,),) = [each["embedding"] for each in got]
            assert vector == pytest.approx([x / size for x in one], abs=1e-3 * max(map(abs, vector)))
        both = client.post(path, json={"input": ["one", "two words"], "embd_normalize": -1}).json()
        assert both == [{"index": 0, "embedding": [one]}, {"index": 1, "embedding": [two]}]
        ((unit,),) = [each["embedding"] for each in client.post(path, json={"content": "one"}).json()]
        assert math.hypot(*unit) == pytest.approx(1)
        for wrong in (
            {},
            {"content": ""},
            {"content": "x", "embd_normalize": -2},
            {"content": "x", "size": 3},
        ):
            refused = client.post(path, json=wrong)
            assert refused.status_code == 400, wrong
            assert "/v1/" not in refused.json()["error"]["message"], "another route"


def test_vectors_of_tokens_in_llama_server_s_form_are_the_model_s(http: httpx.Client) -> None:
    (rows,) = vectors(http, "two words")
    got = http.post("/embedding", json={"content": "two words"}).raise_for_status().json()
    assert got == [{"index": 0, "embedding": rows}]
    assert len(rows) == len("two words"), "the tokens are bytes"


def test_texts_are_embedded_while_every_slot_is_taken(server: Serving, http: httpx.Client) -> None:
    texts = ["one", "two words", "three other words"]
    wanted = vectors(http, texts)
    asked = {"prompt": "Tell me", "max_tokens": 300, "temperature": 0, "stream": True}
    with ThreadPoolExecutor(4) as pool, http.stream("POST", "/v1/completions", json=asked) as response:
        lines = response.iter_lines()
        next(lines)
        assert all(made == wanted for made in pool.map(lambda _: vectors(http, texts), range(8)))
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_a_burst_of_texts_to_embed_is_bounded_before_any_has_begun(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, enter = threading.Event(), Admission.enter

    async def slow(admission: Admission, alias: str, slots: int) -> Any:
        while not go_on.is_set():
            await asyncio.sleep(0.01)
        return await enter(admission, alias, slots)

    with (
        serving(tiny_model("qwen35"), model={"embedding": True}, max_queue=1) as server,
        server.client() as client,
        ThreadPoolExecutor(6) as pool,
    ):
        monkeypatch.setattr(Admission, "enter", slow)
        asked = {"input": "x"}
        waiting = [pool.submit(client.post, "/v1/embeddings", json=asked) for _ in range(6)]
        try:
            wait_until(lambda: sum(each.done() for each in waiting) == 4)
        finally:
            go_on.set()
        answers = [each.result() for each in waiting]
        assert sorted(each.status_code for each in answers) == [200, 200, *[429] * 4]
        assert all(int(each.headers["retry-after"]) > 0 for each in answers if each.status_code == 429)
        wait_until(lambda: not server.service.jobs)
        assert client.post("/v1/embeddings", json=asked).status_code == 200, "their places are free again"


def test_model_without_the_embedding_setting_embeds_nothing(tiny_model: TinyModel) -> None:
    with serving(tiny_model("qwen35")) as server, server.client() as client:
        refused = client.post("/v1/embeddings", json={"input": "x"})
    assert refused.status_code == 400
    assert "embedding" in refused.json()["error"]["message"]
