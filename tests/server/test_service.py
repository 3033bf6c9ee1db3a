"""A server under many clients, disconnects and impossible requests."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import llama_cpp
import pytest

from llamahybrid.capi.calls import NativeContext
from llamahybrid.core.report import RequestReport
from llamahybrid.errors import ModelClosed
from llamahybrid.llama import Llama
from llamahybrid.server.settings import ModelSettings
from tests.lab.serving import SMALL, Held, Serving, serving, wait_until

TinyModel = Callable[..., Path]

ENDLESS: dict[str, Any] = {
    "prompt": "Tell me a story",
    "max_tokens": 900,
    "temperature": 0.0,
    "min_tokens": 900,
    "stream": True,
}
LONG = "a word and another " * 40
"""760 tokens."""


def post(server: Serving, asked: dict[str, Any]) -> httpx.Response:
    """A completion."""
    with server.client() as client:
        return client.post("/v1/completions", json=asked)


def all_told_to_end(server: Serving) -> bool:
    """No request runs that was not."""
    return all(job.cancelled for job in list(server.service.jobs))


@pytest.fixture
def told(server: Serving) -> Iterator[list[RequestReport]]:
    """The reports of requests in the order of their ends."""
    reports: list[RequestReport] = []
    server.llm.on_request = reports.append
    yield reports
    server.llm.on_request = None


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_in_the_answer_frees_its_slot(
    server: Serving, told: list[RequestReport], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch, after=20)
    server.hang_up("/v1/completions", {**ENDLESS, "stream": stream}, lambda: held.batches > 20)
    wait_until(lambda: all_told_to_end(server))
    held.go_on()
    server.await_settled()
    (report,) = told
    assert 3 < report.generated < 850
    assert not server.service.jobs


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_in_the_prompt_frees_its_slot_within_a_step(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    with serving(tiny_model("qwen35"), model={"n_batch": 32, "n_ubatch": 32}) as server:
        held = Held(monkeypatch, after=2)
        asked = {"prompt": LONG, "max_tokens": 5, "stream": stream}
        server.hang_up("/v1/completions", asked, lambda: held.batches == 3)
        wait_until(lambda: all_told_to_end(server))
        held.go_on()
        server.await_settled()
        assert held.batches == 3
        with server.client() as client:
            assert client.post("/v1/completions", json=asked).status_code == 200


def test_a_client_that_hangs_up_while_another_s_prompt_is_decoded_frees_its_slot(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request has a place, and waits for its first batch."""
    with serving(tiny_model("qwen35"), model={"n_batch": 32, "n_ubatch": 32}) as server:
        held = Held(monkeypatch, after=1)
        asked = {"prompt": LONG, "max_tokens": 1}
        with server.client() as client, ThreadPoolExecutor(1) as pool:
            first = pool.submit(client.post, "/v1/completions", json=asked)
            wait_until(lambda: held.batches == 2)
            admission, other = server.service.admission, {"prompt": "x " + LONG, "max_tokens": 1}
            server.hang_up("/v1/completions", other, lambda: admission.running == 2)
            wait_until(lambda: admission.running == 1)
            assert not first.done()
            held.go_on()
            assert first.result().status_code == 200


def cancelled(server: Serving) -> float:
    """The number of cancelled requests, as /metrics has it."""
    name = 'llamahybrid:requests_total{end="cancelled"} '
    counts = [line.removeprefix(name) for line in server.metrics().splitlines() if line.startswith(name)]
    return float(counts[0]) if counts else 0.0


def test_disconnected_client_leaves_the_queue_and_is_counted(
    server: Serving, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    admission = server.service.admission
    held = Held(monkeypatch, after=0)
    with ThreadPoolExecutor(3) as pool:
        stop = threading.Event()

        def hold() -> None:
            with http.stream("POST", "/v1/completions", json=ENDLESS) as response:
                next(lines := response.iter_lines())
                stop.wait(120)
                lines.close()  # until then: one that is collected hangs up

        holding = [pool.submit(hold) for _ in range(3)]
        try:
            wait_until(lambda: admission.running == 3)
            before = cancelled(server)
            server.hang_up("/v1/completions", {"prompt": "x"}, lambda: admission.waiting == 1)
            wait_until(lambda: admission.waiting == 0)
            assert admission.running == 3
            wait_until(lambda: cancelled(server) == before + 1)
        finally:
            held.go_on()
            stop.set()
        for each in holding:
            each.result()


class Embeddings:
    """In place of a model's: each goes on until nobody waits for it, or `enough`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = 0
        self.enough = threading.Event()

        def embed(_: Llama, input: list[str]) -> Any:
            self.begun += 1
            while not self.enough.is_set():
                for _text in input:
                    self.enough.wait(0.001)

        monkeypatch.setattr(Llama, "create_embedding", embed)


def test_embeddings_of_a_disconnected_client_are_given_up(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Embeddings(monkeypatch)
    path, asked = "/v1/embeddings", {"input": ["one", "two"]}
    told: list[httpx.Response] = []
    options: dict[str, Any] = {"model": {"embedding": True, "n_parallel": 1}, "shutdown_seconds": 0.0}
    with ExitStack() as stack:
        server = stack.enter_context(serving(tiny_model("bert"), **options))
        client = stack.enter_context(server.client())
        stack.callback(held.enough.set)

        def another_hung_up_in_the_queue() -> bool:
            wait_until(lambda: held.begun == 1)
            server.hang_up(path, asked, lambda: server.service.admission.waiting == 1)
            wait_until(lambda: server.service.admission.waiting == 0)
            return True

        server.hang_up(path, asked, another_hung_up_in_the_queue)
        server.await_settled()
        assert held.begun == 1
        asking = threading.Thread(target=lambda: told.append(client.post(path, json=asked)))
        asking.start()
        wait_until(lambda: held.begun == 2)
        server.stop()
        asking.join()
        assert not held.enough.is_set()
    assert [answer.status_code for answer in told] == [503]


def test_a_slow_reader_holds_no_slot(server: Serving, http: httpx.Client, told: list[RequestReport]) -> None:
    with http.stream("POST", "/v1/completions", json={**ENDLESS, "max_tokens": 300}) as response:
        lines = response.iter_lines()
        next(lines)
        server.await_settled()
        assert told[0].generated == 300
        assert list(lines)[-2] == "data: [DONE]"


def test_requests_beyond_the_queue_get_429_and_others_are_answered(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"prompt": "Tell me a story", "max_tokens": 8, "temperature": 0.0}
    with serving(tiny_model("qwen35"), max_queue=20) as server, server.client() as client:
        alone = client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
        held = Held(monkeypatch, after=0)
        with ThreadPoolExecutor(64) as pool:
            asking = [pool.submit(client.post, "/v1/completions", json=asked) for _ in range(64)]
            try:
                wait_until(lambda: sum(each.done() for each in asking) == 64 - 20 - SMALL["n_parallel"])
            finally:
                held.go_on()
            answers = [each.result() for each in asking]
        kinds = Counter(answer.status_code for answer in answers)
        assert kinds == {200: 20 + SMALL["n_parallel"], 429: 64 - 20 - SMALL["n_parallel"]}
        for answer in answers:
            if answer.status_code == 200:
                assert answer.json()["choices"][0]["text"] == alone
            else:
                assert 1 <= int(answer.headers["retry-after"]) <= 60
                assert answer.json()["error"]["type"] == "rate_limit_error"
        server.await_settled()
        counted = f'llamahybrid:refused_total{{why="queue"}} {kinds[429]}.0'
        assert counted in client.get("/metrics").text


def is_closed(llm: Llama) -> bool:
    """Return True for a closed model."""
    try:
        llm.create_completion("x", max_tokens=1)
    except ModelClosed:
        return True
    return False


def test_slow_reader_gets_everything_after_the_model_closed(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [
        ModelSettings(model=str(tiny_model(arch)), model_alias=arch, **SMALL) for arch in ("qwen35", "mamba")
    ]
    with serving(*both, models_bytes=1) as server, socket.socket() as reader:
        first, asked, ends = server.llm, list[int](), llama_cpp.llama_vocab_is_eog

        def told(*args: Any) -> Any:
            asked.append(1)
            return ends(*args)

        monkeypatch.setattr(llama_cpp, "llama_vocab_is_eog", told)
        server.listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.settimeout(120)
        reader.connect(("127.0.0.1", server.port))
        body = json.dumps({**ENDLESS, "stream_options": {"include_usage": True}}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        reader.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        reader.recv(1)
        server.await_settled()
        assert post(server, {"prompt": "x", "max_tokens": 1, "model": "mamba"}).status_code == 200
        assert is_closed(first)
        asked.clear()
        read = b""
        while not read.endswith(b"\r\n0\r\n\r\n"):
            part = reader.recv(1 << 16)
            assert part, "the stream broke off"
            read += part
        assert b'"completion_tokens": 900' in read
        assert not asked  # its vocabulary was freed


NESTED = "(" * 30000 + '"a"' + ")" * 30000
JSON = {"content-type": "application/json"}

BAD: dict[str, tuple[dict[str, Any], int]] = {
    "too long": ({"prompt": LONG * 3}, 400),
    "a grammar that is none": ({"prompt": "x", "grammar": "garbage"}, 400),
    "a grammar without a root": ({"prompt": "x", "grammar": 'a ::= "b"'}, 400),
    "a grammar that nests": ({"prompt": "x", "grammar": f"root ::= {NESTED}"}, 400),
    "a grammar that leads nowhere": ({"prompt": "x", "grammar": "root ::= [b-a]"}, 400),
    "no number": ({"prompt": "x", "max_tokens": "many"}, 400),
    "a lone surrogate": ({"prompt": "\ud800"}, 400),
    "a token that there is not": ({"prompt": [10**9]}, 400),
    "a negative token": ({"prompt": [-5]}, 400),
    "a bias of nothing": ({"prompt": "x", "logit_bias": {"99999999": 1}}, 400),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_use_openai_format(http: httpx.Client, what: str, stream: bool) -> None:
    asked, status = BAD[what]
    answer = http.post("/v1/completions", content=json.dumps({**asked, "stream": stream}), headers=JSON)
    assert answer.status_code == status, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    if what == "too long":
        assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"prompt": NaN}'])
def test_malformed_requests_are_refused(http: httpx.Client, content: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = http.post(path, content=content, headers=JSON)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_routes_that_there_are_not(http: httpx.Client) -> None:
    assert http.get("/nothing").json()["error"]
    assert http.get("/v1/completions").status_code == 405
    assert http.post("/extras/detokenize", json={"tokens": [10**8]}).status_code == 400
    assert http.post("/extras/detokenize", json={"tokens": [-1]}).status_code == 400
    assert http.post("/extras/detokenize", json={}).status_code == 400
    assert http.post("/detokenize", json={}).json() == {"content": ""}, "as llama-server"


def test_a_grammar_and_a_shortest_length_that_cannot_both_be(http: httpx.Client) -> None:
    asked = {"prompt": "x", "grammar": 'root ::= "a"', "min_tokens": 10, "max_tokens": 20}
    assert http.post("/v1/completions", json=asked).json()["choices"][0]["text"] == "a"


def test_keys_sizes_origins_and_prompts(tiny_model: TinyModel) -> None:
    limits: dict[str, Any] = {"api_key": "one", "max_body_bytes": 5000, "max_prompt_tokens": 50}
    with ExitStack() as stack:
        server = stack.enter_context(
            serving(tiny_model("qwen35"), cors_origins=["https://a.example"], **limits)
        )
        with server.client() as client:
            asked = {"prompt": "x", "max_tokens": 1}
            assert client.get("/health").status_code == 200
            assert client.post("/v1/completions", json=asked).status_code == 401
            client.headers["authorization"] = "Bearer one"
            assert client.post("/v1/completions", json=asked).status_code == 200
            assert client.post("/v1/completions", json={"prompt": LONG * 9}).status_code == 413
            for stream in (False, True):
                long = client.post("/v1/completions", json={"prompt": LONG, "stream": stream})
                assert (long.status_code, long.json()["error"]["code"]) == (413, "context_length_exceeded")
            for origin, allowed in (("https://a.example", "https://a.example"), ("https://b.example", None)):
                got = client.get("/health", headers={"origin": origin})
                assert got.headers.get("access-control-allow-origin") == allowed
                assert "access-control-allow-credentials" not in got.headers
            server.await_settled()


def test_a_streamed_token_takes_few_calls_of_python(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the event loop, where each token is delivered alone."""
    calls, read, inner = [0], threading.Semaphore(0), NativeContext.decode_parts

    def count(frame: Any, event: str, _: Any) -> None:
        calls[0] += event == "call" and threading.current_thread().name == "server"

    def decode(context: NativeContext, *args: Any, **kwargs: Any) -> Any:
        assert read.acquire(timeout=120)  # the token before has reached the client
        return inner(context, *args, **kwargs)

    before = threading.getprofile()
    threading.setprofile(count)
    try:
        with serving(tiny_model("qwen35")) as server, server.client() as client:

            def ask(most: int) -> int:
                asked = {"prompt": "x", "max_tokens": most, "stream": True, "ignore_eos": True}
                read.release()
                with client.stream("POST", "/v1/completions", json=asked) as response:
                    calls[0] = 0
                    for line in response.iter_lines():
                        if line.startswith("data: {"):
                            read.release()
                server.await_settled()
                return calls[0]

            post(server, {"prompt": "x", "max_tokens": 2})
            monkeypatch.setattr(NativeContext, "decode_parts", decode)
            taken = -ask(20) + ask(100)
    finally:
        threading.setprofile(before)  # type: ignore[arg-type]
    assert taken <= 70 * 80


def silent_at_first(server: Serving, held: Held, asked: dict[str, Any]) -> str:
    """Return a stream whose first batch waits for the first comment."""
    with server.client() as client, client.stream("POST", "/v1/completions", json=asked) as response:
        parts = response.iter_text()
        assert next(parts).startswith(": ping\n\n")
        held.go_on()
        return "".join(parts)


def test_a_silent_stream_gets_comments(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tiny_model("qwen35"), model={"n_batch": 32, "n_ubatch": 32}, ping_seconds=0.1) as server:
        held = Held(monkeypatch, after=0)
        text = silent_at_first(server, held, {"prompt": LONG, "max_tokens": 2, "stream": True})
        assert text.endswith("data: [DONE]\n\n")


def test_an_error_in_a_stream_that_has_begun_is_an_event(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tiny_model("qwen35"), model={"n_batch": 32, "n_ubatch": 32}, ping_seconds=0.1) as server:
        held = Held(monkeypatch, after=0)
        inner = Llama.sample

        def broken(*args: Any, **kwargs: Any) -> int:
            raise RuntimeError("/secret/place")

        monkeypatch.setattr(Llama, "sample", broken)
        text = silent_at_first(server, held, {"prompt": LONG, "max_tokens": 2, "stream": True})
        assert "internal_server_error" in text
        assert "secret" not in text
        monkeypatch.setattr(Llama, "sample", inner)
        server.await_settled()
        wait_until(lambda: "llamacpp:prompt_tokens_total 760.0" in server.metrics())
