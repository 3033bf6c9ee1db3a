"""An answer says the same streamed as whole, ends where it was asked to, and no character of it is lost."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_cpp.llama_tokenizer import LlamaTokenizer

from llamahybrid import Llama

Opened = Callable[..., Any]
OPTIONS: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "verbose": False, "logits_all": True}
PROMPT = "What is it?"
MESSAGES = [{"role": "user", "content": PROMPT}]
STRINGS = ["a", "b", "ab", "abc", " ", "é", "€", "😀", "b€", "é😀"]
BROKEN = [b"\xff", b"\xc3", b"\xe2", b"\xe2\x82", b"\xf0\x9f", b"\x82"]

saids = st.lists(st.sampled_from([*(s.encode() for s in STRINGS), *BROKEN]), max_size=7).map(b"".join)
stops = st.lists(st.sampled_from(STRINGS), max_size=3)
asked = st.fixed_dictionaries(
    {"max_tokens": st.one_of(st.none(), st.integers(1, 12)), "stop": stops},
    optional={
        "logprobs": st.integers(0, 3),
        "echo": st.booleans(),
        "suffix": st.sampled_from(["", "é"]),
    },
)


class Says:
    """A logits processor that has a model say these bytes, a token each, and then end."""

    def __init__(self, llm: Llama, said: bytes) -> None:
        spelt = {llm.detokenize([token]): token for token in range(256)}
        self._tokens = [spelt[bytes([byte])] for byte in said]
        self._end = llm.token_eos()
        self._prompt: int | None = None

    def __call__(self, ids: Any, scores: Any) -> Any:
        self._prompt = len(ids) if self._prompt is None else self._prompt
        n = len(ids) - self._prompt
        scores[:] = -100.0
        scores[self._tokens[n] if n < len(self._tokens) else self._end] = 100.0
        return scores


def says(llm: Llama, said: bytes) -> llama_cpp.LogitsProcessorList:
    return llama_cpp.LogitsProcessorList([Says(llm, said)])


class Joined:
    """The text of a completion, or of all chunks of one."""

    def __init__(self, made: Any) -> None:
        chunks = [made] if isinstance(made, dict) else list(made)
        choices = [each for chunk in chunks for each in chunk["choices"]]
        self.text = "".join(choice["text"] for choice in choices)
        (self.finish_reason,) = [c["finish_reason"] for c in choices if c["finish_reason"]]
        told = [c["logprobs"] for c in choices if c["logprobs"]]
        self.logprobs = {name: [v for each in told for v in each[name]] for each in told[:1] for name in each}
        assert choices[-1]["finish_reason"]
        assert len({chunk["id"] for chunk in chunks}) == 1


@pytest.fixture(scope="module", params=[1, 2])
def llm(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Iterator[Llama]:
    with closing(Llama(str(tiny_model("qwen35")), n_parallel=request.param, **OPTIONS)) as made:
        yield made


@pytest.fixture(scope="module")
def stock(tiny_model: Callable[..., Path]) -> Iterator[llama_cpp.Llama]:
    with closing(llama_cpp.Llama(str(tiny_model("qwen35")), **OPTIONS)) as made:
        yield made


def logprobs_near(ours: Any, upstreams: Any) -> bool:
    """They are of the same tokens, and within what batches of other sizes make of them."""
    theirs = upstreams["choices"][0]["logprobs"]
    numbers = ours["token_logprobs"], pytest.approx(theirs["token_logprobs"], abs=1e-3)
    return ours["tokens"] == theirs["tokens"] and bool(numbers[0] == numbers[1])


# -- streamed and whole --------------------------------------------------------------------------------


@settings(max_examples=70)
@given(said=saids, options=asked)
def test_stream_has_the_text_of_the_whole_answer(
    llm: Llama, stock: llama_cpp.Llama, said: bytes, options: dict[str, Any]
) -> None:
    processor = says(llm, said)
    upstreams = stock.create_completion(PROMPT, logits_processor=says(stock, said), **options)
    whole = llm.create_completion(PROMPT, logits_processor=processor, **options)
    joined = Joined(llm.create_completion(PROMPT, logits_processor=processor, stream=True, **options))
    (choice,) = whole["choices"]
    echo = PROMPT if options.get("echo") else ""
    assert {**choice, "logprobs": None} == {**upstreams["choices"][0], "logprobs": None}
    if "logprobs" not in options or not echo:  # with both, the token that ends an answer is scored, too
        assert whole["usage"]["completion_tokens"] == upstreams["usage"]["completion_tokens"]
    assert (echo + joined.text, joined.finish_reason) == (choice["text"], choice["finish_reason"])
    if "logprobs" not in options:
        assert choice["logprobs"] is None
        assert joined.logprobs == {}
        return
    if echo:  # those of the prompt, too: see test_logprobs.py
        return
    theirs = choice["logprobs"]
    assert theirs == upstreams["choices"][0]["logprobs"] or logprobs_near(theirs, upstreams)
    if theirs["tokens"]:
        assert {name: joined.logprobs[name] for name in ("tokens", "text_offset")} == {
            name: theirs[name] for name in ("tokens", "text_offset")
        }
        assert joined.logprobs["token_logprobs"] == pytest.approx(theirs["token_logprobs"], abs=1e-4)
        assert [set(top) for top in joined.logprobs["top_logprobs"]] == [
            set(top) for top in theirs["top_logprobs"]
        ]


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), options=asked)
def test_stream_of_sampled_tokens_has_the_text_of_the_whole_answer(
    llm: Llama, seed: int, options: dict[str, Any]
) -> None:
    options = {**options, "max_tokens": options["max_tokens"] or 30, "seed": seed, "temperature": 5.0}
    options |= {"top_p": 1.0, "min_p": 0.0, "top_k": 0, "echo": False}
    whole = llm.create_completion(PROMPT, **options)
    joined = Joined(llm.create_completion(PROMPT, stream=True, **options))
    (choice,) = whole["choices"]
    assert (joined.text, joined.finish_reason) == (choice["text"], choice["finish_reason"])


@pytest.mark.parametrize("more", [{}, {"logprobs": 2}])
def test_chunks_of_plain_text_are_those_of_upstream(open_model: Opened, more: dict[str, int]) -> None:
    """Plain text before a stop string, chunk for chunk."""
    told = []
    for cls in (llama_cpp.Llama, Llama):
        llm = open_model(cls=cls, logits_all=True)
        options: dict[str, Any] = {"max_tokens": 20, "stop": ["two"], "stream": True, **more}
        chunks = list(llm.create_completion(PROMPT, logits_processor=says(llm, b"one, two"), **options))
        assert {chunk["model"] for chunk in chunks} == {llm.model_path}
        assert all(chunk["id"].startswith("cmpl-") and chunk["created"] > 1e9 for chunk in chunks)
        told.append([{**chunk, "id": "", "created": 0, "model": ""} for chunk in chunks])
    ours, theirs = told[1], told[0]
    assert ours[-1] == theirs[-1]
    for our, their in zip(ours[: len("one, ")], theirs[: len("one, ")], strict=True):
        our, their = our["choices"][0], their["choices"][0]
        odds = our.pop("logprobs"), their.pop("logprobs")
        assert our == their
        if more:
            (top,), (their_top,) = (each.pop("top_logprobs") for each in odds)
            assert top == pytest.approx(their_top, abs=1e-4)
            assert odds[0].pop("token_logprobs") == pytest.approx(odds[1].pop("token_logprobs"), abs=1e-4)
        assert odds[0] == odds[1]


# -- where upstream does not look ------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_fills_the_context_and_ends_inside_a_character(open_model: Opened, stream: bool) -> None:
    llm = open_model(n_ctx=64)
    room = llm.n_ctx() - len(llm.tokenize(PROMPT.encode(), add_bos=False, special=True))
    said = b"a" * (room - 1) + b"\xf0\x9f\x98\x80"
    made = llm.create_completion(PROMPT, logits_processor=says(llm, said), max_tokens=None, stream=stream)
    joined = Joined(made)
    assert (joined.text, joined.finish_reason) == ("a" * (room - 1), "length")
    assert llm.last_request.generated == room + 1


@pytest.mark.parametrize("stream", [False, True])
def test_character_that_ends_behind_the_context_is_whole(open_model: Opened, stream: bool) -> None:
    """A token can be sampled behind the last that fits: upstream does, and so the text is its text."""
    told = []
    for cls in (llama_cpp.Llama, Llama):
        llm = open_model(cls=cls, n_ctx=256)
        room = 256 - len(llm.tokenize(PROMPT.encode(), add_bos=False, special=True))
        options: dict[str, Any] = {"logits_processor": says(llm, b"a" * (room - 1) + "éb".encode())}
        made = llm.create_completion(PROMPT, max_tokens=-1, stream=stream and cls is Llama, **options)
        joined = Joined(made)
        told.append((joined.text, joined.finish_reason))
    assert told == [("a" * (room - 1) + "é", "length")] * 2


def test_text_behind_an_invalid_byte_is_streamed_at_once(open_model: Opened) -> None:
    llm, told = open_model(), []
    for chunk in llm.create_completion(PROMPT, logits_processor=says(llm, b"a\xffbcdef"), stream=True):
        told.append((chunk["choices"][0]["text"], llm.last_request.generated))
    assert [each for each in told if each[0]] == [("a", 1), ("bcd", 5), ("e", 6), ("f", 7)]


def test_beginning_of_a_stop_string_waits_with_its_logprobs(llm: Llama) -> None:
    options: dict[str, Any] = {"stop": ["b€"], "max_tokens": 9, "logprobs": 1, "stream": True}
    chunks = list(
        llm.create_completion(PROMPT, logits_processor=says(llm, "ab€".encode()[:4] + b"d"), **options)
    )
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["text"] for choice in choices] == ["a", "bd", ""]
    assert choices[1]["logprobs"]["tokens"] == ["b", "", "", "d"]


class Whole(LlamaTokenizer):  # type: ignore[misc]
    """Spells a character that is not whole as U+FFFD, as those of `transformers` do."""

    def detokenize(self, tokens: Any, prev_tokens: Any = None, special: bool = False) -> bytes:
        spelt: bytes = super().detokenize(tokens, prev_tokens, special)
        return spelt.decode(errors="replace").encode()


def test_incomplete_character_of_another_tokenizer_waits(
    open_model: Opened,
) -> None:
    llm = open_model()
    processor = says(llm, "a€😀b".encode())
    llm.tokenizer_ = Whole(llm)
    texts = [
        chunk["choices"][0]["text"]
        for chunk in llm.create_completion(PROMPT, logits_processor=processor, stream=True, max_tokens=20)
    ]
    assert "".join(texts) == "a€😀b"


def test_text_is_that_of_an_instances_own_detokenize(open_model: Opened) -> None:
    llm = open_model()
    processor, detokenize = says(llm, b"abc"), llm.detokenize
    llm.detokenize = lambda *args, **options: detokenize(*args, **options).upper()
    for stream in (False, True):
        made = llm.create_completion(PROMPT, logits_processor=processor, stream=stream)
        assert Joined(made).text == "ABC"


# -- ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_users_criterion_ends_an_answer_with_its_text(llm: Llama, stream: bool) -> None:
    processor, prompt = says(llm, "ab€cd".encode()), len(llm.tokenize(PROMPT.encode(), add_bos=False))
    criteria = llama_cpp.StoppingCriteriaList([lambda ids, scores: len(ids) >= prompt + 4])
    made = llm.create_completion(
        PROMPT, logits_processor=processor, stopping_criteria=criteria, stop=["€c"], stream=stream
    )
    joined = Joined(made)
    assert (joined.text, joined.finish_reason) == ("ab", "stop")


def test_a_criterion_that_is_met_with_a_stop_string_has_all_of_the_text(llm: Llama) -> None:
    """As upstream: it is asked once more at the end."""
    options: dict[str, Any] = {"stop": ["b"], "logits_processor": says(llm, b"abcd"), "max_tokens": 9}
    for stream in (False, True):
        asked: list[int] = []

        def third(*_: Any, asked: list[int] = asked) -> bool:
            asked.append(len(asked))
            return len(asked) > 2

        criteria = llama_cpp.StoppingCriteriaList([third])
        made = llm.create_completion(PROMPT, stream=stream, stopping_criteria=criteria, **options)
        joined = Joined(made)
        assert (joined.text, joined.finish_reason) == ("ab", "stop")


def test_a_stream_is_kept_in_upstreams_cache_as_the_whole_answer(open_model: Opened) -> None:
    kept = []
    for stream in (False, True):
        llm = open_model()
        llm.set_cache(llama_cpp.LlamaRAMCache())
        made = llm.create_completion(
            PROMPT, logits_processor=says(llm, "a€b".encode()), max_tokens=20, stream=stream
        )
        list(made)
        kept.append([list(tokens) for tokens in llm.cache.cache_state])
    assert kept[0] == kept[1] != []


def test_wrong_arguments_are_refused_before_the_first_chunk(open_model: Opened) -> None:
    llm = open_model()
    for options in ({"logprobs": 1}, {"stop": ["\ud800"]}):
        with pytest.raises(ValueError):  # noqa: PT011
            next(llm.create_completion(PROMPT, stream=True, **options))
        with pytest.raises(ValueError):  # noqa: PT011
            llm.create_completion(PROMPT, **options)
    with pytest.raises(ValueError, match="exceed context window"):
        next(llm.create_completion([1] * 600, stream=True))


def test_a_streamed_token_takes_few_calls_of_python(open_model: Opened) -> None:
    """In the thread that reads and in the one that decodes: each call delays the next batch."""
    calls = [0]

    def count(frame: Any, event: str, _: Any) -> None:
        calls[0] += event == "call"

    before = threading.getprofile()
    threading.setprofile(count)  # the thread that decodes starts with the first request
    try:
        llm = open_model()

        def ask(most: int, seed: int) -> int:
            options: dict[str, Any] = {"max_tokens": most, "seed": seed, "stream": True}
            options["stop"] = ["\0" * 1000]
            return len(list(llm.create_completion(PROMPT, **options)))

        seed = next(seed for seed in range(100) if ask(120, seed) == 121)
        sys.setprofile(count)
        taken = []
        for most in (40, 120):
            calls[0] = 0
            assert ask(most, seed) == most + 1
            taken.append(calls[0])
    finally:
        sys.setprofile(None)
        threading.setprofile(before)  # type: ignore[arg-type]
    assert taken[1] - taken[0] <= 80 * 80  # checkpoints of the answer included
