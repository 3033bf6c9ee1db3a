"""Fields of published requests are obeyed, refused by name, or without effect on the answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from llamahybrid.server.anthropic.request import CountTokensRequest, MessagesRequest
from llamahybrid.server.bodies import BUDGETS, RequestBody
from llamahybrid.server.request_fields import FIELDS, NEUTRAL, Effect, Route, effect
from llamahybrid.server.responses.request import ResponseRequest
from tests.lab.gguf_edits import with_template
from tests.lab.serving import parts, serving

from .conftest import TinyModel

HELLO: list[Any] = [{"role": "user", "content": "BANANA BANANA BANANA"}]
BASE: dict[Route, dict[str, Any]] = {
    Route.COMPLETIONS: {"prompt": "BANANA BANANA BANANA", "max_tokens": 24, "seed": 7},
    Route.CHAT: {"messages": HELLO, "max_tokens": 24, "seed": 7},
    Route.EMBEDDINGS: {"input": "BANANA"},
    Route.MESSAGES: {"model": "any", "messages": HELLO, "max_tokens": 8, "temperature": 0},
    Route.COUNT_TOKENS: {"model": "any", "messages": HELLO},
    Route.COMPLETION: {"prompt": "BANANA", "n_predict": 8, "temperature": 0},
}
TEXT_ROUTES = [Route.COMPLETIONS, Route.CHAT]
ROUTES = [*TEXT_ROUTES, Route.EMBEDDINGS, Route.MESSAGES, Route.COUNT_TOKENS, Route.COMPLETION]
TOOL: Any = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
PRINTABLE = list(range(32, 127))

OBEYED: dict[str, dict[str, Any]] = {
    "prompt": {"prompt": "another"},
    "messages": {"messages": [{"role": "user", "content": "another"}]},
    "input": {"input": "another"},
    "encoding_format": {"encoding_format": "base64"},
    "echo": {"echo": True},
    "suffix": {"suffix": "the end"},
    "best_of": {"best_of": 3},
    "tools": {"tools": [TOOL], "tool_choice": "required"},
    "tool_choice": {"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": [TOOL]},
    "functions": {"functions": [TOOL["function"]], "function_call": {"name": "f"}},
    "function_call": {"function_call": {"name": "f"}, "functions": [TOOL["function"]]},
    "top_logprobs": {"top_logprobs": 3, "logprobs": True},
    "max_completion_tokens": {"max_completion_tokens": 3, "max_tokens": None},
    "n_predict": {"n_predict": 3, "max_tokens": None},
    "max_tokens": {"max_tokens": 3},
    "min_tokens": {"min_tokens": 8, "logit_bias": {"258": 100}},
    "frequency_penalty": {"frequency_penalty": 1.9, "temperature": 0},
    "presence_penalty": {"presence_penalty": 1.9, "temperature": 0},
    "repeat_penalty": {"repeat_penalty": 1.9, "temperature": 0},
    "repetition_penalty": {"repetition_penalty": 1.9, "temperature": 0},
    "repeat_last_n": {"repeat_last_n": 1, "frequency_penalty": 2.0, "max_tokens": 60, "temperature": 0},
    "logit_bias": {"logit_bias": {"66": 100}},
    "logit_bias_type": {"logit_bias_type": "tokens", "logit_bias": {"66": 100}},
    "logprobs": {"logprobs": 2},
    "n_probs": {"n_probs": 2},
    "n": {"n": 2},
    "n_cmpl": {"n_cmpl": 2},
    "seed": {"seed": 8},
    "stop": {"stop": [chr(each) for each in PRINTABLE]},
    "stop_token_ids": {"stop_token_ids": PRINTABLE},
    "stream": {"stream": True},
    "stream_options": {"stream_options": {"include_usage": True}},
    "temperature": {"temperature": 0},
    "top_p": {"top_p": 0.01},
    "top_k": {"top_k": 1},
    "min_p": {"min_p": 1.0},
    "typical_p": {"typical_p": 0.01},
    "top_n_sigma": {"top_n_sigma": 0.01},
    "dynatemp_range": {"dynatemp_range": 4.0, "temperature": 5.0},
    "dynatemp_exponent": {"dynatemp_exponent": 9.0, "dynatemp_range": 4.0, "temperature": 5.0},
    "mirostat": {"mirostat": 2},
    "mirostat_mode": {"mirostat_mode": 1},
    "mirostat_tau": {"mirostat_tau": 0.1, "mirostat_mode": 2},
    "mirostat_eta": {"mirostat_eta": 1.0, "mirostat_mode": 2, "max_tokens": 60},
    "dry_multiplier": {"dry_multiplier": 5.0},
    "dry_base": {"dry_base": 4.0},
    "dry_allowed_length": {"dry_allowed_length": 1},
    "dry_penalty_last_n": {"dry_penalty_last_n": 0},
    "dry_sequence_breakers": {"dry_sequence_breakers": ["A", "N", "B"]},
    "xtc_probability": {"xtc_probability": 1.0, "xtc_threshold": 0.001},
    "xtc_threshold": {"xtc_threshold": 0.001, "xtc_probability": 1.0},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {"258": 100}},
    "allowed_token_ids": {"allowed_token_ids": [65, 66]},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 3},
    "add_special_tokens": {"add_special_tokens": "no boolean"},
    "return_tokens": {"return_tokens": True},
    "grammar": {"grammar": 'root ::= "yes"'},
    "response_format": {"response_format": {"type": "json_object", "schema": {"const": "yes"}}},
    "json_schema": {"json_schema": {"const": "yes"}},
    "guided_json": {"guided_json": {"const": "yes"}},
    "guided_regex": {"guided_regex": "yes|no"},
    "guided_choice": {"guided_choice": ["yes", "no"]},
    "guided_grammar": {"guided_grammar": 'root ::= "yes"'},
    "structured_outputs": {"structured_outputs": {"regex": "[yn]{5}"}},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    "enable_thinking": {"enable_thinking": False},
    "reasoning_effort": {"reasoning_effort": "none"},
    "documents": {"documents": [{"text": "a"}]},
    **{name: {name: -2} for name in BUDGETS},
    "reasoning_budget_message": {"reasoning_budget_message": 5},
    "continue_final_message": {"continue_final_message": True},
    "add_generation_prompt": {"add_generation_prompt": False},
    "return_progress": {"return_progress": True},
    "prompt_cache_key": {"prompt_cache_key": 1},
    "reasoning_format": {"reasoning_format": "deepseek"},
    "parse_tool_calls": {"parse_tool_calls": "no boolean"},
    "cache_prompt": {"cache_prompt": False},
    "id_slot": {"id_slot": 1},
    "cache_salt": {"cache_salt": 1},
}
"""A request with each obeyed field, that changes the answer or is refused by the field's name."""

BESIDE = {
    "min_tokens": ("logit_bias",),
    "ignore_eos": ("logit_bias",),
    "repeat_last_n": ("frequency_penalty", "max_tokens", "temperature"),
    "dynatemp_range": ("temperature",),
    "dynatemp_exponent": ("dynatemp_range", "temperature"),
    "mirostat_tau": ("mirostat_mode",),
    "mirostat_eta": ("mirostat_mode", "max_tokens"),
    "frequency_penalty": ("temperature",),
    "presence_penalty": ("temperature",),
    "repeat_penalty": ("temperature",),
    "repetition_penalty": ("temperature",),
    "xtc_threshold": ("xtc_probability",),
}
"""Fields of those requests that the answer without the field has, too."""

LOOPING: dict[str, Any] = {
    "temperature": 0,
    "max_tokens": 60,
    "repeat_penalty": 1.0,
    "allowed_token_ids": [65, 66, 78],
}
DRY = {**LOOPING, "dry_multiplier": 5.0}
"""An answer that repeats itself, and that with a DRY sampler."""


@pytest.fixture(scope="module")
def http(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    model = with_template(tiny_model("qwen35"), tmp_path_factory.mktemp("fields") / "switch.gguf")
    with serving(model, model={"embedding": True}) as server, server.client() as client:
        yield client


def asked(http: httpx.Client, route: Route, **more: Any) -> httpx.Response:
    body = {**BASE[route], **more}
    return http.post(route.value, json={name: value for name, value in body.items() if value is not None})


def said(got: httpx.Response) -> Any:
    """Return the choices of an answer, or the text of a stream."""
    streamed = "event-stream" in got.headers["content-type"]
    names = ("choices", "data", "content", "input_tokens")
    return got.text if streamed else [got.json().get(name) for name in names]


@pytest.fixture(scope="module")
def plain(http: httpx.Client) -> Callable[..., Any]:
    """`plain(route, ...)`: what is said to the request without the field in question; asked once."""
    answers: dict[str, Any] = {}

    def answer(route: Route, **beside: Any) -> Any:
        key = json.dumps([route.value, beside])
        if key not in answers:
            answers[key] = said(asked(http, route, **beside).raise_for_status())
        return answers[key]

    return answer


ELSEWHERE = ("encoding_format", "model")
"""Fields of test_routes.py and test_models_come_and_go.py."""


def obeyed() -> list[Any]:
    every = [(route, name) for route in (*TEXT_ROUTES, Route.EMBEDDINGS) for name in FIELDS]
    names = [each for each in every if effect(*each) is Effect.OBEYED and each[1] not in ELSEWHERE]
    return [pytest.param(route, name, id=f"{route.name.lower()}-{name}") for route, name in names]


@pytest.mark.parametrize(("route", "name"), obeyed())
def test_an_obeyed_field_has_an_effect_or_is_refused(
    http: httpx.Client, plain: Callable[..., Any], route: Route, name: str
) -> None:
    own = OBEYED[name]
    beside = {other: own[other] for other in BESIDE.get(name, ())}
    if name.startswith("dry_"):
        beside = LOOPING if name == "dry_multiplier" else DRY
    got = asked(http, route, **{**beside, **own})
    if got.status_code == 200:
        assert said(got) != plain(route, **beside)
    else:
        assert got.status_code in (400, 404)
        assert name in got.text


@pytest.mark.parametrize("route", ROUTES)
def test_a_refused_field_is_named(http: httpx.Client, route: Route) -> None:
    names = [name for name in FIELDS if effect(route, name) is Effect.REFUSED]
    assert names
    for name in names:
        got = asked(http, route, **{name: 3})
        error = got.json()["error"]
        assert (got.status_code, error["type"]) == (400, "invalid_request_error")
        assert name in error["message"]
        assert error.get("param", name) == name


@pytest.mark.parametrize("route", TEXT_ROUTES)
def test_supported_values_of_refused_fields_are_accepted(http: httpx.Client, route: Route) -> None:
    refused = [name for name in FIELDS if effect(route, name) is Effect.REFUSED]
    neutral = {name: value for name in refused for value in NEUTRAL[route, name]}
    assert said(asked(http, route, **neutral)) == said(asked(http, route))


@pytest.mark.parametrize("route", ROUTES)
def test_fields_without_effect_and_nulls_change_nothing(http: httpx.Client, route: Route) -> None:
    idle = {name: "x" for name in FIELDS if effect(route, name) is Effect.NONE}
    nulls = {name: None for name in FIELDS if name not in (*idle, *BASE[route])} | {"no_such_field": None}
    got = http.post(route.value, json={**BASE[route], **nulls, **idle})
    assert got.status_code == 200, got.text
    assert said(got) == said(asked(http, route))


@pytest.mark.parametrize(
    ("route", "name", "meant"),
    [
        (Route.COMPLETIONS, "max_token", "max_tokens"),
        (Route.CHAT, "repetition_penality", "repetition_penalty"),
        (Route.CHAT, "enable_thinkin", "enable_thinking"),
        (Route.COMPLETIONS, "xyzzy", None),
    ],
)
def test_an_unknown_field_gets_a_hint(http: httpx.Client, route: Route, name: str, meant: str | None) -> None:
    for more in ({}, {"stream": True}):
        got = asked(http, route, **{name: 1}, **more)
        assert got.status_code == 400
        error = got.json()["error"]
        assert error["param"] == name
        assert ("did you mean" in error["message"]) is (meant is not None)
        assert meant is None or f"'{meant}'" in error["message"]


def test_unknown_fields_may_be_ignored(tiny_model: TinyModel) -> None:
    with serving(tiny_model("qwen35"), ignore_unknown_fields=True) as server, server.client() as http:
        for route in TEXT_ROUTES:
            assert said(asked(http, route, xyzzy=1)) == said(asked(http, route))
            assert asked(http, route, use_beam_search=True).status_code == 400
        unread = {"chat_template_kwargs": {"enable_thinking": False}}
        assert said(asked(http, Route.CHAT, **unread)) == said(asked(http, Route.CHAT))


@pytest.mark.parametrize(
    ("route", "kind"),
    [
        (Route.COMPLETIONS, completion_create_params.CompletionCreateParamsBase),
        (Route.CHAT, chat_create_params.CompletionCreateParamsBase),
        (Route.EMBEDDINGS, embedding_create_params.EmbeddingCreateParams),
        (Route.RESPONSES, response_create_params.ResponseCreateParamsBase),
        (Route.MESSAGES, message_create_params.MessageCreateParamsBase),
        (Route.MESSAGES, beta_params.MessageCreateParamsBase),
        (Route.COUNT_TOKENS, message_count_tokens_params.MessageCountTokensParams),
    ],
)
def test_every_field_that_the_vendors_clients_send_has_its_entry(route: Route, kind: Any) -> None:
    missing = [name for name in kind.__annotations__ if effect(route, name) is Effect.UNKNOWN]
    assert missing == []


@pytest.mark.parametrize("body", [MessagesRequest, CountTokensRequest])
def test_all_obeyed_fields_of_messages_are_in_the_description(body: type[RequestBody]) -> None:
    obeyed = {name for name in FIELDS if effect(body.route, name) is Effect.OBEYED}
    assert body.model_json_schema()["properties"].keys() == obeyed


@pytest.mark.parametrize("body", [ResponseRequest, MessagesRequest, CountTokensRequest])
def test_fields_of_another_api_are_its_own_or_those_of_chats(body: type[RequestBody]) -> None:
    obeyed = {name for name in FIELDS if effect(body.route, name) is Effect.OBEYED}
    own = body.model_fields.keys()
    assert own <= obeyed
    assert {effect(Route.CHAT, name) for name in (obeyed - own) | body.shared} == {Effect.OBEYED}


# -- what obeyed fields do -----------------------------------------------------------------------------


@pytest.mark.parametrize("route", TEXT_ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_token_ends_an_answer_and_is_no_part_of_it(
    http: httpx.Client, route: Route, stream: bool
) -> None:
    whole = asked(http, route, return_tokens=True, temperature=0).json()
    tokens = whole["choices"][0]["tokens"]
    assert len(tokens) == whole["usage"]["completion_tokens"] == 24
    stop = tokens[10]
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    got = asked(http, route, return_tokens=True, temperature=0, stop_token_ids=[stop], **more)
    chunks = parts(got)
    ids = [token for chunk in chunks for choice in chunk["choices"] for token in choice["tokens"]]
    assert ids == tokens[: tokens.index(stop)]
    assert chunks[-1]["usage"]["completion_tokens"] == len(ids)
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert reasons[-1] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_each_of_several_answers_has_its_own_tokens(http: httpx.Client, stream: bool) -> None:
    got = asked(http, Route.COMPLETIONS, n=3, return_tokens=True, stream=stream)
    chunks = parts(got)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in range(3):
        own = [choice for choice in choices if choice["index"] == index]
        ids = [token for choice in own for token in choice["tokens"]]
        spelt = http.post("/extras/detokenize", json={"tokens": ids}).json()["text"]
        assert spelt == "".join(choice["text"] for choice in own)


@pytest.mark.parametrize(
    ("form", "answers"),
    [
        ({"guided_choice": ['a "quoted" one\n', "é"]}, {'a "quoted" one\n', "é"}),
        (
            {"guided_regex": r"^[ab]{2}\d?$"},
            {a + b + d for a in "ab" for b in "ab" for d in ["", *"0123456789"]},
        ),
        (
            {"guided_regex": r"[\d.]\.(?i:y)"},
            {f"{first}.{last}" for first in "0123456789." for last in "yY"},
        ),
        ({"structured_outputs": {"choice": ["x"]}}, {"x"}),
        ({"structured_outputs": {"json": {"const": 5}}}, {"5"}),
        ({"structured_outputs": {"grammar": 'root ::= "z"'}}, {"z"}),
        ({"guided_json": '{"const": 7}'}, {"7"}),
    ],
)
@pytest.mark.parametrize("route", TEXT_ROUTES)
def test_an_answer_has_the_form_that_was_asked_for(
    http: httpx.Client, route: Route, form: dict[str, Any], answers: set[str]
) -> None:
    (choice,) = asked(http, route, **form).raise_for_status().json()["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert text in answers or text.strip() in answers
    assert choice["finish_reason"] == "stop"


CONTRADICTIONS: list[dict[str, Any]] = [
    {"guided_json": {}, "guided_regex": "a"},
    {"structured_outputs": {"json": {}, "regex": "a"}},
    {"structured_outputs": {"structural_tag": "x"}},
    {"guided_regex": "(?=a)b"},
    {"guided_regex": "(a{900}){900}"},
    {"guided_regex": "["},
    {"guided_choice": []},
    {"json_schema": "no JSON"},
    {"json_schema": {}, "response_format": {"type": "json_object"}},
    {"guided_choice": ["a"], "grammar": 'root ::= "b"'},
    {"n_predict": 3},
    {"n_probs": -1},
    {"stop_token_ids": [-1]},
    {"allowed_token_ids": [10**6]},
    {"truncate_prompt_tokens": 0},
    {"dynatemp_range": 1.0, "temperature": 0},
    {"mirostat": 2, "xtc_probability": 0.5},
    {"stream": True, "stream_options": {"continuous_usage_stats": True}},
]


@pytest.mark.parametrize("route", TEXT_ROUTES)
def test_fields_that_contradict_or_mean_nothing_are_refused(http: httpx.Client, route: Route) -> None:
    for form in CONTRADICTIONS:
        assert asked(http, route, **form).status_code == 400, form


def test_only_the_end_of_a_prompt_is_used(http: httpx.Client) -> None:
    for route in TEXT_ROUTES:
        got = asked(http, route, truncate_prompt_tokens=5).json()
        assert got["usage"]["prompt_tokens"] == 5
    ids = asked(http, Route.COMPLETIONS, prompt="a BANANA", truncate_prompt_tokens=4, echo=True).json()
    assert ids["choices"][0]["text"].startswith("NANA")


def test_template_variables(http: httpx.Client) -> None:
    def prompt_tokens(**more: Any) -> int:
        counted: int = asked(http, Route.CHAT, **more).raise_for_status().json()["usage"]["prompt_tokens"]
        return counted

    plain = prompt_tokens()
    off = prompt_tokens(chat_template_kwargs={"enable_thinking": False})
    assert off > plain == prompt_tokens(enable_thinking=True)
    assert off == prompt_tokens(enable_thinking=False) == prompt_tokens(reasoning_effort="none")
    assert off == prompt_tokens(chat_template_kwargs={"enable_thinking": False}, n=2)
    for wrong in ({"no_such": 1}, {"messages": []}, {"bos_token": "x"}, {"temperature": 0}):
        got = asked(http, Route.CHAT, chat_template_kwargs=wrong)
        assert got.status_code == 400
        assert repr(next(iter(wrong))) in got.json()["error"]["message"]


@pytest.mark.parametrize("arch", ["gemma3", pytest.param("mamba", marks=pytest.mark.full)])
def test_samplers_are_those_of_each_request(tiny_model: TinyModel, arch: str) -> None:
    """Slots and reuse go on as before: what one request asks of its sampler is no other's."""
    path: Path = tiny_model(arch)
    ways = [
        {},
        {"dry_multiplier": 5.0, "dry_allowed_length": 1},
        {"xtc_probability": 1.0, "xtc_threshold": 0.001},
    ]
    with serving(path) as server, server.client() as http:
        first = [said(asked(http, Route.COMPLETIONS, **way)) for way in ways]
        again = [said(asked(http, Route.COMPLETIONS, **way)) for way in reversed(ways)]
        cached = asked(http, Route.COMPLETIONS, **ways[1]).json()["usage"]
    assert [text[0][0]["text"] for text in first] == [text[0][0]["text"] for text in reversed(again)]
    assert len({text[0][0]["text"] for text in first}) == 3
    assert cached["prompt_tokens_details"]["cached_tokens"] > 0
