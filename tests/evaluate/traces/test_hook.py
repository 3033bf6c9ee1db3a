"""The hook in `Llama`: each request is written as it ends, a chat's with its messages."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llama_cpp
import pytest

from llamahybrid.evaluate.traces.hook import Recorder
from llamahybrid.evaluate.traces.trace import read
from tests.evaluate.traces.said import MESSAGES

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
    """What is to be called as the process ends; it is called as the test does."""
    noted: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", noted.append)
    yield noted
    for each in noted:
        each()


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_keeps_its_messages_and_the_next_completion_has_none(
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


def test_of_two_completions_in_one_chat_the_first_has_its_messages(
    kind: type[Talker], at_exit: list[Callable[[], None]], tmp_path: Path
) -> None:
    """A chat handler that asks for the tool first, and for its arguments then, as upstream's do."""

    def twice(llm: Talker, messages: Any, **options: Any) -> list[int]:
        return [token for _ in "12" for token in llm.generate((1, 2), temp=0.0)]

    kind.create_chat_completion = twice  # type: ignore[assignment]
    Recorder(tmp_path / "t", hashed=False).attach(kind)
    assert tuple(kind().create_chat_completion(MESSAGES)) == SAID * 2
    first, second = read(tmp_path / "t").entries
    assert (first.ask.messages, second.ask.messages) == (MESSAGES, ())


def test_a_prompt_from_an_iterator_is_generated_from_and_written(
    kind: type[Talker], at_exit: list[Callable[[], None]], tmp_path: Path
) -> None:
    def echo(llm: Talker, tokens: Sequence[int], **options: Any) -> Iterator[int]:
        yield from tokens  # as `Llama`'s: read when it is advanced

    kind.generate = echo  # type: ignore[method-assign]
    Recorder(tmp_path / "t", hashed=False).attach(kind)
    prompt: Any = iter((3, 4))
    assert tuple(kind().generate(prompt, temp=0.0)) == (3, 4)
    (entry,) = read(tmp_path / "t").entries
    assert entry.ask.tokens == entry.answer == (3, 4)


def test_a_request_that_is_broken_off_is_written_too(
    kind: type[Talker], at_exit: list[Callable[[], None]], tmp_path: Path
) -> None:
    Recorder(tmp_path / "t", hashed=False).attach(kind)
    stream: Any = kind().generate((1,), temp=0.0)
    next(stream)
    stream.close()
    (entry,) = read(tmp_path / "t").entries
    assert entry.answer == SAID[:1]


def test_greedy_requests_have_no_seed_and_sampled_ones_do(
    kind: type[Talker], at_exit: list[Callable[[], None]], tmp_path: Path
) -> None:
    Recorder(tmp_path / "t", hashed=False).attach(kind)
    list(kind().generate((1,), temp=0.0))
    list(kind().generate((1,), temp=0.7))
    list(kind().generate((1,)))
    assert [entry.ask.seed for entry in read(tmp_path / "t").entries] == [None, 0, 0]


def test_hashed_only_control_tokens_are_seen(
    kind: type[Talker], at_exit: list[Callable[[], None]], tmp_path: Path
) -> None:
    Recorder(tmp_path / "t", hashed=True).attach(kind)
    kind().create_chat_completion(MESSAGES)
    (entry,) = read(tmp_path / "t").entries
    assert entry.ask.tokens[0] >= 0, "a hash"
    assert entry.ask.tokens[1] == -3, "token 2, as it is"
    assert "Seagull" not in (tmp_path / "t").read_text()


def test_the_next_model_is_not_taken_for_one_that_is_gone(
    kind: type[Talker],
    at_exit: list[Callable[[], None]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its object often lies where that one did, and its words are no control tokens."""
    recorder = Recorder(tmp_path / "t", hashed=True)
    recorder.attach(kind)
    list(kind().generate((1, 2)))
    monkeypatch.setattr(llama_cpp, "llama_vocab_is_control", lambda vocab, token: token == 1)
    for _ in range(20):  # one of these has the other's id
        list(kind().generate((1, 2)))
    shown = [entry.ask.tokens for entry in read(tmp_path / "t").entries]
    assert shown[0][1] == -3
    assert all(one == -2 and two >= 0 for one, two in shown[1:])


def test_what_json_cannot_hold_is_written_as_text_or_left_out(
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


def test_the_program_goes_on_where_a_request_cannot_be_recorded(
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


def test_the_trace_is_closed_as_the_process_ends(
    kind: type[Talker], at_exit: list[Callable[[], None]], tmp_path: Path
) -> None:
    Recorder(tmp_path / "t", hashed=False).attach(kind)
    (close,) = at_exit
    close()
    list(kind().generate((1,)))
    assert not read(tmp_path / "t").entries, "what ends later is left out, and does no harm"
