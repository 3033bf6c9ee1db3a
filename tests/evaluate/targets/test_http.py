"""Servers behind HTTP: what is sent, what answers tell, and how one is held against a fresh one."""

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
from llamahybrid.evaluate.report import Report
from llamahybrid.evaluate.targets.base import Ask, Reply, Shape
from llamahybrid.evaluate.targets.http import Client, HttpSession, UrlTarget
from tests.evaluate.fake_server import FakeServer

HELLO = Ask(4, messages=({"role": "user", "content": "Hello, who are you?"},))


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
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(TargetError, match="is no http"):
        Client(url)


def test_a_status_is_an_error_that_names_it() -> None:
    with FakeServer() as server, pytest.raises(TargetError, match="GET /props: HTTP status 404"):
        Client(server.url).json("/props")


@pytest.mark.parametrize(("end", "whole"), [(b"0\r\n\r\n", True), (b"", False), (b"9\r\nda", False)])
def test_an_answer_that_breaks_off_is_none(end: bytes, whole: bool) -> None:
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


def test_a_url_may_end_in_v1() -> None:
    with FakeServer() as server:
        assert Client(server.url + "/v1/").json("/v1/models")["data"] == [{"id": "fake"}]


def test_a_server_is_asked_for_its_first_model_and_told_no_option_of_llama_servers() -> None:
    with FakeServer() as server, UrlTarget("it", server.url).open(None, Shape(256, 3)) as session:
        first, again = session.ask(HELLO), session.ask(HELLO)
    assert (session.parallel, session.takes_tokens, session.takes_chats) == (3, False, True)
    assert session.salts is None
    assert server.bodies[0]["model"] == "fake"
    assert not {"cache_prompt", "ignore_eos"} & set(server.bodies[0])
    assert (first.reported, first.prompt) == (0, None)
    assert again.reported
    assert len(first.text) == 16


def test_a_salt_that_nobody_has_makes_an_answer_fresh_where_salts_are_heeded() -> None:
    for mixes, found in ((False, "same"), (True, "unknown")):
        with FakeServer(mixes_salts=mixes) as server:
            session = HttpSession(Client(server.url), False, None, 1)
            assert session.sameness(HELLO, session.ask(HELLO))[0] == found


def test_two_answers_of_which_nothing_came_show_nothing() -> None:
    client = Scripted(spoken(), spoken(), spoken(97), spoken(97))
    session, ask = HttpSession(client, True, None, 1), Ask(2, (1, 2))
    assert session.sameness(ask, session.ask(ask)) == ("unknown", "no token came, or no text")
    assert session.sameness(ask, session.ask(ask)) == ("same", "")


def test_tokens_go_in_and_come_out_of_a_llama_server() -> None:
    client = Scripted(spoken(97, 98, cached=7))
    reply = HttpSession(client, True, None, 1).ask(Ask(2, tuple(range(10)), seed=5, salt="mine"))
    assert (reply.text, reply.tokens, reply.total) == ("ab", (97, 98), 10)
    assert (reply.reported, reply.worked, reply.reused) == (7, 3, 7)
    assert reply.ttft is not None
    (body,) = client.bodies
    assert (body["prompt"], body["n_predict"]) == (list(range(10)), 2)
    assert (body["temperature"], body["seed"], body["cache_salt"]) == (1.0, 5, "mine")
    assert body["cache_prompt"]


def test_tokens_are_refused_where_there_is_only_openais_interface() -> None:
    with pytest.raises(TargetError, match="takes no token ids"):
        HttpSession(Scripted(), False, None, 1).ask(Ask(2, (1, 2, 3)))


@pytest.mark.parametrize(("ids", "prompt"), [([1, 2, 3], (1, 2, 3)), ([1, 2], None)])
def test_a_chats_token_ids_are_told_where_they_are_as_many_as_the_server_counted(
    ids: list[int], prompt: tuple[int, ...] | None
) -> None:
    events: list[dict[str, Any]] = [
        {"choices": [{"delta": {"reasoning_content": "Hm. ", "content": "Yes."}}]}
    ]
    client = Scripted(
        [*events, {"usage": {"prompt_tokens": 3}}], apply_template={"prompt": "x"}, tokenize={"tokens": ids}
    )
    reply = HttpSession(client, True, None, 1).ask(HELLO)
    assert (reply.text, reply.prompt) == ("Hm. Yes.", prompt)


def probabilities(margin: float) -> dict[str, Any]:
    told = [{"id": 98, "logprob": 0.0}, {"id": 99, "logprob": -margin}, {"id": 1, "logprob": -1.0}]
    return {"completion_probabilities": [{"top_logprobs": told}]}


@pytest.mark.parametrize(
    ("fresh", "margin", "seed", "found"),
    [
        (spoken(97, 98), 0.5, None, "same"),
        (spoken(97, 99), 0.5, None, "different"),
        (spoken(97, 99), 0.001, None, "tie"),
        (spoken(97, 99), 0.5, 1, "unknown"),  # sampled
        (spoken(97, 98, cached=4), 0.5, None, "unknown"),  # it reused what it was told not to
        (spoken(97, 98, cached=None), 0.5, None, "unknown"),  # it does not say
    ],
)
def test_an_answer_beside_a_fresh_one(
    fresh: list[dict[str, Any]], margin: float, seed: int | None, found: str
) -> None:
    client = Scripted(spoken(97, 98, cached=7), fresh, completion=probabilities(margin))
    session, ask = HttpSession(client, True, None, 1), Ask(2, tuple(range(10)), seed=seed)
    assert session.sameness(ask, session.ask(ask))[0] == found
    was, now = client.bodies
    assert (was["cache_prompt"], now["cache_prompt"]) == (True, False)
    assert "cache_salt" not in was
    assert now["cache_salt"]


def test_without_token_ids_answers_differ_only_where_fresh_ones_agree() -> None:
    def said(text: str) -> list[dict[str, Any]]:
        usage = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}
        return [{"choices": [{"delta": {"content": text}}]}, {"usage": usage}]

    reply = Reply("a cat", 0.0)
    steady = HttpSession(Scripted(said("a dog"), said("a dog")), False, None, 1).sameness(HELLO, reply)
    assert steady[0] == "different"
    assert steady[1].startswith("'cat' where a fresh answer has 'dog'")
    unsteady = HttpSession(Scripted(said("a dog"), said("a cow")), False, None, 1).sameness(HELLO, reply)
    assert unsteady == ("unknown", "two fresh answers differ, too")


def test_a_server_that_is_gone_is_in_the_report(tmp_path: Path) -> None:
    with FakeServer() as server:
        url = server.url
    report = tmp_path / "report.json"
    done = CliRunner().invoke(app, ["check", "--quick", "--on", url, "--json", str(report)])
    assert done.exit_code == 1
    assert Report.read(report).targets[0].error
