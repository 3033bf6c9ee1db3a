"""What one request holds is zeroed for another's sake, at any moment: it goes on, and says the same."""

from itertools import islice

import llama_cpp
import numpy as np
import pytest

from llamahybrid import Llama
from llamahybrid.request.batcher import Batcher
from llamahybrid.request.cells import Cells

OPTIONS = {"n_ctx": 1024, "n_batch": 64, "n_threads": 1, "seed": 7, "verbose": False}
WORDS = np.random.default_rng(3).integers(1, 200, 400).tolist()


@pytest.fixture(params=["qwen35", "mamba", "llama"])
def model(request, tiny_model):
    return str(tiny_model(request.param))


@pytest.fixture
def llm(model):
    llm = Llama(model, n_parallel=2, **OPTIONS)
    yield llm
    llm.close()


@pytest.fixture
def stock(model):
    llm = llama_cpp.Llama(model, **OPTIONS)
    yield lambda prompt, n: take(llm, prompt, n)
    llm.close()


def take(llm, prompt, n):
    return list(islice(llm.generate(prompt, temp=0.0), n))


def zero(live):
    """What is live here goes, as when another slot's text is to be forgotten, and that slot has the row."""
    (other,) = (each for each in live.shared.members if each is not live)
    other.require_zeroing()
    other.empty()
    other.decode((5,), "last")
    return True


def test_in_the_middle_of_a_prompt(llm, stock, monkeypatch):
    free, zeroed = Cells.have, []

    def free_cells(self, tokens, jobs, ticket, live):
        had = free(self, tokens, jobs, ticket, live)
        if live.n == 64 and not zeroed:
            zeroed.append(zero(live))
        return had

    monkeypatch.setattr(Cells, "have", free_cells)
    assert take(llm, WORDS[:150], 6) == stock(WORDS[:150], 6)
    assert zeroed
    assert all(slot.evaluation.runner.live.profile.linear for slot in llm.slots.all), "restores go on"


def test_between_a_token_and_its_row(llm, stock, monkeypatch):
    lead, zeroed = Batcher._lead, []

    def and_zero(self):
        live = next(iter(self._jobs.values())).live
        lead(self)
        if live.n == 83:
            zeroed.append(zero(live))

    monkeypatch.setattr(Batcher, "_lead", and_zero)
    assert take(llm, WORDS[:80], 8) == stock(WORDS[:80], 8)
    assert zeroed
    assert llm.last_request.generated == 8


def test_rows_of_all_tokens_stay_true(model, monkeypatch):
    free, zeroed = Cells.have, []

    def free_cells(self, tokens, jobs, ticket, live):
        had = free(self, tokens, jobs, ticket, live)
        if live.n == 64 and not zeroed:
            zeroed.append(zero(live))
        return had

    llm = Llama(model, n_parallel=2, logits_all=True, **OPTIONS)
    alone = llama_cpp.Llama(model, logits_all=True, **OPTIONS)
    try:
        alone.eval(WORDS[:150])
        monkeypatch.setattr(Cells, "have", free_cells)
        llm.eval(WORDS[:150])
        assert zeroed
        assert np.abs(llm.scores[:150] - alone.scores[:150]).max() < 1e-3
    finally:
        llm.close()
        alone.close()
