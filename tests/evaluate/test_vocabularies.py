"""A vocabulary that went through JSON says what the model's own would."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import llama_cpp
import pytest

from llamahybrid.evaluate import vocabularies
from llamahybrid.evaluate.speech import Speech, Vocabulary
from llamahybrid.evaluate.vocabularies import from_json, known_words


@pytest.fixture
def llm(tiny_model: Callable[..., Path]) -> Iterator[llama_cpp.Llama]:
    llm = llama_cpp.Llama(str(tiny_model("llama")), vocab_only=True, verbose=False)
    yield llm
    llm.close()


def test_a_vocabulary_is_the_same_after_a_way_through_json(llm: llama_cpp.Llama) -> None:
    again = from_json(json.loads(json.dumps(known_words(llm))))
    assert again == Vocabulary.of(llm, vocabularies.MOST)
    assert hash(again) == hash(Vocabulary.of(llm, vocabularies.MOST))
    assert Speech(again, 1).message(30) == Speech(llm, 1).message(30)


def test_no_more_words_than_are_needed_are_handed_over(
    llm: llama_cpp.Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabularies, "MOST", 12)
    assert known_words(llm)["words"] == Vocabulary.of(llm).words[:12]
