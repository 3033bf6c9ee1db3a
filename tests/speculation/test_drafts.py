"""Drafts in a whole `Llama`: the text, the checkpoints and the next turn are those without drafts."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

from llamahybrid.errors import ContextOverflow, RequestCancelled
from llamahybrid.memory.costs import CostMeter
from llamahybrid.prompt_cache.base import Costs
from tests.lab.draft_fuzz import EveryDraft
from tests.lab.reference import Reference, Setting

from .conftest import PROMPT, take

pytestmark = [pytest.mark.patched]

HYBRID = (
    *("qwen35moe", "qwen3next", "qwen4exp", "jamba", "falcon-h1", "plamo2", "granitehybrid", "lfm2"),
    *("lfm2moe", "nemotron_h", "nemotron_h_moe", "kimi-linear", "bailingmoe3", "kimi-k3", "glm5-next"),
    *("minimax-01", "deepseek4"),
)
TIE = 1e-3
"""Two logits nearer than this, as a share of the range, may change places with the batch they come from."""


def same_text(got: list[int], wanted: list[int], model, prompt: list[int]) -> None:
    """Equal, or different from a choice on that was a tie in a context without drafts."""
    parted = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b), None)
    if parted is None:
        return
    reference = Reference(model, Setting("default"))
    row = reference.logits([*prompt, *wanted[:parted]])[0]
    reference.close()
    margin = abs(float(row[got[parted]] - row[wanted[parted]])) / float(np.ptp(row))
    assert margin < TIE, f"token {parted} is another, and that was no tie: {margin:.1e} of the range"


@pytest.mark.parametrize("planes", [0, 4])
@pytest.mark.parametrize("arch", ["qwen35", *(pytest.param(arch, marks=pytest.mark.full) for arch in HYBRID)])
def test_greedy_text_is_the_same_with_and_without_drafts(drafting, fresh, tiny_model, arch, planes):
    wanted = fresh(PROMPT, 40, arch)
    llm = drafting(arch, [*PROMPT, *wanted, *wanted], planes=planes)
    same_text(take(llm, PROMPT), wanted, tiny_model(arch), PROMPT)
    report = llm.last_request
    assert report.generated == 40
    if arch == "deepseek4" and not planes:  # nothing could be taken back
        assert report.drafted == 0
        return
    assert 0 < report.accepted < report.drafted
    assert sum(report.rollbacks.values()) > 0
    assert report.steps < 35
    if planes and llm.runner.live.planes.count:
        assert report.rollbacks["planes"] > 0


@pytest.mark.parametrize(
    "arch", ["gemma3", "mamba", *(pytest.param(a, marks=pytest.mark.full) for a in ("llama", "rwkv7"))]
)
def test_greedy_text_is_the_same_on_other_kinds_of_memory(drafting, fresh, tiny_model, arch):
    for more in ({}, {"swa_full": False, "n_batch": 32, "n_ubatch": 32}):
        wanted = fresh(PROMPT, 40, arch, **more)
        llm = drafting(arch, [*PROMPT, *wanted, *wanted], **more)
        same_text(take(llm, PROMPT), wanted, tiny_model(arch), PROMPT)
        assert llm.last_request.accepted > 0


def test_seeded_text_is_the_same(open_model, drafting):
    plain = open_model()
    wanted = plain.create_completion(PROMPT, max_tokens=30, seed=3, temperature=1.0)["choices"][0]["text"]
    llm = drafting("qwen35", [*PROMPT, *take(plain, PROMPT)])
    got = llm.create_completion(PROMPT, max_tokens=30, seed=3, temperature=1.0)["choices"][0]["text"]
    assert got == wanted
    assert llm.last_request.drafted > 0


@pytest.mark.parametrize("arch", ["qwen35", pytest.param("jamba", marks=pytest.mark.full)])
@pytest.mark.parametrize("planes", [0, 4])
def test_live_tokens_are_those_handed_out(drafting, fresh, arch, planes):
    wanted = fresh(PROMPT, 40, arch)
    llm = drafting(arch, [*PROMPT, *wanted], planes=planes)
    for n in (1, 2, 3, 4, 5, 7, 11, 18, 29):
        assert take(llm, PROMPT, n) == wanted[:n]
        live = llm.runner.live
        assert live.n in (len(PROMPT) + n - 1, len(PROMPT) + n)
        assert live.state.holds(np.array([*PROMPT, *wanted][: live.n]))
        assert llm.n_tokens == live.n
        assert llm.input_ids[: live.n].tolist() == live.tokens.tolist()


def test_the_next_turn_continues_where_the_answer_ended(drafting, fresh):
    wanted = fresh(PROMPT, 24)
    llm = drafting("qwen35", [*PROMPT, *wanted])
    take(llm, PROMPT, 24)
    longer = [*PROMPT, *wanted, 7, 8, 9]
    assert take(llm, longer, 6) == fresh(longer, 6)
    assert llm.last_request.cached >= len(PROMPT) + 23


@pytest.mark.parametrize("planes", [0, 4])
@pytest.mark.parametrize("right", [True, False])
def test_checkpoints_are_taken_on_schedule(open_model, drafting, fresh, monkeypatch, planes, right):
    """Every 64 tokens, also where every draft is wrong."""
    dear = Costs(token_seconds=1e-2, prefill_seconds=1e-2, snapshot_seconds=1e-2, restore_seconds=1e-2)
    monkeypatch.setattr(CostMeter, "costs", lambda meter: dear)
    text = [*PROMPT, *fresh(PROMPT, 160)]
    if right:
        llm = drafting("qwen35", text, planes=planes)
    else:
        wrong = lambda ids: (np.array(text[len(ids) :][:3]) + 1) % 200  # noqa: E731
        llm, _ = unpaced(open_model, wrong, draft_planes=planes)
    stream = llm.generate(PROMPT, temp=0.0)
    next(stream)
    prompts = len(llm.slots.all[0].active.schedule.cuts) + 1
    list(itertools.islice(stream, 150))
    assert (llm.last_request.accepted > 0) is right
    assert llm.last_request.checkpoints - prompts == 2
    assert llm.last_request.redecoded <= 150 * 6
    stream.close()


def test_a_cancelled_answer_keeps_its_progress(drafting, fresh):
    wanted = fresh(PROMPT, 40)
    llm = drafting("qwen35", [*PROMPT, *wanted])
    stream = llm.generate(PROMPT, temp=0.0)
    got = list(itertools.islice(stream, 20))
    llm.cancel()
    with pytest.raises(RequestCancelled):
        next(stream)
    assert got == wanted[:20]
    assert llm.last_request.cancelled
    longer = [*PROMPT, *wanted[:20]]
    assert take(llm, longer, 10) == wanted[20:30]
    assert llm.last_request.left <= 1


# -- what a draft model may do ---------------------------------------------------------------------


class Draft(LlamaDraftModel):
    def __init__(self, guess):
        self.guess = guess
        self.calls = 0

    def __call__(self, input_ids, /, **kwargs):
        self.calls += 1
        return self.guess(input_ids)


def unpaced(open_model, guess, **more):
    draft = Draft(guess)
    llm = open_model(draft_model=draft, **more)
    llm.slots.all[0].drafts.policy = EveryDraft(llm.runner.meter)
    return llm, draft


@pytest.mark.parametrize(
    "guess",
    [
        lambda ids: np.array([3, 5, 10**6, 7]),
        lambda ids: np.array([-1, 5]),
        lambda ids: np.array([[1, 2], [3, 4]], dtype=np.int64),
        lambda ids: np.array([], dtype=np.intc),
        lambda ids: np.arange(5000) % 200,
    ],
    ids=["an id that is none", "a negative id", "of another shape", "nothing", "more than fits"],
)
def test_any_draft_leaves_the_text_right(open_model, fresh, guess):
    llm, draft = unpaced(open_model, guess)
    assert take(llm, PROMPT, 20) == fresh(PROMPT, 20)
    assert draft.calls > 0


def test_a_draft_model_that_fails_leaves_all_sound(open_model, fresh):
    def guess(ids):
        if len(ids) > 90:
            raise ValueError("no idea")
        return ids[:3]

    llm, draft = unpaced(open_model, guess)
    with pytest.raises(ValueError, match="no idea"):
        take(llm, PROMPT, 20)
    draft.guess = lambda ids: ids[:3]
    assert take(llm, PROMPT, 20) == fresh(PROMPT, 20)


def test_the_context_may_be_filled_to_its_end(open_model):
    plain = open_model(n_ctx=256)
    llm, _ = unpaced(open_model, lambda ids: ids[:8], n_ctx=256)
    for one in (plain, llm):
        stream = one.generate(PROMPT * 3, temp=0.0)
        assert len(list(itertools.islice(stream, 256 - 240 + 1))) == 17
        with pytest.raises(ContextOverflow):
            next(stream)
    assert llm.runner.live.n <= 256


def test_draft_model_is_the_given_one(open_model):
    draft = LlamaPromptLookupDecoding()
    llm = open_model(draft_model=draft)
    assert llm.draft_model is draft
    again = pickle.loads(pickle.dumps(llm))
    assert isinstance(again.draft_model, LlamaPromptLookupDecoding)
    assert not again._logits_all
    again.close()
    llm.draft_model = None
    take(llm, PROMPT, 4)
    assert llm.draft_model is None


def test_a_draft_model_may_be_set_later(open_model, fresh):
    llm = open_model()
    llm.draft_model = draft = Draft(lambda ids: ids[:3])
    llm.slots.all[0].drafts.policy = EveryDraft(llm.runner.meter)
    assert take(llm, PROMPT, 20) == fresh(PROMPT, 20)
    assert draft.calls > 0


def test_without_a_prompt_cache_drafts_are_upstreams(open_model, fresh):
    draft = LlamaPromptLookupDecoding(num_pred_tokens=2)
    llm = open_model("llama", draft_model=draft, prompt_cache=False, logits_all=True)
    assert take(llm, PROMPT, 10) == fresh(PROMPT, 10, "llama")
    assert llm.draft_model is draft


# -- upstream's arrays -----------------------------------------------------------------------------


def test_a_draft_needs_no_logits_of_the_prompt(open_model):
    llm = open_model(n_ctx=2048, draft_model=LlamaPromptLookupDecoding(num_pred_tokens=2))
    assert len(llm.scores) == llm.n_batch
    assert len(take(llm, (PROMPT * 9)[:700], 4)) == 4
    assert take(llm, PROMPT, 4)
    assert take(llm, (PROMPT * 9)[:700], 4)
    assert llm.last_request.left <= 1, "rows that nobody asked for must not stand in the way of reuse"


def test_logprobs_are_as_with_logits_all(open_model):
    options = {"max_tokens": 12, "temperature": 0.0, "logprobs": 3}
    wanted = open_model(logits_all=True).create_completion(PROMPT, **options)["choices"][0]["logprobs"]
    llm, _ = unpaced(open_model, lambda ids: ids[:3])
    take(llm, PROMPT, 4)
    for _ in range(2):
        got = llm.create_completion(PROMPT, **options)["choices"][0]["logprobs"]
        assert got["tokens"] == wanted["tokens"]
        assert got["token_logprobs"] == pytest.approx(wanted["token_logprobs"], abs=1e-3)
    assert not llm._logits_all
