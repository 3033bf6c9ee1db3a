"""Prompts of requests: their bounds, and their tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import llama_cpp
import pytest
from llama_cpp.llama_tokenizer import LlamaTokenizer

from llamahybrid import tiny
from llamahybrid.errors import ContextOverflow
from llamahybrid.llama import Llama
from llamahybrid.server import prompts
from llamahybrid.server.loading import load
from llamahybrid.server.prompts import PIECE_BYTES, PromptRules, PromptTooLong, detokenized, prompt_rules
from llamahybrid.server.settings import ModelSettings
from llamahybrid.tiny.vocab import vocabulary
from tests.lab.gguf_edits import with_bos, with_name

TinyModel = Callable[..., Path]


def opened(model: Path) -> Llama:
    return load(ModelSettings(model=str(model), n_ctx=512, n_threads=1, n_threads_batch=1))


@pytest.fixture
def llm(tiny_model: TinyModel) -> Iterator[Llama]:
    with closing(opened(tiny_model("qwen35"))) as llm:
        yield llm


def test_a_prompt_may_be_too_long_for_the_operator(llm: Llama) -> None:
    token = prompt_rules.set(PromptRules(3))
    try:
        with pytest.raises(PromptTooLong, match="takes 3"):
            llm.create_completion("one two three four", max_tokens=2)
        assert llm.create_completion([5, 6, 7], max_tokens=2)["usage"]["prompt_tokens"] == 3
    finally:
        prompt_rules.reset(token)
    assert llm.create_completion("one two three four", max_tokens=2)


@pytest.mark.parametrize("text", ["<|im_start|>", "x", "a longer word ", "\u00e9"])
def test_a_prompt_that_cannot_fit_is_not_tokenized_to_its_end(
    llm: Llama, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    told, lengths = text.encode() * 100_000, list[int]()
    inner = llama_cpp.Llama.tokenize

    def tokenize(self: Llama, text: bytes, *args: Any, **kwargs: Any) -> list[int]:
        text.decode()
        lengths.append(len(text))
        return inner(self, text, *args, **kwargs)

    monkeypatch.setattr(llama_cpp.Llama, "tokenize", tokenize)
    token = prompt_rules.set(PromptRules())
    try:
        assert len(llm.tokenize(b"x" * 8 * 512, special=True)) > 512, "upstream refuses it"
        lengths.clear()
        with pytest.raises(ContextOverflow, match="maximum context length is 512"):
            llm.tokenize(told, special=True)
    finally:
        prompt_rules.reset(token)
    assert max(lengths) < len(told) // 2
    lengths.clear()
    assert len(llm.tokenize(told[:90_000], special=True)) > 0, "it is no prompt"
    assert sum(lengths) == 90_000
    assert (max(lengths) < 2 * PIECE_BYTES) is (text == "<|im_start|>"), "one call takes their number squared"


def phi3(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a model whose control tokens take the white space behind them away (llama-vocab.cpp, phi-3)."""
    words = vocabulary("tiny")
    named = {"<think>": "<unk>", "<tool_call>": "<s>", "</tool_call>": "</s>"}
    tokens: Any = words.metadata["tokenizer.ggml.tokens"]
    renamed = {"tokenizer.ggml.tokens": [named.get(token, token) for token in tokens]}
    words = replace(words, metadata={**words.metadata, **renamed})
    monkeypatch.setattr(tiny, "vocabulary", lambda _: words)
    return with_name(tiny.make("qwen35", folder / "tiny.gguf"), folder / "phi.gguf", "phi-3")


@pytest.mark.parametrize("kind", ["plain", "bos", "white space goes with control tokens"])
def test_tokens_of_pieces_are_upstreams(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model, chance = tiny_model("qwen35"), random.Random(kind)
    if kind == "bos":
        model = with_bos(model, tmp_path / "bos.gguf")
    elif kind != "plain":
        model = phi3(tmp_path, monkeypatch)
    words = [
        b"<|im_start|>",
        b"<|im_end|>",
        b"</think>",
        b"</s>",
        b"<s>",
        b"<|im",
        b"_end|>",
        b" ",
        b"\n",
        b"a\xc3",
    ]
    monkeypatch.setattr(prompts, "FEW_MARKERS", 3)
    monkeypatch.setattr(prompts, "PIECE_BYTES", 30)
    with closing(opened(model)) as llm:
        for _ in range(200):
            text = b"".join(chance.choices(words, k=chance.randrange(1, 100)))
            for add_bos, special in ((True, True), (False, True), (True, False)):
                expected = llama_cpp.Llama.tokenize(llm, text, add_bos, special)
                assert llm.tokenize(text, add_bos, special=special) == expected, text
                text = llama_cpp.Llama.detokenize(llm, expected, special=special)
                assert detokenized(llm, expected, special) == text


def test_a_text_begins_and_ends_once_where_the_vocabulary_asks_for_no_bos(
    llm: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of WPM: both are added whatever `add_bos_token` says (src/llama-vocab.cpp, tokenize)."""
    inner = LlamaTokenizer.tokenize

    def wpm(self: Any, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        middle: list[int] = inner(self, text, False, special)
        return [1, *middle, 2] if add_bos else middle

    monkeypatch.setattr(LlamaTokenizer, "tokenize", wpm)
    text = b"a<|im_end|>" * 3 * PIECE_BYTES
    assert llm.tokenize(text, add_bos=True, special=True) == wpm(llm.tokenizer_, text)


def test_closing_waits_for_a_look_at_the_vocabulary(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    began, may, attribute = Event(), Event(), llama_cpp.llama_vocab_get_attr

    def slow(*given: Any) -> int:
        began.set()
        may.wait(60)
        return int(attribute(*given))

    monkeypatch.setattr(prompts.llama_cpp, "llama_vocab_get_attr", slow)
    text = b"a<|im_end|>" * 3 * PIECE_BYTES
    reading = Thread(target=llm.tokenize, args=(text,), kwargs={"special": True}, daemon=True)
    reading.start()
    assert began.wait(60)
    closing_ = Thread(target=llm.close, daemon=True)
    closing_.start()
    closing_.join(0.3)
    waits = closing_.is_alive()
    may.set()
    for thread in (reading, closing_):
        thread.join(60)
    assert waits
    assert not closing_.is_alive()
