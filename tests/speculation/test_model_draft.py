"""A second model as the draft: it follows what is said, and takes back what was not."""

from __future__ import annotations

import llama_cpp
import numpy as np
import pytest

from llamahybrid import ModelDraft
from llamahybrid.errors import LlamaHybridError
from llamahybrid.harness.counters import DecodeCounter
from tests.lab.draft_fuzz import EveryDraft

from .conftest import PROMPT, take

KINDS = (
    "qwen35",
    "gemma3",
    *(pytest.param(arch, marks=pytest.mark.full) for arch in ("llama", "mamba", "jamba")),
)


def ids(tokens):
    return np.array(tokens, dtype=np.intc)


@pytest.fixture
def pair(open_model):
    """`pair(arch, of)`: a `Llama` whose draft model is another, and that one."""

    def opener(arch="qwen35", of="qwen35", count=4, **more):
        second = open_model(of)
        llm = open_model(arch, draft_model=ModelDraft(second, count), **more)
        llm.slots.all[0].drafts.policy = EveryDraft(llm.runner.meter)
        return llm, second

    return opener


@pytest.mark.parametrize("arch", KINDS)
def test_a_model_that_says_the_same_is_always_right(pair, fresh, arch):
    llm, second = pair(arch, arch)
    counter = DecodeCounter(second)
    assert take(llm, PROMPT, 40) == fresh(PROMPT, 40, arch)
    report = llm.last_request
    assert report.drafted - report.accepted <= 1, "the last draft was not looked at to its end"
    assert report.steps == 8
    assert counter.take() <= len(PROMPT) + 40


@pytest.mark.parametrize("of", KINDS)
@pytest.mark.parametrize("planes", [0, 4])
def test_a_model_that_says_other_things_is_taken_back(pair, fresh, of, planes):
    arch = "qwen35"
    llm, second = pair(arch, of, draft_planes=planes)
    counter = DecodeCounter(second)
    assert take(llm, PROMPT, 30) == fresh(PROMPT, 30, arch)
    assert counter.take() <= len(PROMPT) + 30 * 5, "it follows from where it was, and does not start again"
    other = [*PROMPT[:40], 7, 8, 9]
    assert take(llm, other, 10) == fresh(other, 10, arch)


def test_its_guess_is_its_own_greedy_text(open_model, fresh):
    draft = ModelDraft(open_model("jamba"), 6)
    text = [*PROMPT, *fresh(PROMPT, 12, "jamba")]
    for n in (80, 81, 84, 82, 40, 83):
        draft.at_most = 6
        assert draft(ids(text[:n])).tolist() == fresh(text[:n], 6, "jamba")
    draft.at_most = 2
    assert len(draft(ids(text[:82]))) == 2


def test_the_end_of_its_prompt_is_stored(open_model):
    second = open_model("jamba")
    draft, branch = ModelDraft(second, 3), [*PROMPT[:40], *PROMPT[:30]]
    for text in (PROMPT, branch, PROMPT):
        draft(ids(text))
    counter = DecodeCounter(second)
    draft(ids(branch))
    assert counter.take() == 2, "its guess alone"


def test_histories_of_equal_length_are_not_mistaken_for_each_other(open_model, fresh):
    draft = ModelDraft(open_model("jamba"), 3)
    one, two = PROMPT[:30], [*PROMPT[:29], 9]
    other = (fresh(two, 1, "jamba")[0] + 1) % 200
    for text in (one, two, [*two, other], one, [*one, other], two):
        assert draft(ids(text)).tolist() == fresh(text, 3, "jamba")


def test_a_model_cannot_draft_for_itself(open_model):
    llm = open_model()
    llm.draft_model = ModelDraft(llm)
    llm.slots.all[0].drafts.policy = EveryDraft(llm.runner.meter)
    with pytest.raises(LlamaHybridError, match="second Llama"):
        take(llm, PROMPT, 5)


def test_a_draft_model_needs_its_cache(open_model):
    with pytest.raises(LlamaHybridError, match="prompt cache"):
        ModelDraft(open_model(prompt_cache=False))


def test_there_is_no_guess_behind_a_full_context_or_an_unknown_token(open_model):
    draft = ModelDraft(open_model(n_ctx=256), 4)
    for text, guessed in (((PROMPT * 4)[:256], 0), ([*PROMPT, draft.llm.n_vocab()], 0), (PROMPT, 4)):
        assert len(draft(ids(text))) == guessed


def test_cleared_memory_of_a_draft_model_is_filled_again(open_model, fresh):
    draft = ModelDraft(open_model(), 1)
    text = [*PROMPT, *draft(ids(PROMPT)).tolist()]
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(draft.llm.ctx), True)
    assert draft(ids(text)).tolist() == fresh(text, 1)
