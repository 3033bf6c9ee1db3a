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
from llamahybrid.harness.traces.trace import Entry, read
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


class Recording:
    """A class that is recorded into a file, and functions registered for the end of the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kind = type("Watched", (Talker,), {})
        self.at_exit: list[Callable[[], None]] = []

    def talker(self, hashed: bool = False) -> Any:
        Recorder(self.path, hashed).attach(self.kind)
        return self.kind()

    @property
    def entries(self) -> Sequence[Entry]:
        return read(self.path)


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Recording]:
    """Token 2 is a control token."""
    made = Recording(tmp_path / "t")
    monkeypatch.setattr(llama_cpp, "llama_model_get_vocab", lambda model: None)
    monkeypatch.setattr(llama_cpp, "llama_vocab_is_control", lambda vocab, token: token == 2)
    monkeypatch.setattr(atexit, "register", made.at_exit.append)
    yield made
    for each in made.at_exit:
        each()


@pytest.mark.parametrize("stream", [False, True])
def test_chat_is_recorded_with_its_messages(stream: bool, recording: Recording) -> None:
    llm, tools = recording.talker(), [{"type": "function"}]
    assert tuple(llm.create_chat_completion(MESSAGES, stream=stream, tools=tools)) == SAID
    assert tuple(llm.generate((3, 4), temp=0.0)) == SAID
    chat, plain = recording.entries
    assert (chat.ask.tokens, chat.ask.messages, chat.ask.tools) == ((1, 2), MESSAGES, tuple(tools))
    assert (plain.ask.tokens, plain.ask.messages, plain.ask.tools) == ((3, 4), (), ())
    assert chat.answer == plain.answer == SAID
    assert (chat.total, chat.ask.max_tokens) == (2, 3)


def test_closed_stream_is_recorded(recording: Recording) -> None:
    stream = recording.talker().generate((1,), temp=0.0)
    next(stream)
    stream.close()
    assert [entry.answer for entry in recording.entries] == [SAID[:1]]


def test_sampled_requests_are_recorded_with_a_seed(recording: Recording) -> None:
    llm = recording.talker()
    for options in ({"temp": 0.0}, {"temp": 0.7}, {}):
        list(llm.generate((1,), **options))
    assert [entry.ask.seed for entry in recording.entries] == [None, 0, 0]


def test_control_tokens_stay_readable_in_a_hashed_trace(recording: Recording) -> None:
    recording.talker(hashed=True).create_chat_completion(MESSAGES)
    (entry,) = recording.entries
    assert entry.ask.tokens[0] != 2, "another word"
    assert entry.ask.tokens[1] == 2, "as it is"
    assert "Seagull" not in recording.path.read_text()


def test_messages_that_json_cannot_hold_are_left_out(recording: Recording) -> None:
    circle: dict[str, Any] = {}
    circle["itself"] = circle
    llm = recording.talker()
    for odd in ({"role": "user", "content": recording.path}, circle, "no message"):
        assert tuple(llm.create_chat_completion([odd])) == SAID
    first, *others = recording.entries
    assert first.ask.messages == ({"role": "user", "content": str(recording.path)},)
    assert [(entry.ask.messages, entry.ask.tokens) for entry in others] == [((), (1, 2))] * 2


def test_failed_recording_does_not_stop_the_program(
    recording: Recording, caplog: pytest.LogCaptureFixture
) -> None:
    llm = recording.talker()
    llm.last_request = SimpleNamespace(cached=object())
    assert tuple(llm.generate((1, 2))) == SAID
    assert "a request was not recorded: TypeError" in caplog.text


def test_trace_is_closed_at_exit(recording: Recording) -> None:
    llm = recording.talker()
    (close,) = recording.at_exit
    close()
    list(llm.generate((1,)))
    assert not recording.entries, "what ends later is left out, and does no harm"
