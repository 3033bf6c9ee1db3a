"""The text of an answer that grows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import llama_cpp
import numpy as np
import pytest

from llamahybrid.request.answer_text import SHORT, AnswerText

BOS = 7


class Speller:
    """Spells tokens as upstream does, and counts them."""

    def __init__(self) -> None:
        self.spelt = 0

    def __call__(self, tokens: Sequence[int]) -> bytes:
        self.spelt += len(tokens)
        text = b"".join(b" %d" % token if token != BOS else b"" for token in tokens)
        return text[1:] if len(tokens) and tokens[0] == BOS and text[:1] == b" " else text


def test_each_token_of_a_growing_answer_is_spelt_once() -> None:
    spell, answer = Speller(), AnswerText(BOS)
    tokens: list[int] = []
    for token in range(100, 400):
        tokens.append(token)
        assert answer.spell(tokens, spell) == Speller()(tokens)
    assert spell.spelt == 300 + sum(range(SHORT))


def test_a_new_token_is_spelt_once_however_often_upstream_asks_for_it() -> None:
    spell, answer = Speller(), AnswerText(BOS)
    grown = [*range(100, 150)]
    answer.spell(grown, spell)
    for new in (20, 21, BOS, 20):  # a token that comes again later is spelt again: it may be another's
        before = spell.spelt
        if new != BOS:
            grown.append(new)
            assert answer.spell(grown, spell) == Speller()(grown)
        assert [answer.spell([new], spell) for _ in range(2)] == [Speller()([new])] * 2
        assert spell.spelt == before + 1


@pytest.mark.parametrize(
    "other", [[*range(50), 3], [*range(49, -1, -1)], [*range(30)], [BOS, *range(50)], [*range(50)]]
)
def test_what_did_not_grow_from_it_is_spelt_anew(other: list[int]) -> None:
    answer = AnswerText(BOS)
    answer.spell(list(range(50)), Speller())
    assert answer.spell(other, Speller()) == Speller()(other)


def test_a_list_that_was_changed_in_place_is_another_one() -> None:
    answer, tokens = AnswerText(BOS), list(range(50))
    answer.spell(tokens, Speller())
    tokens[3] = 77
    assert answer.spell(tokens, Speller()) == Speller()(tokens)


def test_a_text_that_begins_with_bos_loses_its_space() -> None:
    answer = AnswerText(BOS)
    for n in (1, 2, SHORT, 40):
        tokens = [BOS, *range(10, 10 + n)]
        assert answer.spell(tokens, Speller()) == Speller()(tokens)


def test_a_bos_in_the_middle_takes_no_space_away() -> None:
    answer, tokens = AnswerText(BOS), list(range(50, 80))
    answer.spell(tokens, Speller())
    tokens += [BOS, 60]
    assert answer.spell(tokens, Speller()) == Speller()(tokens)


def test_threads_do_not_disturb_each_other() -> None:
    answer, spell = AnswerText(BOS), Speller()
    answer.spell(list(range(40)), spell)
    other = threading.Thread(target=answer.spell, args=(list(range(60, 120)), Speller()))
    other.start()
    other.join()
    spell.spelt = 0
    answer.spell(list(range(41)), spell)
    assert spell.spelt == 1


def test_a_stream_spells_what_is_new(open_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Per token as much after 300 of them as after 30: counted, not timed."""
    llm = open_model()
    inner, spelt = llm._model.detokenize, [0]

    def counted(tokens: Sequence[int], special: bool = False) -> bytes:
        spelt[0] += len(tokens)
        text: bytes = inner(tokens, special=special)
        return text

    monkeypatch.setattr(llm._model, "detokenize", counted)
    options: dict[str, Any] = {"max_tokens": 330, "temperature": 0.0, "logit_bias": {llm.token_eos(): -1e9}}
    stream = llm.create_completion("Hello", stream=True, **options)
    seen, texts = [], []
    for chunk in stream:
        texts.append(chunk["choices"][0]["text"])
        seen.append(spelt[0])
    assert seen[300] - seen[290] <= seen[50] - seen[40] + 10
    stock = open_model(cls=llama_cpp.Llama)
    assert "".join(texts) == stock.create_completion("Hello", **options)["choices"][0]["text"]


def test_bos_in_the_middle_of_an_answer_takes_no_space_away() -> None:
    answer, tokens = AnswerText(BOS), list(range(100, 150))
    answer.spell(tokens, Speller())
    tokens = [*tokens, BOS, 12]
    assert answer.spell(tokens, Speller()) == Speller()(tokens)


@pytest.mark.parametrize("kind", [np.array, tuple])
def test_ids_that_are_no_list_are_spelt_as_upstream_does(kind: Callable[[list[int]], Any]) -> None:
    answer, tokens = AnswerText(BOS), list(range(100, 150))
    for _ in range(2):
        assert answer.spell(tokens, Speller()) == Speller()(tokens)
        assert answer.spell(kind(tokens), Speller()) == Speller()(tokens)
