"""Targets behind HTTP: requests, answers, and the comparison with a fresh answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from llamahybrid.cli.main import app
from llamahybrid.errors import TargetError
from llamahybrid.harness.conversation import Request
from llamahybrid.harness.report import Report
from llamahybrid.harness.targets.base import Reply, Shape
from llamahybrid.harness.targets.http import Client, HttpSession, UrlTarget, events, lines
from tests.harness.fake_server import FakeServer

HELLO = Request(4, messages=({"role": "user", "content": "Hello, who are you?"},))


class Scripted(Client):
    """Answers what the test says, and keeps what it was asked."""

    def __init__(self, *streams: list[dict[str, Any]], **replies: Any) -> None:
        super().__init__("http://127.0.0.1:9")
        self.streams, self.replies = list(streams), replies
        self.bodies: list[Any] = []

    def json(self, path: str, body: object = None) -> Any:
        try:
            return self.replies[path.strip("/").replace("-", "_")]
        except KeyError:
            raise TargetError(path) from None

    def stream(self, path: str, body: object) -> Iterator[dict[str, Any]]:
        self.bodies.append(body)
        yield from self.streams.pop(0)


def spoken(*tokens: int, cached: int | None = 0) -> list[dict[str, Any]]:
    """Events of a llama-server that answers a prompt of ten tokens."""
    events: list[dict[str, Any]] = [{"tokens": [token], "content": chr(token)} for token in tokens]
    timings = {} if cached is None else {"cache_n": cached, "prompt_n": 10 - cached}
    return [*events, {"tokens": [], "content": "", "tokens_evaluated": 10, "timings": timings}]


@pytest.mark.parametrize("url", ["ftp://x", "http://", "x"])
def test_malformed_urls_are_refused(url: str) -> None:
    with pytest.raises(TargetError, match="is no http"):
        Client(url)


def test_http_error_names_its_status() -> None:
    with FakeServer() as server, pytest.raises(TargetError, match="GET /props: HTTP status 404"):
        Client(server.url).json("/props")


@pytest.mark.parametrize(("end", "whole"), [(b"0\r\n\r\n", True), (b"", False), (b"9\r\nda", False)])
def test_interrupted_stream_is_an_error(end: bytes, whole: bool) -> None:
    """Of a server that dies in the middle of it."""
    said = b'data: {"n": 1}\n\n'
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(head + b"%x\r\n%s\r\n" % (len(said), said) + end)

        thread = threading.Thread(target=serve)
        thread.start()
        events = Client(f"http://127.0.0.1:{server.getsockname()[1]}").stream("/x", {})
        assert next(events) == {"n": 1}
        if whole:
            assert not list(events)
        else:
            with pytest.raises(TargetError):
                list(events)
        thread.join()


def test_openai_server_gets_no_options_of_llama_server() -> None:
    with FakeServer() as server, UrlTarget("it", server.url).open(None, Shape(256, 3)) as session:
        first, again = session.ask(HELLO), session.ask(HELLO)
    assert (session.parallel, session.takes_tokens, session.takes_chats) == (3, False, True)
    assert session.salts is None
    assert server.bodies[0]["model"] == "fake"
    assert not {"cache_prompt", "ignore_eos"} & set(server.bodies[0])
    assert (first.reported, first.prompt) == (0, None)
    assert again.reported
    assert len(first.text) == 16


def test_server_is_measured_again_after_a_close() -> None:
    with FakeServer() as server:
        target = UrlTarget("it", server.url)
        for _ in range(2):  # bench closes its targets after each step
            with target.open(None, Shape(256, 1)) as session:
                assert session.ask(HELLO).text
            target.close()


def test_event_holds_any_line_break_of_unicode() -> None:
    said = "one\u2028two\x85three"
    pieces = [f'data: {{"text": "{said[:4]}', f'{said[4:]}"}}\r\n\r\ndata: [DONE]\n']
    assert list(events(lines(pieces))) == [{"text": said}]


def test_fresh_answer_is_asked_with_an_unused_salt() -> None:
    for mixes, found in ((False, "same"), (True, "unknown")):
        with FakeServer(mixes_salts=mixes) as server:
            session = HttpSession(Client(server.url), False, None, 1)
            assert session.sameness(HELLO, session.ask(HELLO))[0] == found


def test_server_of_ours_gets_salts_and_no_cache_prompt() -> None:
    server = FakeServer(build="llama-cpp-python 0.3.36")
    with server, UrlTarget("it", server.url).open(None, Shape(256)) as session:
        assert session.salts
        assert session.sameness(HELLO, session.ask(HELLO)) == ("same", "")
    asked = [body for body in server.bodies if "max_tokens" in body]
    assert asked[-1]["cache_salt"]
    assert asked[-1]["cache_prompt"]


def test_llama_server_takes_and_returns_token_ids() -> None:
    client = Scripted(spoken(97, 98, cached=7))
    reply = HttpSession(client, True, None, 1).ask(Request(2, tuple(range(10)), seed=5, salt="mine"))
    assert (reply.text, reply.tokens, reply.total) == ("ab", (97, 98), 10)
    assert (reply.reported, reply.worked, reply.reused) == (7, 3, 7)
    assert reply.ttft is not None
    (body,) = client.bodies
    assert (body["prompt"], body["n_predict"]) == (list(range(10)), 2)
    assert (body["temperature"], body["seed"], body["cache_salt"]) == (1.0, 5, "mine")
    assert body["cache_prompt"]


def probabilities(margin: float, apart: float = 0.0) -> dict[str, Any]:
    """Of two places: the second is `apart` from the first, as where its tokens were decoded one by one."""
    places = [
        [{"id": 98, "logprob": 0.0}, {"id": 99, "logprob": -margin - more}, {"id": 1, "logprob": -1.0}]
        for more in (0.0, apart)
    ]
    return {"completion_probabilities": [{"top_logprobs": told} for told in places]}


@pytest.mark.parametrize(
    ("fresh", "margin", "apart", "seed", "found"),
    [
        (spoken(97, 98), 0.5, 0, None, "same"),
        (spoken(97, 99), 0.5, 0, None, "different"),
        (spoken(97, 99), 0.001, 0, None, "tie"),
        (spoken(97, 99), 0.04, 0.001, None, "different"),
        (spoken(97, 99), 0.04, 0.02, None, "tie"),  # two right runs differ by as much: quantized weights
        (spoken(97, 99), 0.5, 0.4, None, "different"),  # so much that nothing can be told by it
        (spoken(97, 99), 0.5, 0, 1, "unknown"),  # sampled
        (spoken(97, 98, cached=4), 0.5, 0, None, "unknown"),  # it reused what it was told not to
        (spoken(97, 98, cached=None), 0.5, 0, None, "unknown"),  # it does not say
    ],
)
def test_answer_is_compared_with_a_fresh_one(
    fresh: list[dict[str, Any]], margin: float, apart: float, seed: int | None, found: str
) -> None:
    client = Scripted(spoken(97, 98, cached=7), fresh, completion=probabilities(margin, apart))
    session, ask = HttpSession(client, True, None, 1), Request(2, tuple(range(10)), seed=seed)
    assert session.sameness(ask, session.ask(ask))[0] == found
    was, now = client.bodies
    assert (was["cache_prompt"], now["cache_prompt"]) == (True, False)
    assert "cache_salt" not in was
    assert now["cache_salt"]


def test_texts_differ_only_where_fresh_answers_agree() -> None:
    def said(text: str) -> list[dict[str, Any]]:
        usage = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}
        return [{"choices": [{"delta": {"content": text}}]}, {"usage": usage}]

    reply = Reply("a cat", 0.0)
    steady = HttpSession(Scripted(said("a dog"), said("a dog")), False, None, 1).sameness(HELLO, reply)
    assert steady[0] == "different"
    assert steady[1].startswith("'cat' where a fresh answer has 'dog'")
    unsteady = HttpSession(Scripted(said("a dog"), said("a cow")), False, None, 1).sameness(HELLO, reply)
    assert unsteady == ("unknown", "two fresh answers differ, too")


def test_unreachable_server_is_reported(tmp_path: Path) -> None:
    with FakeServer() as server:
        url = server.url
    report = tmp_path / "report.json"
    done = CliRunner().invoke(app, ["check", "--quick", "--on", url, "--json", str(report)])
    assert done.exit_code == 1
    assert Report.read(report).targets[0].error
