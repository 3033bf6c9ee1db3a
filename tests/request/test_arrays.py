"""What upstream's arrays say: the live tokens, and no row of logits but theirs."""

import ctypes
import weakref
from types import SimpleNamespace

import llama_cpp
import numpy as np
import pytest
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from llamahybrid.request.arrays import UpstreamArrays
from tests.conftest import take

PROMPT = [(7 * i + 1) % 200 for i in range(80)]


class Upstream:
    """The attributes of `llama_cpp.Llama` that requests share, with three tokens."""

    def __init__(self, rows=False):
        self._n_ctx, self._n_vocab, self._logits_all = 8, 2, rows
        self.input_ids = np.array([5, 6, 7, 8, 0, 0, 0, 0], np.intc)
        self.scores = np.arange(16, dtype=np.single).reshape(8, 2)
        self.n_tokens = 3
        self._requires_eval = False
        self._sampler, self._mirostat_mu = "a sampler", "its state"
        self._ctx = SimpleNamespace(ctx=None)


@pytest.fixture
def upstream():
    return Upstream()


@pytest.fixture
def arrays(upstream):
    return UpstreamArrays(upstream)


def test_opaque_ids_are_left_as_they_are(upstream, arrays):
    arrays.mirror(np.array([1, -3, 2], np.int32), 1, True)
    assert upstream.input_ids.tolist()[:5] == [5, 1, 7, 2, 0]
    assert upstream.n_tokens == arrays.n == 4
    assert not upstream._requires_eval
    arrays.mirror(np.array([1], np.int32), 4, False)
    assert upstream._requires_eval, "nothing is to be sampled from a row that is not the tip's"


def test_a_sequence_that_became_shorter_has_no_more_true_rows(arrays):
    arrays.true_rows = 3
    arrays.mirror(np.array([1, 2], np.int32), 0, True)
    assert arrays.true_rows == 2


def test_one_token_is_appended_only_where_upstream_believes_the_same_and_keeps_no_rows(upstream, arrays):
    assert arrays.takes_one(3)
    assert not arrays.takes_one(2)
    assert not UpstreamArrays(Upstream(rows=True)).takes_one(3)
    upstream._requires_eval = True
    arrays.append(9, 3)
    assert (arrays.ids().tolist(), upstream._requires_eval) == ([5, 6, 7, 9], False)


def test_ids_are_a_copy(upstream, arrays):
    ids = arrays.ids()
    upstream.input_ids[0] = 99
    assert ids.tolist() == [5, 6, 7]


def test_nothing_is_shortened_to_more_than_there_is(arrays):
    arrays.shorten(5)
    assert arrays.n == 3
    arrays.shorten(2)
    assert arrays.n == 2


@pytest.mark.parametrize(
    ("always", "asked", "kept"), [(False, True, True), (True, False, True), (False,) * 3]
)
def test_rows_are_kept_for_who_asked(always, asked, kept):
    upstream = Upstream(rows=not kept)
    upstream.scores = np.zeros((2, 2), np.single)
    arrays = UpstreamArrays(upstream)
    arrays.always_rows = always
    arrays.keep_rows(asked)
    assert arrays.keeps_rows is kept
    assert arrays.room_for_rows == (8 if asked else 2)


@pytest.mark.parametrize(("true", "then"), [(3, 5), (4, 5), (2, 2)])
def test_rows_behind_a_gap_are_not_true(monkeypatch, true, then):
    upstream = Upstream(rows=True)
    output = (ctypes.c_float * 4)(1, 2, 3, 4)
    pointer = ctypes.cast(output, ctypes.POINTER(ctypes.c_float))
    monkeypatch.setattr(llama_cpp.llama_cpp, "llama_get_logits", lambda ctx: pointer)
    arrays = UpstreamArrays(upstream)
    arrays.true_rows = true
    arrays.take_rows(3, 5)
    assert upstream.scores[2:6].tolist() == [[4, 5], [1, 2], [3, 4], [10, 11]]
    assert arrays.true_rows == then


@pytest.mark.parametrize("rows", [False, True])
def test_what_was_set_aside_comes_back(rows):
    upstream = Upstream(rows)
    arrays = UpstreamArrays(upstream)
    arrays.true_rows = 3
    wanted = upstream.scores[:3].copy()
    saved = arrays.set_aside()
    upstream.input_ids[:] = 1
    upstream.scores[:] = -1
    upstream.n_tokens, upstream._requires_eval, upstream._sampler = 6, True, None
    arrays.bring_back(saved)
    assert arrays.ids().tolist() == [5, 6, 7]
    assert (upstream._sampler, upstream._mirostat_mu) == ("a sampler", "its state")
    assert not upstream._requires_eval
    assert arrays.true_rows == 0, "memory is not back yet"
    arrays.bring_rows(saved)
    assert arrays.true_rows == (3 if rows else 0)
    assert np.array_equal(upstream.scores[:3], wanted) is rows


def test_arrays_have_room_for_every_token(upstream, arrays):
    upstream.input_ids, upstream.scores = np.zeros(5, np.intc), np.zeros((5, 2), np.single)
    arrays.make()
    assert (len(upstream.input_ids), len(upstream.scores)) == (8, 5)
    upstream.input_ids = np.array([1, 2, 3], np.int64)
    arrays.refit()
    assert upstream.input_ids.dtype == np.intc
    assert upstream.input_ids.tolist()[:3] == [1, 2, 3]
    assert len(upstream.input_ids) == 8


def test_a_model_is_not_kept_alive_by_its_arrays():
    upstream = Upstream()
    gone, _arrays = weakref.ref(upstream), UpstreamArrays(upstream)
    del upstream
    assert gone() is None


# -- rows in a model -------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "gemma3", "mamba", "jamba", "qwen35"])
def test_logprobs_of_a_restored_prefix_are_those_of_a_fresh_context(open_model, arch):
    ours, stock = open_model(arch, logits_all=True), open_model(arch, llama_cpp.Llama, logits_all=True)
    asked = dict(max_tokens=4, temperature=0.0, logprobs=2, seed=1, echo=True)
    ours.create_completion("Once upon a time there was a king", **asked)
    ours.create_completion("Never before", **asked)
    mine = ours.create_completion("Once upon a time there was a king and", **asked)["choices"][0]
    reference = stock.create_completion("Once upon a time there was a king and", **asked)["choices"][0]
    assert mine["text"] == reference["text"]
    assert mine["logprobs"]["tokens"] == reference["logprobs"]["tokens"]
    numbers, expected = (side["logprobs"]["token_logprobs"][1:] for side in (mine, reference))
    assert np.allclose(numbers, expected, atol=1e-3, rtol=0)


def test_a_long_prompt_with_a_draft_has_room_for_its_scores(open_model):
    llm = open_model(n_ctx=1024, n_batch=256, draft_model=LlamaPromptLookupDecoding(num_pred_tokens=2))
    assert len(take(llm, (PROMPT * 9)[:700], 4)) == 4


def test_rows_of_one_request_are_not_another_ones(open_model):
    llm = open_model(n_batch=64, draft_model=LlamaPromptLookupDecoding(num_pred_tokens=4, max_ngram_size=2))
    first = PROMPT[:10] + [(11 * i + 5) % 200 for i in range(60)]
    second = PROMPT[:40] + [(13 * i + 9) % 200 for i in range(30)]
    ask = {"max_tokens": 3, "temperature": 0.0}
    for prompt, rows in ((second, {}), (first, {"logprobs": 1}), (second, {})):
        llm.create_completion(prompt, **ask, **rows)
    ours = llm.create_completion(second, logprobs=1, **ask)["choices"][0]["logprobs"]
    stock = open_model(cls=llama_cpp.Llama, n_batch=64, logits_all=True)
    want = stock.create_completion(second, logprobs=1, **ask)["choices"][0]["logprobs"]
    assert np.allclose(ours["token_logprobs"], want["token_logprobs"], atol=1e-3)
