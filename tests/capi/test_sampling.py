"""A sampler over a copied row says what it would say over the context's."""

import numpy as np
import pytest

from llamahybrid import Llama
from llamahybrid.capi.sampling import RowSampler

PROMPT = [(7 * i + 1) % 200 for i in range(30)]
SETTINGS = {"greedy": {"temp": 0.0}, "warm": {"temp": 1.5, "top_k": 50}, "mirostat": {"mirostat_mode": 2}}


class Model:
    """Has a row, or not."""

    def __init__(self, row=None):
        self.row = row

    def copied_row(self):
        return self.row


@pytest.fixture
def llm(tiny_model):
    llm = Llama(str(tiny_model("llama")), n_ctx=256, n_threads=1, verbose=False, seed=5)
    llm.eval(PROMPT)
    yield llm
    llm.close()


@pytest.mark.parametrize("how", SETTINGS)
def test_the_same_tokens_from_a_copy(llm, how):
    row = llm.runner.live.row.logits().copy()
    model = Model(row)
    of_context = llm._init_sampler(**SETTINGS[how])
    of_copy = RowSampler.over(llm._init_sampler(**SETTINGS[how]), model)
    assert [of_copy.sample(llm._ctx) for _ in range(20)] == [of_context.sample(llm._ctx) for _ in range(20)]


def test_the_copy_counts_not_the_context(llm):
    row = np.zeros(llm.n_vocab(), np.float32)
    row[17] = 9
    model = Model(row)
    sampler = RowSampler.over(llm._init_sampler(temp=0.0), model)
    assert sampler.sample(llm._ctx) == 17
    row[17], row[23] = 0, 9
    assert sampler.sample(llm._ctx) == 23
    assert sampler.sample(llm._ctx, -2 + 1) == 23


def test_without_a_copy_the_context_is_read(llm):
    model = Model()
    sampler = RowSampler.over(llm._init_sampler(temp=0.0), model)
    best = int(llm.runner.live.row.logits().argmax())
    assert sampler.sample(llm._ctx) == best
    del model
    assert sampler.sample(llm._ctx) == best
