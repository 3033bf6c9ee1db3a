"""Speech in any vocabulary: marks where it has them, ordinary tokens where it has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import llama_cpp
import pytest

from llamahybrid.evaluate.speech import Speech

SMALL = {"embd": 32, "layers": 2, "heads": 1}


@pytest.fixture(params=["tiny", "llama-spm"])
def llm(tiny_model: Callable[..., Path], request: pytest.FixtureRequest) -> Iterator[llama_cpp.Llama]:
    """Two vocabularies; the second has no control token but those that begin and end a text."""
    llm = llama_cpp.Llama(
        str(tiny_model("llama", vocab=request.param, **SMALL)), vocab_only=True, verbose=False
    )
    llm.vocab = request.param
    yield llm
    llm.close()


def control(llm: llama_cpp.Llama, token: int) -> bool:
    attributes = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
    vocabulary = llama_cpp.llama_model_get_vocab(llm.model)
    return bool(llama_cpp.llama_vocab_get_attr(vocabulary, token) & attributes)


def test_the_same_seed_speaks_the_same_words(llm: llama_cpp.Llama) -> None:
    assert Speech(llm, 1).words(50) == Speech(llm, 1).words(50) != Speech(llm, 2).words(50)
    assert Speech(llm, 1).sentence(9) == Speech(llm, 1).sentence(9)
    assert len(Speech(llm).sentence(9).split()) == 9


@pytest.mark.parametrize("marked", [True, False])
def test_only_marks_are_control_tokens_where_there_are_marks(llm: llama_cpp.Llama, marked: bool) -> None:
    speech = Speech(llm, marked=marked)
    message, reply = speech.message(20), speech.reply(thinking=True)
    assert len(message) == 20
    assert (len(reply), len(speech.reply())) == (5, 3)
    assert reply[:3] == speech.reply()
    has_marks = marked and llm.vocab == "tiny"
    assert [control(llm, token) for token in message] == [has_marks] + [False] * 19
    assert [control(llm, token) for token in reply] == [has_marks, False, False, has_marks, False]
    assert message[0] == reply[0] != reply[3], "thinking has a mark of its own"
    assert speech.message(5, "system")[:3] != message[:3]


def test_what_ends_a_text_is_never_said(llm: llama_cpp.Llama) -> None:
    speech = Speech(llm)
    said = {*speech.words(5000), *speech.message(30), *speech.reply(thinking=True)}
    assert not said & {llm.token_bos(), llm.token_eos()}


def test_only_ordinary_tokens_are_shown_as_text(llm: llama_cpp.Llama) -> None:
    speech = Speech(llm)
    words = speech.words(10)
    assert speech.spoken([llm.token_bos(), *words[:5], llm.token_eos(), *words[5:]]) == words
