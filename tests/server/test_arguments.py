"""From bodies to arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llamahybrid.server.arguments import AtLeast, arguments, biases
from llamahybrid.server.bodies import ChatCompletionRequest, CompletionRequest
from llamahybrid.server.errors import Refusal


class Vocabulary:
    """A model of 100 tokens, one for each letter."""

    def n_vocab(self) -> int:
        return 100

    def token_eos(self) -> int:
        return 3

    def tokenize(self, text: bytes, **_: Any) -> list[int]:
        return [letter - 64 for letter in text]


LLM: Any = Vocabulary()


def test_what_is_no_argument_is_left_out() -> None:
    body = CompletionRequest(prompt=["a"], cache_salt="", stream=True, presence_penalty=None, n=2, user="me")
    told = arguments(LLM, body, "alias")
    assert told["prompt"] == "a"
    assert told["model"] == "alias"
    assert (told["n"], told["stream"], told["presence_penalty"]) == (2, True, 0.0)
    assert not {"best_of", "user", "cache_salt", "stream_options", "id_slot", "min_tokens"} & set(told)
    chat = ChatCompletionRequest(messages=[{"role": "user", "content": "hi"}], grammar="root ::= []")
    assert arguments(LLM, chat, "alias")["grammar"]._grammar == "root ::= []"


def bias(said: dict[str, float], kind: Any = None) -> dict[int, float]:
    return biases(LLM, CompletionRequest(prompt="a", logit_bias=said, logit_bias_type=kind))


def test_biases() -> None:
    assert bias({"5": 1.5, "99": -100}) == {5: 1.5, 99: -100}
    assert bias({"AB": 2}, "tokens") == {1: 2, 2: 2}


@pytest.mark.parametrize("name", ["100", "-1", "x", "", "1.5", "9" * 30, "\uff15", "+5"])
def test_a_bias_is_of_a_token_that_there_is(name: str) -> None:
    with pytest.raises(Refusal) as refused:
        bias({name: 1})
    assert refused.value.param == "logit_bias"


def test_a_bias_stays_a_number() -> None:
    with pytest.raises(Refusal):
        bias({"5": 1e38})


def test_an_answer_does_not_end_before_it_has_its_tokens_and_nothing_becomes_infinite() -> None:
    least, scores = AtLeast(2, 3), np.ones(10, np.single)
    ids = np.arange(50, dtype=np.intc)
    for n, ends in (
        (5, False),
        (6, False),
        (7, True),
        (5, False),
        (6, False),
        (7, True),
        (4, False),
        (6, True),
    ):
        told = least(ids[:n], scores)
        assert (told[3] > 0) == ends, n
        assert np.isfinite(told).all()
        assert (scores == 1).all()
