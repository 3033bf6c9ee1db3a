"""Handles: what is made inside a block belongs to it, with its salt, wherever it is advanced."""

from __future__ import annotations

import contextvars
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from llama_cpp import LogitsProcessorList

from llamahybrid.errors import LlamaHybridError
from llamahybrid.request import handle as module
from llamahybrid.request.handle import RequestHandle, belonging_to
from llamahybrid.request.salt import SHARED, digest

WORDS = [(7 * i + 3) % 150 for i in range(60)]


@pytest.fixture
def llm(open_model: Callable[..., Any]) -> Any:
    return open_model()


def test_a_block_without_a_salt_has_that_of_the_one_around_it(llm: Any) -> None:
    assert llm.requests.salt() == SHARED
    with llm.request(cache_salt="a"):
        with llm.request():
            assert llm.requests.salt() == digest("a")
            with llm.request("b"):
                assert llm.requests.salt() == digest("b")
            with llm.request(""):
                assert llm.requests.salt() == SHARED
        assert llm.requests.salt() == digest("a")
    assert llm.requests.salt() == SHARED


def test_a_block_of_another_model_hides_none(llm: Any, open_model: Callable[..., Any]) -> None:
    other = open_model()
    with llm.request("a") as handle, other.request("b"):
        assert llm.requests.salt() == digest("a")
        assert other.requests.salt() == digest("b")
        llm.create_completion(WORDS, max_tokens=1)
    assert len(handle.reports) == 1


def test_the_answers_of_one_call_hide_none(llm: Any, open_model: Callable[..., Any]) -> None:
    other, seen = open_model(), []

    def process(ids: Any, scores: Any) -> Any:
        seen.append(other.requests.salt())
        return scores

    with other.request("b"):
        llm.create_completion(WORDS, max_tokens=1, n=2, logits_processor=LogitsProcessorList([process]))
    assert seen == [digest("b")] * 2


def test_a_block_that_ends_in_another_context_ends(llm: Any) -> None:
    block = llm.request("a")
    contextvars.copy_context().run(block.__enter__)
    assert llm.requests.salt() == SHARED
    block.__exit__(None, None, None)
    block = llm.request("a")
    block.__enter__()
    contextvars.copy_context().run(block.__exit__, None, None, None)
    assert llm.requests.salt() == SHARED


def test_a_stream_keeps_its_salt(llm: Any) -> None:
    with llm.request("a"):
        tokens = llm.generate(WORDS, temp=0.0)
        chunks = llm.create_completion(WORDS, max_tokens=3, stream=True)
    keyword = llm.create_completion(WORDS, max_tokens=3, stream=True, cache_salt="a")
    salts = []
    for stream in (tokens, chunks, keyword):
        with llm.request("b"):
            next(stream)
        salts.append(llm.requests._last.salt)
        stream.close()
    assert salts == [digest("a")] * 3


def test_what_a_chats_stream_asks_later_belongs_to_it(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As functionary's does: a generator that makes its completions when it is advanced."""

    def handler(*, llama: Any, **_: Any) -> Iterator[Any]:
        def stream() -> Iterator[Any]:
            for _ in range(2):
                yield from llama.create_completion(WORDS, max_tokens=1, stream=True)

        return stream()

    llm.chat_handler = handler
    with llm.request("a") as handle:
        stream = llm.create_chat_completion([], stream=True)
    assert not handle.reports
    keyword = llm.create_chat_completion([], stream=True, cache_salt="a")
    salts = []
    for made in (stream, keyword):
        with llm.request("b"):
            next(made)
        salts.append(llm.requests._last.salt)
        list(made)
    assert salts == [digest("a")] * 2
    assert len(handle.reports) == 2
    stream = llm.create_chat_completion([], stream=True)
    next(stream)
    assert llm.requests._last.salt == SHARED
    stream.close()


def test_requests_inside_another_one_have_its_salt(llm: Any) -> None:
    seen: list[Any] = []

    def process(ids: Any, scores: Any) -> Any:
        if not seen:
            seen.append(llm.requests.salt())
            with llm.request(), llm.request("a"):
                seen.append(llm.requests.salt())
            seen.append(llm.generate(WORDS))
            for refused in (
                lambda: llm.request("b"),
                lambda: llm.create_completion(WORDS, cache_salt="b"),
                lambda: next(outside),
                lambda: next(completion),
            ):
                try:
                    refused()
                except LlamaHybridError as error:
                    seen.append(str(error))
        return scores

    with llm.request("b"):
        outside = llm.generate(WORDS)
        completion = llm.create_completion(WORDS, stream=True)
    with llm.request("a"):
        stream = llm.generate(WORDS, temp=0.0, logits_processor=LogitsProcessorList([process]))
    with llm.request("b"):
        next(stream)
    stream.close()
    assert seen[:2] == [digest("a")] * 2
    assert [error for error in seen[3:] if "salt" in error] == seen[3:]
    assert len(seen) == 7
    later = seen[2]
    next(later)
    assert llm.requests._last.salt == digest("a"), "made inside it, and advanced later"
    later.close()


def test_a_handle_cancels_requests_of_its_salt(llm: Any) -> None:
    with llm.request("a") as handle:
        stream = llm.create_completion(WORDS, max_tokens=20, stream=True, temperature=0.0)
    list(itertools.islice(stream, 3))
    handle.cancel()
    assert list(stream)[-1]["choices"][0]["finish_reason"] == "cancelled"


def test_threads_of_answers_have_the_callers_salt(open_model: Callable[..., Any]) -> None:
    llm, salts = open_model(n_parallel=3), []
    llm.on_request = lambda report: salts.append(report)
    with llm.request("a") as handle:
        stream = llm.create_completion(WORDS, max_tokens=3, n=3, stream=True)
    list(stream)
    assert len(salts) == 3
    assert {ticket.salt for ticket in handle._tickets} == {digest("a")}


def test_a_stream_that_was_made_outside_of_any_block_has_none_later(llm: Any) -> None:
    def handler(**_: Any) -> Iterator[Any]:
        yield llm.create_completion(WORDS, max_tokens=1)

    llm.chat_handler = handler
    with llm.request("a"):
        llm.create_completion(WORDS, max_tokens=1)
    made = llm.create_chat_completion([{"role": "user", "content": "x"}], stream=True)
    with llm.request("b"):
        assert len(list(made)) == 1
        assert llm.requests.salt() == digest("b")
    assert llm.requests._last.salt == SHARED


class Interrupting:
    """Stands for the context variable: an interrupt comes right after it was set."""

    def __init__(self, real: Any) -> None:
        self.get = real.get
        self.reset = real.reset
        self._real = real
        self._struck = False

    def set(self, value: Any) -> Any:
        token = self._real.set(value)
        if not self._struck:
            self._struck = True
            raise KeyboardInterrupt
        return token


@pytest.mark.parametrize("opens", ["request", "stream"])
def test_an_interrupt_leaves_no_salt_behind(llm: Any, monkeypatch: pytest.MonkeyPatch, opens: str) -> None:
    """Else what is asked next is of that salt."""
    handle = RequestHandle(llm.requests.gate, salt=digest("a")).entered()
    monkeypatch.setattr(module, "_handle", Interrupting(module._handle))
    block = llm.request("a") if opens == "request" else belonging_to(handle)
    with pytest.raises(KeyboardInterrupt):
        block.__enter__()
    assert llm.requests.salt() == SHARED
