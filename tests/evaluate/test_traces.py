"""Traces: what is recorded comes back, hashed ones show nothing, and prompts part where they did."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from llamahybrid import tiny
from llamahybrid.cli.main import app
from llamahybrid.errors import ReportError
from llamahybrid.evaluate.oracle import common_prefix
from llamahybrid.evaluate.report import Report
from llamahybrid.evaluate.targets.base import Ask
from llamahybrid.evaluate.traces.hashing import Hasher, stand_in
from llamahybrid.evaluate.traces.proxy import RecordingProxy
from llamahybrid.evaluate.traces.trace import Entry, TraceWriter, chats, read
from tests.evaluate.fake_server import FakeServer

SECRET = "The password of the harbour is Seagull."


def _written(path: Path, *asks: Ask, hashed: bool = False, control: tuple[int, ...] = ()) -> list[Ask]:
    writer = TraceWriter(path, "test", Hasher() if hashed else None)
    for ask in asks:
        writer.add(Entry(0.5, ask, "an answer", (1, 2), 10, 3, 0.1, 0.05), control)
    writer.close()
    return [entry.ask for entry in read(path).entries]


MESSAGES = ({"role": "system", "content": SECRET}, {"role": "user", "content": "Who goes there?"})
MORE = (*MESSAGES, {"role": "assistant", "content": "I do."}, {"role": "user", "content": "And who else?"})


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    asks = [
        Ask(7, tokens=(1, 2, 3), salt="a"),
        Ask(8, messages=MESSAGES, tools=({"type": "function"},), seed=3),
    ]
    assert _written(tmp_path / "t", *asks) == asks
    assert read(tmp_path / "t").entries[0] == Entry(0.5, asks[0], "an answer", (1, 2), 10, 3, 0.1, 0.05)


@pytest.mark.parametrize("text", ["", "{}\n", "[1]\n", "x\n", '{"kind": "llamahybrid trace", "format": 2}\n'])
def test_what_is_no_trace_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(ReportError, match="t"):
        read(tmp_path / "t")


@pytest.mark.parametrize("line", ["{}", "[]", "nothing", '{"ask": {"tokens": ["x"]}}'])
def test_a_line_that_is_no_request_is_refused_by_its_number(line: str, tmp_path: Path) -> None:
    _written(tmp_path / "t", Ask(1, tokens=(1,)))
    with (tmp_path / "t").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ReportError, match="line 3"):
        read(tmp_path / "t")


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    _written(tmp_path / "t", Ask(1, tokens=(1,)))
    whole = (tmp_path / "t").read_text()
    (tmp_path / "t").write_text(whole + whole.splitlines()[1][:-5])
    assert len(read(tmp_path / "t").entries) == 1


def test_a_hashed_trace_shows_no_text(tmp_path: Path) -> None:
    ask = Ask(
        8, messages=MESSAGES, tools=({"type": "function", "function": {"name": "Seagull"}},), salt="Berta"
    )
    _written(tmp_path / "t", ask, Ask(8, text=SECRET), hashed=True)
    text = (tmp_path / "t").read_text()
    for word in ("password", "Seagull", "Who", "an answer", "Berta", "harbour"):
        assert word not in text


def test_the_same_word_has_another_hash_at_each_place(tmp_path: Path) -> None:
    (ask,) = _written(tmp_path / "t", Ask(1, tokens=(5,) * 50), hashed=True)
    assert len(set(ask.tokens)) == 50
    (other,) = _written(tmp_path / "u", Ask(1, tokens=(5,) * 50), hashed=True)
    assert not set(ask.tokens) & set(other.tokens), "the key is the trace's own"


def test_hashed_prompts_part_where_they_did(tmp_path: Path) -> None:
    one, two = tuple(range(60)), (*range(40), 99, *range(41, 60))
    hashed = _written(
        tmp_path / "t",
        *(Ask(1, tokens=one), Ask(1, tokens=two), Ask(8, messages=MESSAGES), Ask(8, messages=MORE)),
        hashed=True,
        control=(3,),
    )
    words = tuple(range(1000, 3000))
    played = [stand_in(ask, words) for ask in hashed]
    assert 40 <= common_prefix(played[0].tokens, played[1].tokens) < 45
    assert len(played[1].tokens) == 60
    assert played[0].tokens[3] == 3, "control tokens are structure"
    assert played[3].messages[:2] == played[2].messages
    assert [len(m["content"]) for m in played[3].messages] == [len(m["content"]) for m in MORE]
    assert [m["role"] for m in played[3].messages] == [m["role"] for m in MORE]


def test_chats_are_told_apart_by_what_they_share() -> None:
    first, second = tuple(range(100)), tuple(range(200, 300))
    prompts = [
        first,
        second,
        (*first, 1, 2, 3),
        (*second, 5),
        tuple(range(50, 90)),
        (*first[:70], *range(500, 540)),
    ]
    assert chats([Entry(0.0, Ask(1, tokens=p)) for p in prompts]) == ["0", "1", "0", "1", "2", "0"]


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url + "/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer SECRETKEY"},
    )
    return urllib.request.urlopen(request, timeout=20)


def test_the_proxy_passes_on_and_records(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", "proxy")
    with FakeServer() as server, RecordingProxy(server.url + "/v1", writer) as proxy:
        body = {"messages": list(MESSAGES), "max_tokens": 5, "temperature": 0, "cache_salt": "Berta"}
        with _post(proxy.url, body) as reply:
            direct = json.load(reply)
        with _post(proxy.url, {**body, "stream": True}) as reply:
            streamed = reply.read().decode()
        with urllib.request.urlopen(proxy.url + "/v1/models", timeout=20) as reply:
            assert json.load(reply)["data"][0]["id"] == "fake"
        assert server.keys == ["Bearer SECRETKEY"] * 2, "it reaches the server"
        assert server.bodies[0] == body
        _await(lambda: len((tmp_path / "t").read_text().splitlines()) == 3)
    writer.close()
    assert streamed.endswith("data: [DONE]\n\n")
    text = (tmp_path / "t").read_text()
    assert "SECRETKEY" not in text
    assert "Berta" not in text
    one, two = read(tmp_path / "t").entries
    assert one.ask.messages == two.ask.messages == MESSAGES
    assert (one.ask.max_tokens, one.ask.seed) == (5, None)
    assert one.ask.salt == two.ask.salt != ""
    assert one.text == direct["choices"][0]["message"]["content"]
    assert two.text == one.text.replace("|", "")
    assert (one.cached, one.total) == (0, direct["usage"]["prompt_tokens"])
    assert two.cached is not None
    assert two.cached > 0


def test_the_proxy_keeps_no_event_back(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", "proxy")
    body = {"messages": list(MESSAGES), "stream": True}
    body = {"messages": list(MESSAGES), "stream": True}
    with (
        FakeServer(split=True) as server,
        RecordingProxy(server.url, writer) as proxy,
        _post(proxy.url, body) as reply,
    ):
        assert reply.readline().startswith(b"data: "), "the server waits with the next one until this came"
        server.go.set()
        assert reply.read().endswith(b"data: [DONE]\n\n")
    writer.close()


def test_the_proxy_says_that_nobody_is_behind(tmp_path: Path) -> None:
    with FakeServer() as server:
        url = server.url
    with (
        RecordingProxy(url, TraceWriter(tmp_path / "t", "proxy")) as proxy,
        pytest.raises(urllib.error.HTTPError, match="502"),
    ):
        _post(proxy.url, {"messages": list(MESSAGES)})


def _await(true: Any) -> None:
    until = time.monotonic() + 20
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


PROGRAM = """
import sys
from llama_cpp import Llama
llm = Llama(sys.argv[1], n_ctx=512, verbose=False, n_threads=1, n_threads_batch=1)
say = [{"role": "user", "content": "The password of the harbour is Seagull, remember it well please."}]
for stream in (False, True):
    made = llm.create_chat_completion(say, max_tokens=6, temperature=0, stream=stream)
    list(made)
llm.create_completion("Who goes there?", max_tokens=4, temperature=0)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("qwen35", tmp_path_factory.mktemp("model") / "qwen35.gguf")


@pytest.mark.native
@pytest.mark.parametrize("hashed", [False, True])
def test_a_program_is_recorded_and_replayed_by_commands(hashed: bool, model: Path, tmp_path: Path) -> None:
    program, trace, report = tmp_path / "program.py", tmp_path / "t.jsonl", tmp_path / "report.json"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "llamahybrid", "record", "--out", str(trace)]
    command += [*(["--hash"] if hashed else []), "--", str(program), str(model)]
    subprocess.run(command, check=True, timeout=120)
    entries = read(trace).entries
    assert len(entries) == 3
    assert entries[1].cached == entries[1].total, "the same prompt came again"
    assert ("Seagull" in trace.read_text()) is not hashed
    assert [bool(entry.ask.messages) for entry in entries] == [True, True, False]
    if not hashed:
        assert len(entries[0].answer) == entries[0].ask.max_tokens
    arguments = ["replay", str(trace), "--model", str(model), "--json", str(report)]
    done = CliRunner().invoke(app, [*arguments, "--on", "ours", "--on", "stock"])
    assert done.exit_code == 0, done.output
    ours, stock = Report.read(report).targets
    found = ours.workloads[0].requests
    assert [each.total for each in found] == [entry.total for entry in entries]
    assert found[1].cached == found[1].total
    assert found[1].chat == found[0].chat != found[2].chat
    assert {each.answer for each in (*found, *stock.workloads[0].requests)} == {"same"}


def test_a_recorded_chat_is_replayed_on_a_url(tmp_path: Path) -> None:
    _written(tmp_path / "t", Ask(5, messages=MESSAGES), Ask(5, messages=MORE))
    with FakeServer() as server:
        arguments = ["replay", str(tmp_path / "t"), "--on", server.url, "--json", str(tmp_path / "r")]
        done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    one, two = Report.read(tmp_path / "r").targets[0].workloads[0].requests
    assert two.chat == one.chat
    assert two.cached == (two.total or 0) - (two.left or 0) > 0


def test_replay_says_what_it_needs(tmp_path: Path) -> None:
    _written(tmp_path / "t", Ask(5, messages=MESSAGES))
    done = CliRunner().invoke(app, ["replay", str(tmp_path / "t"), "--on", "stock"])
    assert done.exit_code == 1
    assert "--model" in done.output
