"""llama-server's own routes, asked as editors and UIs ask them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from llamahybrid.server.llama_server.completion import indented_end
from llamahybrid.server.request_fields import FIELDS, Effect, Route, effect
from tests.lab import infill
from tests.lab.infill import FIM
from tests.lab.serving import Held, Serving, parts, serving, wait_until

from .conftest import TinyModel

PROMPT = "It was a dark and stormy night"
PLAIN: dict[str, Any] = {"temperature": 0.0, "n_predict": 12}
VIM: dict[str, Any] = {
    "input_prefix": "def total(rows):\n    result = 0\n",
    "input_suffix": "    return result\n",
    "input_extra": [{"text": "def count(rows):\n    return len(rows)\n", "time": [1, 2], "filename": "a.py"}],
    "prompt": "    for row in",
    "n_predict": 16,
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 60000,
    "response_fields": ["content", "timings/prompt_n", "timings/predicted_n", "truncated", "tokens_cached"],
}
"""A request of llama.vim (autoload/llama.vim, llama#fim)."""
WARM: dict[str, Any] = {
    **VIM,
    **{"input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0, "temperature": 0.0},
    **{"samplers": [], "t_max_prompt_ms": 1, "t_max_predict_ms": 1, "response_fields": [""]},
}
"""Its request ahead of time, with chunks of other files (s:ring_update)."""


@pytest.fixture(scope="module")
def fim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(infill.make(tmp_path_factory.mktemp("fim") / "fim.gguf")) as server:
        yield server


@pytest.fixture(scope="module")
def editor(fim: Serving) -> Iterator[httpx.Client]:
    with fim.client() as client:
        yield client


# -- completions and infill ----------------------------------------------------------------------------


def test_a_completion_is_that_of_openai_s_route(http: httpx.Client) -> None:
    right = http.post("/v1/completions", json={"prompt": PROMPT, "repeat_penalty": 1.0, **PLAIN}).json()
    got = http.post("/completion", json={"prompt": PROMPT, "return_tokens": True, **PLAIN}).json()
    assert got["content"] == right["choices"][0]["text"]
    assert (got["stop"], got["stop_type"], got["stopping_word"]) == (True, "limit", "")
    assert got["tokens_evaluated"] == right["usage"]["prompt_tokens"]
    assert (got["tokens_predicted"], len(got["tokens"])) == (12, 12)
    assert got["tokens_cached"] == right["usage"]["total_tokens"]
    assert got["timings"]["predicted_n"] == 12


def test_continue_streams_a_completion(http: httpx.Client) -> None:
    """As its provider llama.cpp asks (core/llm/llms/LlamaCpp.ts)."""
    asked = {"prompt": PROMPT, "stream": True, **PLAIN, "stop": ["\0"], "top_k": 40, "min_p": None}
    got = http.post("/completion", json=asked)
    assert got.headers["content-type"].startswith("text/event-stream")
    assert "event:" not in got.text
    *pieces, last = parts(got)
    assert not any(piece["stop"] for piece in pieces)
    assert (last["stop"], last["content"], last["tokens_predicted"]) == (True, "", 12)
    whole = http.post("/completion", json={**asked, "stream": False}).json()
    assert "".join(piece["content"] for piece in pieces) == whole["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_how_a_completion_ended(http: httpx.Client, stream: bool) -> None:
    def last(**more: Any) -> Any:
        return parts(http.post("/completion", json={"prompt": PROMPT, **PLAIN, **more, "stream": stream}))[-1]

    said = http.post("/completion", json={"prompt": PROMPT, **PLAIN}).json()["content"]
    assert last(stop=["\0", said[4:7]])["stopping_word"] == said[4:7]
    assert last(stop=said[4:7], return_tokens=True)["stop_type"] == "word"
    assert last(grammar='root ::= "yes"')["stop_type"] == "eos"
    assert last()["stop_type"] == "limit"
    assert last(n_predict=None, max_tokens=5)["tokens_predicted"] == 5


def test_llama_vim_fills_in(editor: httpx.Client, fim: Serving) -> None:
    assert editor.post("/infill", json=WARM).raise_for_status().json() == {}
    got = editor.post("/infill", json=VIM).raise_for_status().json()
    assert got.keys() == set(VIM["response_fields"])
    assert got["timings/predicted_n"] <= 16
    more = {**VIM, "prompt": "    for row in rows", "response_fields": ["timings/cache_n"]}
    known = len(editor.post("/tokenize", json={"content": VIM["input_prefix"]}).json()["tokens"])
    assert editor.post("/infill", json=more).json()["timings/cache_n"] > known


def test_an_infill_prompt_is_llama_server_s(editor: httpx.Client) -> None:
    def ids(text: str) -> list[int]:
        found: list[int] = editor.post("/tokenize", json={"content": text}).json()["tokens"]
        return found

    asked = {"input_prefix": "a = 1\n", "input_suffix": "c = 3\n", "prompt": "b", "n_predict": 1}
    extra = [{"text": "x = 0\n", "filename": "x.py"}]
    prompt = [
        FIM["rep"],
        *ids("myproject\n"),
        FIM["sep"],
        *ids("x.py\nx = 0\n"),
        FIM["sep"],
        *ids("filename\n"),
    ]
    prompt += [FIM["pre"], *ids("a = 1\nb"), FIM["suf"], *ids("c = 3\n"), FIM["mid"]]
    got = editor.post("/infill", json={**asked, "input_extra": extra, **PLAIN}).json()
    right = editor.post("/completion", json={"prompt": prompt, **PLAIN}).json()
    assert (got["tokens_evaluated"], got["content"]) == (len(prompt), right["content"])


def test_infill_needs_a_model_for_it(http: httpx.Client) -> None:
    refused = http.post("/infill", json=VIM)
    assert refused.status_code == 501
    assert "infill" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"samplers": ["xyzzy"]},
        {"n_probs": 3},
        {"n": 2},
        {"cache_prompt": False},
        {"temperatur": 1},
        {"input_prefix": None},
        {"input_extra": [{"filename": "x"}]},
        {"prompt": [1]},
    ],
)
def test_infill_refuses_impossible_requests(editor: httpx.Client, wrong: dict[str, Any]) -> None:
    got = editor.post("/infill", json={**VIM, **wrong})
    assert got.status_code == 400
    assert next(iter(wrong)) in got.json()["error"]["message"]


def test_samplers_that_are_not_named_are_off(http: httpx.Client) -> None:
    asked = {"prompt": PROMPT, "n_predict": 24, "seed": 3}
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
    given = {**asked, "min_p": 0.9, "temperature": 0.1}
    texts = [
        http.post("/completion", json=each).json()["content"]
        for each in ({**given, "samplers": []}, {**asked, **off}, given)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_fields_of_llama_server_s_own_routes() -> None:
    """Each option of `/completion` that its README lists, and what llama.vim sends, has its entry."""
    own = {"samplers", "n_indent", "t_max_predict_ms", "response_fields"}
    for route in (Route.COMPLETION, Route.INFILL):
        assert all(effect(route, name) is Effect.OBEYED for name in own)
        assert not [name for name in (*PLAIN, "prompt", "stop") if effect(route, name) is Effect.UNKNOWN]
    assert not [name for name in VIM if effect(Route.INFILL, name) is Effect.UNKNOWN]
    refused = [name for name in FIELDS if effect(Route.INFILL, name) is Effect.REFUSED]
    assert "logprobs" in refused


@pytest.mark.parametrize(
    ("text", "indent", "end"),
    [
        ("    a\n    b\n    c", 4, None),
        ("    a\n    b\n  c", 4, len("    a\n    b\n  ")),
        ("a\n", 4, None),
        ("a\n  ", 4, None),
        ("a\n\n", 4, 2),
        ("a\nb", 0, None),
    ],
)
def test_an_answer_ends_before_a_line_of_less_indentation(text: str, indent: int, end: int | None) -> None:
    assert indented_end(text, indent) == end


# -- the small routes ----------------------------------------------------------------------------------


def test_tokens_and_texts(editor: httpx.Client) -> None:
    def ask(path: str, **asked: Any) -> Any:
        return editor.post(path, json=asked).raise_for_status().json()

    tokens = ask("/tokenize", content="Hé <|im_end|>")["tokens"]
    assert ask("/detokenize", tokens=tokens) == {"content": "Hé <|im_end|>"}
    assert len(ask("/tokenize", content="<|im_end|>", parse_special=False)["tokens"]) > 1
    pieces = ask("/tokenize", content="Hi 🜁", with_pieces=True)["tokens"]
    spelt = b"".join(
        each["piece"].encode() if isinstance(each["piece"], str) else bytes(each["piece"]) for each in pieces
    )
    assert spelt.decode() == "Hi 🜁"
    assert any(isinstance(each["piece"], list) for each in pieces)
    assert ask("/tokenize", content=["Hi", 5, "!"])["tokens"][2:3] == [5]
    assert ask("/tokenize") == {"tokens": []}
    assert editor.post("/detokenize", json={"tokens": [10**9]}).status_code == 400
    for path, unknown in (("/tokenize", "add_specials"), ("/tokenize", "prompt"), ("/detokenize", "token")):
        refused = editor.post(path, json={unknown: True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, unknown)


def test_a_template_is_applied(http: httpx.Client) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    prompt = http.post("/apply-template", json={"messages": messages}).raise_for_status().json()["prompt"]
    assert "<|im_start|>user\nHi<|im_end|>" in prompt
    options = {"temperature": 0.0, "repeat_penalty": 1.0, "max_tokens": 8}
    chat = http.post("/v1/chat/completions", json={"messages": messages, **options}).json()
    completion = http.post("/v1/completions", json={"prompt": prompt, **options}).json()
    assert completion["choices"][0]["text"] == chat["choices"][0]["message"]["content"]
    del chat["usage"]["completion_tokens_details"]
    assert completion["usage"] == chat["usage"] | {
        "prompt_tokens_details": {"cached_tokens": chat["usage"]["prompt_tokens"]}
    }
    assert http.post("/apply-template", json={"messages": messages, "xyzzy": 1}).status_code == 400
    for nothing in ({"messages": 5}, {"messages": []}, {}):
        assert http.post("/apply-template", json=nothing).status_code == 400


def test_properties(http: httpx.Client, server: Serving) -> None:
    told = http.get("/props").json()
    assert told["total_slots"] == 3
    assert told["default_generation_settings"]["n_ctx"] == server.llm.n_ctx()
    assert told["default_generation_settings"]["params"]["top_k"] == 40
    assert "<|im_start|>" in told["chat_template"]
    assert told["model_path"].endswith(".gguf")
    assert "/" not in told["model_path"]
    assert told["modalities"] == {"vision": False, "audio": False}


def test_slots(http: httpx.Client, server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    told = http.get("/slots").json()
    assert [slot["id"] for slot in told] == [0, 1, 2]
    assert {slot["state"] for slot in told} == {"idle"}
    assert {slot["n_ctx"] for slot in told} == {server.llm.n_ctx()}
    held = Held(monkeypatch, after=2)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(http.post, "/completion", json={"prompt": "Slots and more", "n_predict": 8})
        wait_until(lambda: held.batches > 2)
        told = http.get("/slots").json()
        held.go_on()
        answer = asked.result().json()
    (busy,) = [slot for slot in told if slot["is_processing"]]
    assert busy["state"] == "processing"
    assert busy["n_prompt_tokens"] == answer["tokens_evaluated"]
    assert busy["n_prompt_tokens_cache"] + busy["n_prompt_tokens_processed"] <= busy["n_prompt_tokens"]
    (following,) = busy["next_token"]
    assert following["has_next_token"]
    assert 0 <= following["n_decoded"] <= 8
    assert following["n_decoded"] + following["n_remain"] >= 8
    assert "more" not in json.dumps(told), "no text of clients"
    server.await_settled()
    told = http.get("/slots?fail_on_no_slot=1").json()
    assert told[busy["id"]]["n_past"] >= busy["n_prompt_tokens"], "another may be of a salted request"
    assert "more" not in json.dumps(told)


def test_slots_show_text_where_the_operator_says_so_as_to_llama_server(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    http.post("/completion", json={"prompt": "a text to be seen", "n_predict": 4})
    monkeypatch.setenv("LLAMA_SERVER_SLOTS_DEBUG", "1")
    assert any("a text to be seen" in slot.get("prompt", "") for slot in http.get("/slots").json())
    monkeypatch.setenv("LLAMA_SERVER_SLOTS_DEBUG", "0")
    assert not any("prompt" in slot for slot in http.get("/slots").json())


def test_slots_tell_a_tenant_nothing_of_others(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_SERVER_SLOTS_DEBUG", "1")
    options: dict[str, Any] = {"api_keys": ["mine", "yours"], "salt_by_key": True}
    with serving(tiny_model("qwen35"), model={"n_parallel": 1}, **options) as server, server.client() as http:
        mine, yours = ({"Authorization": f"Bearer {key}"} for key in ("mine", "yours"))
        http.post("/completion", json={"prompt": "a secret text", "n_predict": 2}, headers=mine)
        (own,), (other,) = (http.get("/slots", headers=key).json() for key in (mine, yours))
    assert "a secret text" in own["prompt"]
    assert other.keys() == {"id", "n_ctx", "speculative", "is_processing", "state"}
