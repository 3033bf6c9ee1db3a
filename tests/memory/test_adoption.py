"""Content that others put into context memory is taken for what is live, where it really is there."""

import ctypes

import llama_cpp
import pytest

from llamahybrid.memory.adoption import adopt_native, take_over
from llamahybrid.memory.restore import restore

from .conftest import PROMPT, ids, new


@pytest.fixture
def decoded_natively(llm, live):
    """Two tokens decoded by other code; the last position is 61."""
    for token in (5, 6):
        batch = llama_cpp.llama_batch_get_one((ctypes.c_int32 * 1)(token), 1)
        assert llama_cpp.llama_decode(llm.ctx, batch) == 0
    return live


def test_native_content_is_adopted_and_never_saved(decoded_natively):
    live = decoded_natively
    assert adopt_native(live, len(PROMPT) + 2)
    assert live.state.opaque
    assert live.fault() is None
    assert (live.tokens[-2:] < 0).all()
    assert live.tokens[-1] != live.tokens[-2]
    assert live.snapshot(new) is None
    assert live.page_out(0, 40, new) is None


@pytest.mark.parametrize("n", [61, 10_000])
def test_native_content_that_is_not_there_is_not_adopted(decoded_natively, n):
    assert not adopt_native(decoded_natively, n)


def test_nothing_is_adopted_behind_an_invalid_tip(decoded_natively):
    decoded_natively.invalidate()
    assert not adopt_native(decoded_natively, len(PROMPT) + 2)


def adopt_one_for_three(llm, live):
    """One cell, counted for three positions."""
    batch = llama_cpp.llama_batch_get_one((ctypes.c_int32 * 1)(5), 1)
    assert llama_cpp.llama_decode(llm.ctx, batch) == 0
    assert adopt_native(live, live.n + 3)


def test_cells_are_counted_and_no_positions(llm, live):
    shared = live.shared
    assert shared.cells_held() == len(PROMPT)
    adopt_one_for_three(llm, live)
    assert live.n == len(PROMPT) + 3
    assert shared.cells_held() == len(PROMPT) + 1
    live.invalidate()
    assert shared.cells_held() == 1
    live.empty()
    assert shared.cells_held() == 0


def test_cells_are_counted_of_a_state_with_an_image_that_was_loaded(llm, live):
    batch = llama_cpp.llama_batch_get_one((ctypes.c_int32 * 1)(5), 1)
    assert llama_cpp.llama_decode(llm.ctx, batch) == 0
    llm.n_tokens += 3
    state = llm.save_state()
    llm.reset()
    assert live.shared.cells_held() == 0
    llm.load_state(state)
    assert live.n == len(PROMPT) + 3
    assert live.shared.cells_held() == len(PROMPT) + 1


@pytest.mark.parametrize("arch", ["qwen35", "llama"])
def test_cells_are_counted_where_an_image_is_taken_over(open_model, arch):
    llm = open_model(arch, n_parallel=2)
    one, two = (slot.evaluation.runner.live for slot in llm.slots.all)
    one.decode(ids(PROMPT), "last")
    one.recount()
    adopt_one_for_three(llm, one)
    take_over(two, one)
    one.empty()
    assert two.n == len(PROMPT) + 3
    assert two.shared.cells_held() == len(PROMPT) + 1


def test_what_is_cut_back_to_before_an_image_is_sound(open_model):
    llm = open_model("llama")
    llm.eval(PROMPT)
    live = llm.runner.live
    adopt_one_for_three(llm, live)
    assert live.cut(len(PROMPT))
    assert live.fault() is None
    assert live.shared.cells_held() == len(PROMPT)


@pytest.mark.parametrize("whole", [False, True])
def test_an_images_fewer_positions_go_with_the_image(llm, live, whole):
    """A state from before an image is sound, whatever positions the image took."""
    record = live.snapshot(new)
    state = llm.save_state()
    batch = llama_cpp.llama_batch_get_one((ctypes.c_int32 * 1)(5), 1)
    assert llama_cpp.llama_decode(llm.ctx, batch) == 0
    assert adopt_native(live, len(PROMPT) + 3), "counted for three tokens, one position taken"
    assert live.fault() is None
    if whole:
        llm.load_state(state)
    else:
        assert restore(live, record, ids(PROMPT)) is None
    assert live.state.holds(ids(PROMPT))
