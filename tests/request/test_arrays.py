"""What upstream's arrays say: the live tokens, and no row of logits but theirs."""

import llama_cpp
import numpy as np
import pytest
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from llamahybrid import Llama
from llamahybrid.request.arrays import UpstreamArrays
from tests.conftest import take

PROMPT = [(7 * i + 1) % 200 for i in range(80)]


def with_three(rows=False):
    """Arrays for eight tokens of two words, with three of them."""
    arrays = UpstreamArrays()
    arrays.logits_all = rows
    arrays.make(8, 2, 8)
    arrays.input_ids[:4] = [5, 6, 7, 8]
    arrays.scores = np.arange(16, dtype=np.single).reshape(8, 2)
    arrays.n_tokens = 3
    arrays.requires_eval = False
    arrays.sampler, arrays.mirostat_mu = "a sampler", "its state"
    return arrays


@pytest.fixture
def arrays():
    return with_three()


def test_native_content_keeps_its_ids_until_something_else_is_in_its_place(arrays):
    arrays.note_native(np.array([5, -3, 7], np.int32))
    assert arrays.ids().tolist() == [5, -3, 7]
    assert arrays.native.tolist() == [5, -3]
    arrays.mirror(np.array([9], np.int32), 3, True)
    assert arrays.ids().tolist() == [5, -3, 7, 9]
    arrays.mirror(np.array([-4, 1], np.int32), 2, True)
    assert arrays.ids().tolist() == [5, -3, -4, 1]
    saved = arrays.set_aside()
    assert saved.ids.tolist() == [5, 6, 7, 1]
    arrays.mirror(np.array([2], np.int32), 1, True)
    assert arrays.ids().tolist() == [5, 2]
    arrays.bring_back(saved)
    assert arrays.ids().tolist() == [5, -3, -4, 1]
    arrays.n_tokens = 2
    assert arrays.ids().tolist() == [5, -3]
    arrays.reset()
    assert not len(arrays.native)


def test_a_prompt_that_was_read_from_input_ids_begins_with_native_content(arrays):
    arrays.note_native(np.array([5, -3], np.int32))
    assert arrays.with_native(np.array([5, 6, 9], np.int32)).tolist() == [5, -3, 9]
    for other in ([4, 6, 9], [5]):
        assert arrays.with_native(np.array(other, np.int32)).tolist() == other


def test_opaque_ids_are_left_as_they_are(arrays):
    arrays.mirror(np.array([1, -3, 2], np.int32), 1, True)
    assert arrays.input_ids.tolist()[:5] == [5, 1, 7, 2, 0]
    assert arrays.n_tokens == 4
    assert not arrays.requires_eval
    arrays.mirror(np.array([1], np.int32), 4, False)
    assert arrays.requires_eval, "nothing is to be sampled from a row that is not the tip's"


def test_a_sequence_that_became_shorter_has_no_more_true_rows(arrays):
    arrays.true_rows = 3
    arrays.mirror(np.array([1, 2], np.int32), 0, True)
    assert arrays.true_rows == 2


def test_one_token_is_appended_only_where_upstream_believes_the_same_and_keeps_no_rows(arrays):
    assert arrays.takes_one(3)
    assert not arrays.takes_one(2)
    assert not with_three(rows=True).takes_one(3)
    arrays.requires_eval = True
    arrays.append(9, 3)
    assert (arrays.ids().tolist(), arrays.requires_eval) == ([5, 6, 7, 9], False)


def test_ids_are_a_copy(arrays):
    ids = arrays.ids()
    arrays.input_ids[0] = 99
    assert ids.tolist() == [5, 6, 7]


def test_nothing_is_shortened_to_more_than_there_is(arrays):
    arrays.shorten(5)
    assert arrays.n_tokens == 3
    arrays.shorten(2)
    assert arrays.n_tokens == 2


@pytest.mark.parametrize(
    ("always", "asked", "kept"), [(False, True, True), (True, False, True), (False,) * 3]
)
def test_rows_are_kept_for_who_asked(always, asked, kept):
    arrays = with_three(rows=not kept)
    arrays.scores = np.zeros((2, 2), np.single)
    arrays.always_rows = always
    arrays.keep_rows(asked)
    assert arrays.keeps_rows is kept
    assert len(arrays.scores) == (8 if asked else 2)


@pytest.mark.parametrize(("true", "then"), [(3, 5), (4, 5), (2, 2)])
def test_rows_behind_a_gap_are_not_true(true, then):
    arrays = with_three(rows=True)
    arrays.true_rows = true
    arrays.take_rows(3, np.array([[1, 2], [3, 4]], np.single))
    assert arrays.scores[2:6].tolist() == [[4, 5], [1, 2], [3, 4], [10, 11]]
    assert arrays.true_rows == then


@pytest.mark.parametrize("rows", [False, True])
def test_what_was_set_aside_comes_back(rows):
    arrays = with_three(rows)
    arrays.true_rows = 3
    wanted = arrays.scores[:3].copy()
    saved = arrays.set_aside()
    arrays.input_ids[:] = 1
    arrays.scores[:] = -1
    arrays.n_tokens, arrays.requires_eval, arrays.sampler = 6, True, None
    arrays.bring_back(saved)
    assert arrays.ids().tolist() == [5, 6, 7]
    assert (arrays.sampler, arrays.mirostat_mu) == ("a sampler", "its state")
    assert not arrays.requires_eval
    assert arrays.true_rows == 0, "memory is not back yet"
    arrays.bring_rows(saved)
    assert arrays.true_rows == (3 if rows else 0)
    assert np.array_equal(arrays.scores[:3], wanted) is rows


def test_arrays_have_room_for_every_token(arrays):
    arrays.input_ids, arrays.scores = np.zeros(5, np.intc), np.zeros((5, 2), np.single)
    arrays.make(8, 2, 5)
    assert (len(arrays.input_ids), len(arrays.scores)) == (8, 5)
    arrays.input_ids = np.array([1, 2, 3], np.int64)
    arrays.refit()
    assert arrays.input_ids.dtype == np.intc
    assert arrays.input_ids.tolist()[:3] == [1, 2, 3]
    assert len(arrays.input_ids) == 8


def test_another_slot_goes_on_with_the_settings_alone(arrays):
    other = UpstreamArrays()
    other.make(8, 2, 8)
    arrays.seed, arrays.logits_all = 17, True
    other.n_tokens = 5
    other.take_settings(arrays)
    assert (other.seed, other.keeps_rows, other.n_tokens, other.requires_eval) == (17, True, 0, True)


def test_the_attributes_of_a_model_are_those_of_its_slot(open_model):
    llm = open_model()
    take(llm, PROMPT, 3)
    arrays = llm.slots.all[0].arrays
    assert llm.n_tokens == arrays.n_tokens > 0
    assert llm.input_ids is arrays.input_ids
    llm.n_tokens = 5
    assert arrays.n_tokens == 5
    assert Llama.n_tokens.fget.__doc__


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
