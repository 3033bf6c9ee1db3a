"""The API of upstream's example server, asked by OpenAI's client; answers are scripted where it counts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from llamahybrid import Llama
from llamahybrid.capi.calls import NativeContext
from llamahybrid.errors import DecodeError
from llamahybrid.server.upstream_api.api import SpeakingLlama
from llamahybrid.server.upstream_api.source import bodies
from tests.lab.serving import Serving, serving
from tests.lab.sessions import watched
from tests.server.upstream_api.conftest import CALL, CHAT, SCHEMA, SETTINGS

TinyModel = Callable[..., Path]
Says = Callable[..., None]

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}


@pytest.fixture
def fresh(tiny_model: TinyModel) -> Iterator[Callable[..., list[int]]]:
    """`fresh(prompt, n)`: what a context that knows nothing says."""
    options: dict[str, Any] = {"n_ctx": 8192, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    llm = Llama(str(tiny_model("qwen35")), prompt_cache=False, **options)

    def says(prompt: tuple[int, ...], n: int) -> list[int]:
        return list(islice(llm.generate(list(prompt), temp=0.0, repeat_penalty=1.0), n))

    yield says
    llm.close()


# -- answers ---------------------------------------------------------------------------------------------


def test_answers_are_those_of_a_fresh_context(
    server: Serving, client: openai.OpenAI, fresh: Callable[..., list[int]]
) -> None:
    with watched(server) as records:
        for question in ("Why?", "Why not?", "Why?"):
            messages = [
                *CHAT,
                {"role": "assistant", "content": "Fine."},
                {"role": "user", "content": question},
            ]
            got = client.chat.completions.create(model="any", messages=messages, **GREEDY)
            server.await_settled()  # its state is stored, and its slot free
        response = client.responses.create(
            model="any",
            input=messages[1:],
            instructions="You are brief.",
            temperature=0.0,
            max_output_tokens=12,
        )
    for record in records:
        assert list(record.generated) == fresh(record.prompt, len(record.generated))
    assert records[3].prompt == records[2].prompt == records[0].prompt
    assert records[2].decoded == records[3].decoded == 11
    assert got.usage
    assert got.usage.prompt_tokens_details
    assert got.usage.prompt_tokens_details.cached_tokens == got.usage.prompt_tokens == len(records[2].prompt)
    assert response.usage
    assert response.usage.input_tokens_details.cached_tokens == response.usage.input_tokens
    said = server.llm.detokenize(list(records[2].generated), special=True).decode()
    assert (got.choices[0].message.model_extra or {})["reasoning_content"] == said


def test_control_tokens_are_spelt(client: openai.OpenAI, says: Says) -> None:
    """gpt-oss says with them where thinking ends."""
    says("Hm.\n</think>\n\none<|im_start|>two")
    got = client.chat.completions.create(model="any", messages=CHAT)
    assert got.choices[0].message.content == "one<|im_start|>two"


@pytest.mark.parametrize("stream", [False, True])
def test_a_json_schema(client: openai.OpenAI, stream: bool) -> None:
    """All that is said is the answer, though the template begins with <think>."""
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    got = client.chat.completions.create(
        model="any", messages=CHAT, response_format=form, stream=stream, **{**GREEDY, "max_tokens": 80}
    )
    choices = [choice for chunk in got for choice in chunk.choices] if stream else got.choices
    told = [choice.delta if stream else choice.message for choice in choices]
    assert json.loads("".join(each.content or "" for each in told))["a"] in (True, False)
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    response = client.responses.create(model="any", input="Is it?", text=text, max_output_tokens=80)
    assert json.loads(response.output_text)["a"] in (True, False)


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_and_its_tools(server: Serving, says: Says, stream: bool) -> None:
    tool: Any = {"name": "weather", "input_schema": SCHEMA}
    asked: dict[str, Any] = {"model": "any", "max_tokens": 400, "system": "You are brief.", "tools": [tool]}
    messages: list[Any] = [CHAT[1]]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:

        def ask() -> anthropic.types.Message:
            if not stream:
                return claude.messages.create(messages=messages, **asked)
            with claude.messages.stream(messages=messages, **asked) as events:
                return events.get_final_message()

        says(CALL, "\n</think>\n\nIt rains.")
        first = ask()
        thought, text, use = first.content
        assert (thought.type, text.type, use.type) == ("thinking", "text", "tool_use")
        assert (use.name, use.input) == ("weather", {"city": "Paris", "days": 3})  # type: ignore[union-attr]
        assert first.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "rain"}  # type: ignore[union-attr]
        messages += [first.to_param(), {"role": "user", "content": [result]}]
        second = ask()
        assert second.content[-1].text.strip() == "It rains."  # type: ignore[union-attr]
        assert second.stop_reason == "end_turn"
        assert (second.usage.cache_read_input_tokens or 0) > first.usage.input_tokens
        count = claude.messages.count_tokens(
            model="any", messages=messages, system="You are brief.", tools=[tool]
        )
        prompt = httpx.post(f"{server.url}/apply-template", json={"messages": [*CHAT, *CHAT[1:]]}).json()[
            "prompt"
        ]
        assert prompt.count("What is the weather in Paris?") == 2
        assert count.input_tokens == second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0)


def test_several_answers_and_their_logprobs(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "any", "messages": CHAT, "n": 2, "seed": 5, "max_tokens": 6}
    got = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    assert [len(choice.logprobs.content) for choice in got.choices if choice.logprobs] == [6, 6]
    streamed = list(client.chat.completions.create(**options, stream=True))
    assert {chunk.choices[0].index for chunk in streamed} == {0, 1}
    for index, choice in enumerate(got.choices):
        parts = [c for chunk in streamed for c in chunk.choices if c.index == index]
        thought = "".join((c.delta.model_extra or {}).get("reasoning_content", "") for c in parts)
        said = thought + "".join(c.delta.content or "" for c in parts)
        whole = (choice.message.model_extra or {}).get("reasoning_content") or ""
        whole += (choice.message.content or "").removeprefix("<think>\n")
        # Upstream's stream keeps back a last "<", which might begin a call.
        assert whole.removesuffix("<") == said.removesuffix("<")


def test_the_token_that_ends_an_answer_is_spelt_where_it_is_no_stop(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """gpt-oss ends a call with <|call|>, which its schema looks for."""
    schema = {
        "type": "object",
        "properties": {"content": {"type": "string", "x-regex": r"<think>\n(.*)<\|endoftext\|>$"}},
    }
    config = tmp_path / "c.json"
    config.write_text(json.dumps({"model": {"response_schema": schema}}))
    settings = {**SETTINGS, "api_config": str(config)}
    with serving(tiny_model("qwen35"), model=settings, api="upstream") as server:
        llm = server.llm
        tokens = llm.tokenize(b"yes<|endoftext|>", add_bos=False, special=True)
        for stream in (False, True):
            script = iter(tokens)
            llm.sample = lambda *args, script=script, **kwargs: next(script)  # type: ignore[method-assign]
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
                got = client.chat.completions.create(model="any", messages=CHAT, stream=stream)
                if stream:
                    said = "".join(c.choices[0].delta.content or "" for c in got)
                else:
                    said = got.choices[0].message.content or ""
            assert said == "yes"


# -- how answers end -------------------------------------------------------------------------------------

ENDLESS: dict[str, Any] = {"input": "Tell me a story", "max_output_tokens": 6000, "stream": True}


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Of a stream, as they come."""
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


@pytest.fixture
def endless(server: Serving, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The model says the same letter for ever; all that it has said."""
    said: list[int] = []

    def sample(*args: Any, **kwargs: Any) -> int:
        said.append(97)
        return 97

    monkeypatch.setattr(server.llm, "sample", sample, raising=False)
    return said


def test_a_response_that_fails_says_so(
    server: Serving, http: httpx.Client, says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    says("Hm, yes")
    sample, left = server.llm.sample, [4]

    def failing(*args: Any, **kwargs: Any) -> int:
        left[0] -= 1
        if not left[0]:
            raise OSError("gone")
        return sample(*args, **kwargs)

    monkeypatch.setattr(server.llm, "sample", failing, raising=False)
    with http.stream("POST", "/v1/responses", json={"input": "Hello", "stream": True}) as response:
        assert response.status_code == 200
        told = list(events(response))
    *_, failed, error = told
    assert failed["type"] == "response.failed"
    assert failed["sequence_number"] == len(told) - 1
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["message"] == error["error"]["message"]
    assert "gone" not in json.dumps(told)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
def test_one_that_is_cancelled_ends_as_one_that_is_too_long(
    server: Serving, http: httpx.Client, endless: list[int], path: str
) -> None:
    """OpenAI's types know no other word."""
    asked = {"messages": CHAT, "stream": True} if "chat" in path else ENDLESS
    with http.stream("POST", path, json=asked) as response:
        told = events(response)
        begun = [next(told) for _ in range(8)]
        server.llm.cancel()
        *_, last = [*begun, *told]
    if "chat" in path:
        assert last["choices"][0]["finish_reason"] == "length"
    else:
        assert last["type"] == "response.incomplete"
        assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_its_slot(server: Serving, endless: list[int], stream: bool) -> None:
    server.hang_up("/v1/responses", {**ENDLESS, "stream": stream}, lambda: len(endless) > 3)
    server.await_settled()
    assert not server.service.jobs


def test_events_stay_as_they_were_when_they_were_made(server: Serving, says: Says) -> None:
    """Another thread sends them, while upstream goes on with what is in them."""
    says(CALL)
    _, kind = bodies()
    body = kind.model_validate({"input": "Hello", "stream": True})
    llm = server.llm
    assert isinstance(llm, SpeakingLlama)
    told = [(each, json.dumps(each)) for each in llm.api.respond(body, "any", True)]
    assert len(told) > 20
    assert all(json.dumps(each) == then for each, then in told)


# -- what agents send ------------------------------------------------------------------------------------


def test_messages_of_a_developer_and_several_of_the_system(server: Serving, http: httpx.Client) -> None:
    """Qwen's template knows neither."""
    lead = [{"role": "system", "content": "One."}, {"role": "developer", "content": "Two."}]
    later = {"role": "developer", "content": "Three."}
    with watched(server) as records:
        asked = {"messages": [*lead, CHAT[1], later], **GREEDY}
        assert http.post("/v1/chat/completions", json=asked).status_code == 200
        said = {"input": [lead[1], CHAT[1], later], "instructions": "One.", "temperature": 0}
        assert http.post("/v1/responses", json={**said, "max_output_tokens": 12}).status_code == 200
    text = server.llm.detokenize(list(records[0].prompt), special=True).decode()
    assert text.startswith("<|im_start|>system\nOne.\n\nTwo.<|im_end|>\n<|im_start|>user\nWhat")
    assert "<|im_start|>user\nThree.<|im_end|>" in text
    assert records[1].prompt == records[0].prompt


def test_a_freeform_call_in_the_history(server: Serving, http: httpx.Client) -> None:
    """Qwen's template reads arguments as JSON."""
    call = {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"}
    out = {"type": "custom_tool_call_output", "call_id": "c", "output": "done"}
    empty = {"type": "function_call", "call_id": "d", "name": "now", "arguments": ""}
    asked = {"input": [CHAT[1], call, out, empty], "max_output_tokens": 2}
    with watched(server) as records:
        assert http.post("/v1/responses", json=asked).status_code == 200
    text = server.llm.detokenize(list(records[0].prompt), special=True).decode()
    assert "<function=apply_patch>\n<parameter=input>\n*** Begin\n</parameter>" in text
    assert "<function=now>\n</function>" in text


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "xhigh"])
def test_efforts_that_clients_name(http: httpx.Client, effort: str) -> None:
    asked = {"input": "Hello", "reasoning": {"effort": effort}, "max_output_tokens": 2}
    assert http.post("/v1/responses", json=asked).status_code == 200


@pytest.mark.parametrize(
    ("path", "said", "param"),
    [
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 0}, "max_tokens"),
        ("/v1/chat/completions", {"messages": CHAT, "n": 99}, "n"),
        ("/v1/chat/completions", {"messages": CHAT, "id_slot": 2}, "id_slot"),
        ("/v1/chat/completions", {"messages": CHAT, "logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ("/v1/chat/completions", {"messages": [{"role": "robot"}]}, "messages.0.role"),
        ("/v1/chat/completions", {"messages": CHAT, "logit_bias": {"999999": 1}}, "logit_bias"),
        (
            "/v1/chat/completions",
            {
                "messages": CHAT,
                "response_format": {"type": "json_object", "schema": {"type": "string", "minLength": 10**9}},
            },
            "response_format",
        ),
        (
            "/v1/chat/completions",
            {
                "messages": CHAT,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "abc"}},
                },
            },
            None,
        ),
        ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ("/v1/responses", {"input": "x", "cache_prompt": False}, "cache_prompt"),
        ("/v1/responses", {"input": "x", "store": True}, None),
        ("/v1/responses", {"input": [{"type": "computer_call"}]}, None),
        ("/v1/responses", {"input": "x " * 9000}, "messages"),
        ("/v1/responses", {"input": "x " * 9000, "stream": True}, "messages"),
    ],
)
def test_what_cannot_be_is_refused(http: httpx.Client, path: str, said: Any, param: str | None) -> None:
    answer = http.post(path, json=said)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_keys_and_salts_hold(tiny_model: TinyModel) -> None:
    with serving(tiny_model("qwen35"), model=SETTINGS, api="upstream", api_key="k") as server:
        with server.client() as client:
            assert client.post("/v1/responses", json={"input": "x"}).status_code == 401
        with server.client(headers={"Authorization": "Bearer k"}) as client:
            cached = []
            for salt in ("a", "a", "b"):
                asked = {"input": "A long question " * 9, "max_output_tokens": 2, "cache_salt": salt}
                usage = client.post("/v1/responses", json=asked).json()["usage"]
                cached.append(usage["input_tokens_details"]["cached_tokens"] > 0)
            assert cached == [False, True, False]
            paths = client.get("/openapi.json").json()["paths"]
            assert "UpstreamResponseRequest" in json.dumps(paths["/v1/responses"])


# -- what the original does not survive ------------------------------------------------------------------


def test_four_requests_that_ask_for_more_than_the_context(tiny_model: TinyModel) -> None:
    """Prompts of some 60 tokens and 500 to say, in a context of 1,024: upstream's answers 500 to all."""
    model = {"n_ctx": 1024, "n_parallel": 4}
    with serving(tiny_model("qwen35"), model=model, api="upstream") as server, server.client() as client:

        def ask(i: int) -> httpx.Response:
            messages = [{"role": "user", "content": f"{i} tell me a story"}]
            bias = {str(token): -100 for token in (256, 258)}  # what would end it
            asked = {"messages": messages, "max_tokens": 500, "temperature": 0, "logit_bias": bias}
            return client.post("/v1/chat/completions", json=asked)

        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(ask, range(4)))
        assert [answer.status_code for answer in answers] == [200] * 4
        assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [500] * 4
        for i in (0, 3):
            assert answers[i].json()["choices"][0]["message"] == ask(i).json()["choices"][0]["message"]


def test_chats_that_name_no_bound(tiny_model: TinyModel) -> None:
    """Each may fill the context; upstream's wait for one another, and fail where all would."""
    model = {"n_ctx": 512, "n_parallel": 3}
    with serving(tiny_model("qwen35"), model=model, api="upstream") as server, server.client() as client:

        def ask(i: int) -> httpx.Response:
            bias = {str(token): -100 for token in (256, 258)}
            asked = {"messages": [{"role": "user", "content": f"Story {i}"}], "logit_bias": bias}
            return client.post("/v1/chat/completions", json=asked)

        with ThreadPoolExecutor(3) as pool:
            answers = list(pool.map(ask, range(3)))
        assert [answer.status_code for answer in answers] == [200] * 3
        for answer in answers:
            assert answer.json()["usage"]["total_tokens"] == 512
            assert answer.json()["choices"][0]["finish_reason"] == "length"


def test_a_decode_error_fails_one_request(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """While others stream, whose answers are those they give alone; upstream's server fails all of them."""
    with serving(tiny_model("qwen35"), model=SETTINGS, api="upstream") as server, server.client() as client:

        def ask(i: int, stream: bool = True) -> httpx.Response:
            messages = [{"role": "user", "content": f"Story {i}"}]
            asked = {"messages": messages, "max_tokens": 150, "temperature": 0, "stream": stream}
            return client.post("/v1/responses" if i == 9 else "/v1/chat/completions", json=asked)

        alone = [ask(i).text for i in range(2)]
        decode_parts = NativeContext.decode_parts

        def require_sound(tokens: Any) -> None:
            if b"POISON" in bytes(int(token) for token in tokens if token < 256):
                raise DecodeError(-3, "failed")

        def failing_parts(context: Any, parts: Any) -> Any:
            for _, _, tokens, _ in parts:
                require_sound(tokens)
            return decode_parts(context, parts)

        monkeypatch.setattr(NativeContext, "decode_parts", failing_parts)
        with ThreadPoolExecutor(3) as pool:
            streams = [pool.submit(ask, i) for i in range(2)]
            wrong = pool.submit(client.post, "/v1/responses", json={"input": "POISON " * 30, "stream": True})
            assert wrong.result().status_code == 500
            for stream, before in zip(streams, alone, strict=True):
                assert stream.result().status_code == 200
                assert deltas(stream.result().text) == deltas(before)
        assert ask(0).status_code == 200


def deltas(body: str) -> list[Any]:
    """What a stream said."""
    lines = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    return [choice["delta"] for each in lines for choice in each["choices"]]
