"""Upstream's `eval` and `generate`: overlong input is refused, decodes by other code are noticed."""

import ctypes
from array import array
from collections import deque
from itertools import chain

import llama_cpp
import numpy as np
import pytest
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from llamahybrid import Llama
from llamahybrid.errors import ContextOverflow, DecodeError
from tests.conftest import take

PROMPT = [(7 * i + 1) % 200 for i in range(80)]
OTHER = [(11 * i + 5) % 200 for i in range(50)]


@pytest.mark.parametrize(("kept", "others", "more"), [(50, [], OTHER), (80, OTHER[:40], [4])])
def test_tokens_removed_or_replaced_by_hand_are_decoded_right(open_model, fresh, kept, others, more):
    llm = open_model()
    llm.eval(PROMPT)
    llm.n_tokens = kept
    first = kept - len(others)
    llm.input_ids[first:kept] = others
    llm.eval(more)
    assert llm.sample(temp=0.0) == fresh([*PROMPT[:first], *others, *more], 1)[0]


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "error"),
    [([1] * 600, ContextOverflow), ([-1], DecodeError), ([10**6], DecodeError), ([2**40], DecodeError)],
    ids=["too many", "below zero", "no such token", "no number of the library"],
)
def test_refused_tokens_change_nothing(open_model, more, error):
    llm = open_model()
    with pytest.raises(ContextOverflow):
        take(llm, [])
    take(llm, PROMPT)
    for ask in (llm.eval, lambda tokens: take(llm, tokens)):
        with pytest.raises(error):
            ask([*PROMPT, *more])
    take(llm, PROMPT)
    assert llm.last_request.cached == len(PROMPT)


@pytest.mark.parametrize("cls", [Llama, llama_cpp.Llama])
@pytest.mark.parametrize("wrong", [{"temp": "hot"}, {"top_k": 2.5}, {"grammar": "no grammar"}, {"tokens": 5}])
def test_wrong_arguments_change_nothing(open_model, cls, wrong):
    llm = open_model(cls=cls)
    llm.eval(OTHER)
    with pytest.raises((TypeError, AttributeError, ctypes.ArgumentError)):
        next(llm.generate(**{"tokens": PROMPT, **wrong}))
    assert llm._input_ids.tolist() == OTHER


def test_generating_to_the_end_of_the_context(open_model, fresh):
    llm = open_model(n_ctx=256)
    prompt = [(7 * i + 1) % 200 for i in range(250)]
    generator = llm.generate(prompt, temp=0.0)
    answer = [next(generator) for _ in range(7)]
    with pytest.raises(ContextOverflow):
        next(generator)
    assert answer == fresh(prompt, 7, n_ctx=256)
    assert take(llm, PROMPT) == fresh(PROMPT)


# -- what others did -------------------------------------------------------------------------------


def test_upstreams_reset_of_the_counters_is_no_change_of_memory(open_model, capfd):
    llm = open_model(verbose=True)
    llm.create_completion(PROMPT, max_tokens=2)
    llm.create_completion(PROMPT, max_tokens=2)
    assert llm.last_request.cached == len(PROMPT)


# -- what is no token --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens",
    ["12", b"12", 5, [5.0, 6.9], ["5"], [5, None], np.array([5.7]), np.array([True]), [[5.5]]],
    ids=repr,
)
def test_prompts_that_are_no_integers_are_refused(open_model, tokens):
    llm = open_model("llama")
    for ask in (llm.eval, lambda tokens: next(llm.generate(tokens))):
        with pytest.raises(TypeError):
            ask(tokens)


@pytest.mark.parametrize(
    "tokens",
    [(5, 6), np.array([5, 6], np.uint8), array("i", [5, 6]), deque([5, 6]), [np.int32(5), 6]],
    ids=repr,
)
def test_integers_of_any_kind_are_tokens(open_model, tokens):
    llm = open_model("llama")
    llm.eval(tokens)
    assert llm.input_ids[: llm.n_tokens].tolist() == [5, 6]
    assert take(llm, tokens) == take(llm, [5, 6])


@pytest.mark.parametrize("cls", [Llama, llama_cpp.Llama])
def test_a_prompt_may_come_from_an_iterator(open_model, fresh, cls):
    llm = open_model("llama", cls)
    assert take(llm, chain(PROMPT, OTHER)) == fresh(PROMPT + OTHER, arch="llama")
    with pytest.raises((TypeError, ValueError)):
        next(llm.generate(iter("12")))


@pytest.mark.parametrize("n_parallel", [1, 2])
def test_without_tokens_there_is_nothing_to_sample_as_upstream_says(open_model, n_parallel):
    with pytest.raises(AssertionError):
        open_model("llama", n_parallel=n_parallel).sample()


# -- rows of logits ----------------------------------------------------------------------------------


def test_rows_of_one_request_are_not_another_ones(open_model):
    llm = open_model(n_batch=64, draft_model=LlamaPromptLookupDecoding(num_pred_tokens=4, max_ngram_size=2))
    first = [*PROMPT[:10], *((11 * i + 5) % 200 for i in range(60))]
    second = [*PROMPT[:40], *((13 * i + 9) % 200 for i in range(30))]
    asked = {"max_tokens": 3, "temperature": 0.0}
    for prompt, rows in ((second, {}), (first, {"logprobs": 1}), (second, {})):
        llm.create_completion(prompt, **asked, **rows)
    stock = open_model(cls=llama_cpp.Llama, n_batch=64, logits_all=True)
    ours, want = (
        each.create_completion(second, logprobs=1, **asked)["choices"][0]["logprobs"] for each in (llm, stock)
    )
    assert np.allclose(ours["token_logprobs"], want["token_logprobs"], atol=1e-3)


@pytest.mark.parametrize("arch", ["qwen35", "gemma3"])
def test_logprobs_of_a_prompt_are_those_of_its_own_tokens(open_model, arch):
    """Prompts of one length in the same place, one after the other."""
    llm = open_model(arch, logits_all=True, stock_logprobs=True)
    stock = open_model(arch, llama_cpp.Llama, logits_all=True)
    asked = {"max_tokens": 2, "temperature": 0.0, "logprobs": 1, "echo": True}
    for text in ("the tea is hot, I think", "the ink is dry, I think", "the tea was hot, I think", "the tea"):
        ours, want = (
            each.create_completion(text, **asked)["choices"][0]["logprobs"]["token_logprobs"]
            for each in (llm, stock)
        )
        assert np.allclose(ours[1:], want[1:], atol=1e-3)
