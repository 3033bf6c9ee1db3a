"""Recording in `Llama`: each request is written when it ends, a chat with its messages."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llama_cpp
import pytest

from llamahybrid.harness.traces.hook import Recorder
from llamahybrid.harness.traces.trace import read
from tests.harness.traces.said import MESSAGES

SAID = (7, 8, 9)


class Talker:
    """Stands in for `Llama`: every answer is the same."""

    evaluation = None
    model = None

    def n_vocab(self) -> int:
        return 10

    def generate(self, tokens: Sequence[int], **options: Any) -> Iterator[int]:
        yield from SAID

    def create_chat_completion(self, messages: Any, stream: bool = False, **options: Any) -> Any:
        events = (token for _ in "1" for token in self.generate((1, 2), temp=0.0))  # begins when advanced
        return events if stream else list(events)


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> type[Talker]:
    """A class that nothing is attached to yet; token 2 is a control token."""
    monkeypatch.setattr(llama_cpp, "llama_model_get_vocab", lambda model: None)
    monkeypatch.setattr(llama_cpp, "llama_vocab_is_control", lambda vocab, token: token == 2)
    return type("Watched", (Talker,), {})


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], None]]]:
    """Functions registered for the end of the process, called at the end of the test."""
    noted: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", noted.append)
    yield noted
    for each in noted:
        each()


@pytest.mark.parametrize("stream", [False, True])
def test_chat_is_recorded_with_its_messages(
    stream: bool, kind: type[Talker], at_exit: list[Callable[[], None]], tmp_path: Path
) -> None:
    Recorder(tmp_path / "t", hashed=False).attach(kind)
    tools = [{"type": "function"}]
    assert tuple(kind().create_chat_completion(MESSAGES, stream=stream, tools=tools)) == SAID
    assert tuple(kind().generate((3, 4), temp=0.0)) == SAID
    chat, plain = read(tmp_path / "t").entries
    assert (chat.ask.tokens, chat.ask.messages, chat.ask.tools) == ((1, 2), MESSAGES, tuple(tools))
    assert (plain.ask.tokens, plain.ask.messages, plain.ask.tools) == ((3, 4), (), ())
    assert chat.answer == plain.answer == SAID
    assert (chat.total, chat.ask.max_tokens) == (2, 3)


def test_closed_stream_is_recorded(
    kind: type[Talker], at_exit: list[Callable[[], None]], tmp_path: Path
) -> None:
    Recorder(tmp_path / "t", hashed=False).attach(kind)
    stream: Any = kind().generate((1,), temp=0.0)
    next(stream)
    stream.close()
    (entry,) = read(tmp_path / "t").entries
    assert entry.answer == SAID[:1]


def test_sampled_requests_are_recorded_with_a_seed(
    kind: type[Talker], at_exit: list[Callable[[], None]], tmp_path: Path
) -> None:
    Recorder(tmp_path / "t", hashed=False).attach(kind)
    list(kind().generate((1,), temp=0.0))
    list(kind().generate((1,), temp=0.7))
    list(kind().generate((1,)))
    assert [entry.ask.seed for entry in read(tmp_path / "t").entries] == [None, 0, 0]


def test_control_tokens_stay_readable_in_a_hashed_trace(
    kind: type[Talker], at_exit: list[Callable[[], None]], tmp_path: Path
) -> None:
    Recorder(tmp_path / "t", hashed=True).attach(kind)
    kind().create_chat_completion(MESSAGES)
    (entry,) = read(tmp_path / "t").entries
    assert entry.ask.tokens[0] >= 0, "a hash"
    assert entry.ask.tokens[1] == -3, "token 2, as it is"
    assert "Seagull" not in (tmp_path / "t").read_text()


def test_messages_that_json_cannot_hold_are_left_out(
    kind: type[Talker], at_exit: list[Callable[[], None]], tmp_path: Path
) -> None:
    Recorder(tmp_path / "t", hashed=False).attach(kind)
    circle: dict[str, Any] = {}
    circle["itself"] = circle
    llm = kind()
    for odd in ({"role": "user", "content": tmp_path}, circle, "no message"):
        assert tuple(llm.create_chat_completion([odd])) == SAID
    first, *others = read(tmp_path / "t").entries
    assert first.ask.messages == ({"role": "user", "content": str(tmp_path)},)
    assert [(entry.ask.messages, entry.ask.tokens) for entry in others] == [((), (1, 2))] * 2


def test_failed_recording_does_not_stop_the_program(
    kind: type[Talker],
    at_exit: list[Callable[[], None]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    Recorder(tmp_path / "t", hashed=False).attach(kind)
    llm: Any = kind()
    llm.last_request = SimpleNamespace(cached=object())
    assert tuple(llm.generate((1, 2))) == SAID
    assert "a request was not recorded: TypeError" in caplog.text


def test_trace_is_closed_at_exit(
    kind: type[Talker], at_exit: list[Callable[[], None]], tmp_path: Path
) -> None:
    Recorder(tmp_path / "t", hashed=False).attach(kind)
    (close,) = at_exit
    close()
    list(kind().generate((1,)))
    assert not read(tmp_path / "t").entries, "what ends later is left out, and does no harm"
