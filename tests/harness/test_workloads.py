"""Workloads are the conversations that their names promise; answers are made up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict
from itertools import count, pairwise

import llama_cpp
import pytest

from llamahybrid.harness.conversation import Answer, Conversation, Request
from llamahybrid.harness.oracle import common_prefix
from llamahybrid.harness.targets.child import WORDS
from llamahybrid.harness.workloads import tokens
from llamahybrid.harness.workloads.speech import Speech, Vocabulary
from tests.conftest import TinyModel
from tests.lab.in_process import played
from tests.lab.pretend import PretendSpeech, made_up

Start = Callable[[Speech], Conversation]
Tokens = tuple[int, ...]


def spelled(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def requests(start: Start) -> Iterator[tuple[Request, Answer]]:
    numbers = count(1)

    def ask(request: Request) -> tuple[tuple[Request, Answer], Answer]:
        answer = Answer(made_up(request.tokens, request.max_tokens, next(numbers)), spelled)
        return (deepcopy(request), answer), answer

    return played(start(PretendSpeech()), ask)


def prompts(start: Start) -> list[tuple[Tokens, Tokens]]:
    return [(tuple(request.tokens), tuple(answer.tokens)) for request, answer in requests(start)]


def test_stripped_history_drops_the_thinking_of_each_answer() -> None:
    for (before, answer), (after, _) in pairwise(prompts(tokens.thinking_stripped)):
        kept = common_prefix(before, after)
        assert len(before) - kept == 2, "the mark of thinking, and the line's end behind it"
        assert after[kept : kept + len(answer[60:])] == answer[60:]


def test_published_prompts_have_their_lengths() -> None:
    assert tuple(len(prompt) for prompt, _ in prompts(tokens.five_turns)) == tokens.FIVE_TURNS
    (first, answer), (second, _) = prompts(tokens.long_then_followup)
    assert (len(answer), len(second), common_prefix(first + answer, second)) == (300, 430, 96)
    one, two, three = (prompt for prompt, _ in prompts(tokens.long_prompt))
    assert one == two
    assert len(one) == len(three) == tokens.LONG_PROMPT
    assert 24_000 < common_prefix(one, three) < 26_000


@pytest.mark.parametrize("vocab", ["tiny", "llama-spm"])
def test_speech_uses_the_vocabulary_that_a_process_hands_over(tiny_model: TinyModel, vocab: str) -> None:
    model = tiny_model("llama", vocab=vocab, embd=32, layers=2, heads=1)
    llm = llama_cpp.Llama(str(model), vocab_only=True, verbose=False)
    known = Vocabulary.from_json(json.loads(json.dumps(asdict(Vocabulary.of(llm, WORDS)))))
    assert known == Vocabulary.of(llm, WORDS)
    speech = Speech(known)
    message, reply = speech.message(20), speech.reply(thinking=True)
    assert (len(message), len(reply)) == (20, 5)
    assert reply[0] != reply[3], "thinking has a mark of its own"
    assert not {*speech.words(5000), *message, *reply} & {llm.token_bos(), llm.token_eos()}
    few = Speech(Vocabulary.of(llm, 6))
    assert few.spoken([*known.words, *known.unspoken]) == list(known.words), "text is more than its words"
    llm.close()
