"""Handles: what is made inside a block belongs to it, with its salt, wherever it is advanced."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from llama_cpp import LogitsProcessorList

from llamahybrid.errors import LlamaHybridError
from tests.request.asking import WORDS

PROMPT = WORDS[:60]
OTHER = WORDS[100:160]
SALTS = ("", "a", "b")


@pytest.fixture
def llm(opened: Callable[..., Any]) -> Any:
    return opened()


def salts_that_know(llm: Any, prompt: list[int] = PROMPT) -> set[str]:
    """The salts under which a prompt is known: those that a request for it had."""

    def matched(salt: str) -> int:
        with llm.request(salt):
            llm.create_completion([*prompt, 3], max_tokens=1)
            return int(llm.last_request.matched)

    return {salt for salt in SALTS if matched(salt) >= len(prompt)}


def test_block_without_a_salt_has_that_of_the_one_around_it(llm: Any) -> None:
    prompts = {
        salt: [*WORDS[:50], salt_id] for salt_id, salt in enumerate(("in a", "in b", "in none", "after"))
    }
    with llm.request("a"):
        with llm.request():
            llm.create_completion(prompts["in a"], max_tokens=1)
            with llm.request("b"):
                llm.create_completion(prompts["in b"], max_tokens=1)
            with llm.request(""):
                llm.create_completion(prompts["in none"], max_tokens=1)
        llm.create_completion(prompts["after"], max_tokens=1)
    known = {name: salts_that_know(llm, prompt) for name, prompt in prompts.items()}
    assert known == {"in a": {"a"}, "in b": {"b"}, "in none": {""}, "after": {"a"}}


def test_block_of_another_model_hides_none(llm: Any, opened: Callable[..., Any]) -> None:
    other = opened()
    with llm.request("a") as handle, other.request("b"):
        llm.create_completion(PROMPT, max_tokens=1)
        other.create_completion(PROMPT, max_tokens=1)
    assert len(handle.reports) == 1
    assert salts_that_know(llm) == {"a"}
    assert salts_that_know(other) == {"b"}


@pytest.mark.parametrize("outside", ["enter", "exit"])
def test_block_that_ends_in_another_context_ends(llm: Any, outside: str) -> None:
    block = llm.request("a")
    if outside == "enter":
        contextvars.copy_context().run(block.__enter__)
        block.__exit__(None, None, None)
    else:
        block.__enter__()
        contextvars.copy_context().run(block.__exit__, None, None, None)
    llm.create_completion(PROMPT, max_tokens=1)
    assert salts_that_know(llm) == {""}


@pytest.mark.parametrize("kind", ["tokens", "chunks", "keyword"])
def test_stream_keeps_its_salt(llm: Any, kind: str) -> None:
    asked: dict[str, Any] = {"max_tokens": 3, "stream": True}
    with llm.request("a"):
        stream = (
            llm.generate(PROMPT, temp=0.0) if kind == "tokens" else llm.create_completion(PROMPT, **asked)
        )
    if kind == "keyword":
        stream = llm.create_completion(PROMPT, cache_salt="a", **asked)
    with llm.request("b"):
        next(stream)
    stream.close()
    assert salts_that_know(llm) == {"a"}


@pytest.mark.parametrize("how", ["block", "keyword", "none"])
def test_later_requests_of_a_chats_stream_belong_to_it(llm: Any, how: str) -> None:
    """As functionary's does: a generator that makes its completions when it is advanced."""

    def handler(*, llama: Any, **_: Any) -> Iterator[Any]:
        def stream() -> Iterator[Any]:
            for _ in range(2):
                yield from llama.create_completion(PROMPT, max_tokens=1, stream=True)

        return stream()

    llm.create_completion(OTHER, cache_salt="a", max_tokens=1)
    llm.chat_handler = handler
    if how == "block":
        with llm.request("a") as handle:
            stream = llm.create_chat_completion([], stream=True)
        assert not handle.reports
    else:
        salt = {"cache_salt": "a"} if how == "keyword" else {}
        stream = llm.create_chat_completion([], stream=True, **salt)
    with llm.request("b"):
        list(stream)
    if how == "block":
        assert len(handle.reports) == 2
    assert salts_that_know(llm) == ({""} if how == "none" else {"a"})


def test_requests_inside_another_one_have_its_salt(llm: Any) -> None:
    refused: list[str] = []

    def process(ids: Any, scores: Any) -> Any:
        if not refused:
            with llm.request(), llm.request("a"):
                llm.create_completion(OTHER, max_tokens=1)
            for attempt in (
                lambda: llm.request("b"),
                lambda: llm.create_completion(OTHER, cache_salt="b"),
                lambda: next(outside),
                lambda: next(completion),
            ):
                with pytest.raises(LlamaHybridError, match="salt") as error:
                    attempt()
                refused.append(str(error.value))
        return scores

    with llm.request("b"):
        outside = llm.generate(WORDS[:20])
        completion = llm.create_completion(WORDS[:20], stream=True)
    llm.create_completion(
        PROMPT, cache_salt="a", max_tokens=1, logits_processor=LogitsProcessorList([process])
    )
    assert len(refused) == 4
    assert salts_that_know(llm, OTHER) == {"a"}
