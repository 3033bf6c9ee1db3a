"""Content that others put into context memory is taken for what is live, where it really is there."""

import ctypes
import itertools
import pickle
from dataclasses import replace

import llama_cpp
import numpy as np
import pytest

from llamahybrid import Llama, PromptCache
from llamahybrid.memory.adoption import adopt_native, take_over
from llamahybrid.memory.restore import restore
from llamahybrid.speculation.drafts import Undo
from tests.conftest import SETTINGS, take

from .conftest import LONGER, PROMPT, decode, ids, new, stock


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


@pytest.fixture(params=["llama", "mamba", "qwen35", "deepseek4"])
def two(request, open_model):
    """Two sequences of one context, the second of which is `PROMPT`; the logits of `LONGER`."""
    llm = open_model(request.param, n_parallel=2, type_k=0, type_v=0)
    one, other = (slot.evaluation.runner.live for slot in llm.slots.all)
    decode(one, PROMPT)
    wanted = decode(one, LONGER[len(PROMPT) :])
    one.empty()
    decode(other, PROMPT)
    return one, other, wanted


def test_what_is_taken_over_goes_on_when_its_source_is_emptied(two):
    """Before anything is decoded: that is when streams of a cache are copied."""
    one, other, wanted = two
    take_over(one, other)
    other.empty()
    assert one.state.holds(ids(PROMPT))
    assert np.allclose(decode(one, LONGER[len(PROMPT) :]), wanted, atol=1e-5)


def test_what_takes_the_place_of_what_was_taken_over_stays(two):
    one, other, wanted = two
    state = other.native.state()
    take_over(one, other)
    other.empty()
    decode(other, OTHER)
    take_over(one, other)
    one.empty()
    assert one.native.load(state)
    one.state.replace_tokens(ids(PROMPT))
    assert np.allclose(decode(one, LONGER[len(PROMPT) :]), wanted, atol=1e-5)


def test_what_cannot_be_copied_is_not_taken_over(two, monkeypatch):
    one, other, _ = two
    one.profile = replace(one.profile, copies_late=True)
    monkeypatch.setattr(one.native, "load", lambda state: False)
    take_over(one, other)
    assert one.n == 0
    assert one.native.positions() == (-1, -1)


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


# -- states of which nothing says whose they are ---------------------------------------------------

OTHER = [(11 * i + 5) % 200 for i in range(50)]


@pytest.fixture
def foreign(tiny_model):
    """`foreign(arch)`: what stock saved of another model of the same shape, which is not sealed."""

    def make(arch):
        llm = llama_cpp.Llama(str(tiny_model(arch, seed=1)), **SETTINGS)
        llm.eval(PROMPT)
        return llm.save_state()

    return make


@pytest.mark.parametrize("arch", ["llama", "gemma3", "mamba", "rwkv7", "jamba", "qwen35"])
@pytest.mark.parametrize("saved_by", ["stock", "us"])
def test_nothing_that_rests_on_a_foreign_state_is_stored(tiny_model, tmp_path, foreign, arch, saved_by):
    """The prompt cache, its folder and a seal would pass it on as what this model has computed."""
    path, state, cache = tiny_model(arch), foreign(arch), PromptCache(1 << 26, tmp_path)
    want = stock(path, LONGER)
    llm = Llama(str(path), prompt_cache=cache, **SETTINGS)
    llm.load_state(state)
    if saved_by == "us":
        state = pickle.loads(pickle.dumps(llm.save_state()))
        llm.load_state(state)
    assert take(llm, LONGER) != want, "its user has it where it was loaded"
    take(llm, OTHER)
    assert take(llm, LONGER) == want
    llm.load_state(state)
    llm.reset()
    assert take(llm, LONGER) == want
    llm.close()
    again = Llama(str(path), prompt_cache=PromptCache(1 << 26, tmp_path), **SETTINGS)
    assert take(again, LONGER) == want
    assert again.last_request.source == "disk", "what was computed here is stored"


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_a_foreign_state_that_prompts_have_left_keeps_nothing_from_being_stored(tiny_model, foreign, arch):
    """Prompts share a beginning: for that alone it would stay for ever."""
    llm = Llama(str(tiny_model(arch)), **SETTINGS)
    llm.load_state(foreign(arch))
    for prompt in ([*PROMPT[:9], *OTHER], OTHER[::-1]):
        assert take(llm, prompt) == stock(tiny_model(arch), prompt)
    take(llm, [*PROMPT[:9], *OTHER, 3])
    assert llm.last_request.cached >= len(PROMPT[:9])
    assert llm.prompt_cache.stats().bytes_ram > 4 * (len(OTHER) + len(PROMPT))


@pytest.mark.parametrize("arch", ["llama", "mamba", "qwen35"])
def test_what_takes_the_place_of_a_foreign_state_is_stored(tiny_model, foreign, arch):
    llm = Llama(str(tiny_model(arch)), **SETTINGS)
    take(llm, [*PROMPT, *OTHER])
    take(llm, OTHER)
    llm.load_state(foreign(arch))
    assert take(llm, [*PROMPT, *OTHER, 3]) == stock(tiny_model(arch), [*PROMPT, *OTHER, 3])
    assert llm.last_request.source == "ram"
    assert not llm.evaluation.runner.live.state.foreign


@pytest.mark.parametrize("arch", ["llama", "mamba", "qwen35"])
def test_a_foreign_state_is_not_shared_with_other_slots(tiny_model, foreign, arch):
    llm = Llama(str(tiny_model(arch)), n_parallel=3, **SETTINGS)
    want = stock(tiny_model(arch), LONGER)
    for prompt in (
        PROMPT,
        OTHER,
        OTHER[::-1],
        OTHER[20:],
    ):  # who loads the first of them may borrow attention
        take(llm, prompt)
    llm.load_state(foreign(arch))
    in_its_slot = llm.generate(LONGER, temp=0.0)
    answer = [next(in_its_slot)]
    assert take(llm, LONGER) == want
    assert [*answer, *itertools.islice(in_its_slot, 7)] != want


def test_a_foreign_state_that_guesses_were_made_from_is_no_way_back_later(tiny_model, foreign):
    llm = Llama(str(tiny_model("mamba")), **SETTINGS)
    live = llm.evaluation.runner.live
    undo = Undo(live)
    llm.load_state(foreign("mamba"))
    undo.take()
    assert undo.position == len(PROMPT)
    llm.reset()
    llm.eval(PROMPT)
    assert undo.position is None
