"""Other hands on the context: raw calls between requests, as guidance makes them, are noticed."""

import ctypes
from itertools import islice

import llama_cpp
import numpy as np
import pytest

from llamahybrid.harness.counters import DecodeCounter
from tests.lab.reference import SETTINGS, difference
from tests.memory.conftest import foreign_decode

FULL = pytest.mark.full
SOME = ["qwen35", "gemma3", *(pytest.param(arch, marks=FULL) for arch in ("llama", "jamba", "mamba"))]
pytestmark = [pytest.mark.patched]


def seq_rm(llm, start, end=-1):
    """`llama_memory_seq_rm` on the raw context."""
    return llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(llm.ctx), 0, start, end)


def cut_tail(llm):
    assert seq_rm(llm, 40)


def replace_tail(llm):
    """As many tokens as before, others: positions alone cannot tell."""
    length = llm.n_tokens
    assert seq_rm(llm, 40)
    foreign_decode(llm, [5] * (length - 40), 40)


def grow(llm):
    foreign_decode(llm, [5, 6, 7], llm.n_tokens)


def clear(llm):
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llm.ctx), True)


def replace_all(llm):
    length = llm.n_tokens
    clear(llm)
    foreign_decode(llm, [9] * length, 0)


ANYWHERE = (grow, clear, replace_all)  # what a recurrent memory allows, too


@pytest.mark.parametrize(
    ("arch", "change"),
    [("llama", change) for change in (cut_tail, replace_tail, *ANYWHERE)]
    + [("qwen35", change) for change in ANYWHERE]
    + [pytest.param(arch, change, marks=FULL) for arch in ("jamba", "mamba") for change in ANYWHERE],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
@pytest.mark.parametrize("follow_up", ["append", "repeat"])
def test_changes_by_native_calls_are_noticed(tiny_model, opened, reference, arch, change, follow_up):
    model = tiny_model(arch)
    llm, expected = opened(model), reference(model)
    prompt = expected.vocabulary.text(60, seed=1)
    answer = list(islice(llm.generate(prompt, temp=0.0), 8))
    change(llm)
    seen = []

    def watch(ids, scores):
        seen.append(np.array(scores))
        return scores

    asked = prompt + answer + [30, 31] if follow_up == "append" else prompt
    processors = llama_cpp.LogitsProcessorList([watch])
    list(islice(llm.generate(asked, temp=0.0, logits_processor=processors), 1))
    assert difference(seen[0], expected.logits(asked)[0]) <= SETTINGS[0].tolerance


def whole_state(llm):
    """Saved and put back by raw calls, as upstream's examples and other wrappers do."""
    size = llama_cpp.llama_state_get_size(llm.ctx)
    buffer = (ctypes.c_uint8 * size)()
    size = llama_cpp.llama_state_get_data(llm.ctx, buffer, size)
    return lambda: llama_cpp.llama_state_set_data(llm.ctx, buffer, size)


def sequence_state(llm):
    size = llama_cpp.llama_state_seq_get_size(llm.ctx, 0)
    buffer = (ctypes.c_uint8 * size)()
    size = llama_cpp.llama_state_seq_get_data(llm.ctx, buffer, size, 0)
    return lambda: llama_cpp.llama_state_seq_set_data(llm.ctx, buffer, size, 0)


def flagged_state(llm, flags=0):
    size = llama_cpp.llama_state_seq_get_size_ext(llm.ctx, 0, flags)
    buffer = (ctypes.c_uint8 * size)()
    size = llama_cpp.llama_state_seq_get_data_ext(llm.ctx, buffer, size, 0, flags)
    return lambda: llama_cpp.llama_state_seq_set_data_ext(llm.ctx, buffer, size, 0, flags)


def partial_state(llm):
    """As llama.cpp's server, of what cannot be cut."""
    return flagged_state(llm, llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)


@pytest.mark.parametrize("arch", SOME)
@pytest.mark.parametrize("saved", [whole_state, sequence_state, flagged_state, partial_state])
def test_a_state_of_as_many_tokens_that_others_load_is_noticed(tiny_model, opened, reference, arch, saved):
    """Positions, counters and sizes are the same, and the cache has no state that `eval` decoded."""
    model = tiny_model(arch)
    llm, expected = opened(model), reference(model)
    prompt = expected.vocabulary.text(50, seed=1)
    llm.eval(prompt[:20] + [7] * 30)
    put_back = saved(llm)
    llm.reset()
    llm.eval(prompt)
    put_back()
    seen = []

    def watch(ids, scores):
        seen.append(np.array(scores))
        return scores

    processors = llama_cpp.LogitsProcessorList([watch])
    list(islice(llm.generate([*prompt, 30, 31], temp=0.0, logits_processor=processors), 1))
    assert difference(seen[0], expected.logits([*prompt, 30, 31])[0]) <= SETTINGS[0].tolerance


def last_row(llm):
    return np.array(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llm.ctx, -1), (llm.n_vocab(),)))


@pytest.mark.parametrize("arch", SOME)
@pytest.mark.parametrize("seq", [0, -1])
def test_native_cuts_and_decodes_follow_each_other(tiny_model, opened, reference, arch, seq):
    """As guidance: whatever `llama_memory_seq_rm` returns, the next tokens follow what was kept."""
    setting = SETTINGS[arch == "gemma3"]
    model = tiny_model(arch, window=16) if arch == "gemma3" else tiny_model(arch)
    llm, expected = opened(model, setting), reference(model, setting)
    prompt = expected.vocabulary.text(400, seed=1)
    memory, live = llama_cpp.llama_get_memory(llm.ctx), []
    counter = DecodeCounter(llm)
    for keep, more in ((0, prompt), (300, [5, 6, 7]), (303, [8]), (304, [9]), (300, [9, 9]), (40, [3, 4])):
        llama_cpp.llama_memory_seq_rm(memory, seq, keep, -1)
        live = [*live[:keep], *more]
        for start in range(keep, len(live), 30):
            foreign_decode(llm, live[start : start + 30], start)
        assert difference(last_row(llm), expected.logits(live)[0]) <= SETTINGS[0].tolerance
    if arch in ("qwen35", "jamba", "mamba"):
        decoded = counter.take()
        assert decoded <= 400 + 300 + 40 + 10, "the second cut at 300 starts from what the first has stored"
    asked = [*live, 30, 31]
    assert next(llm.generate(asked, temp=0.0)) == int(np.argmax(expected.logits(asked)[0]))


def test_a_cut_into_unknown_content_stays_refused(tiny_model, opened):
    """Foreign decodes on another sequence, behind ours, over a hole, or at other positions."""
    llm = opened(tiny_model("qwen35"))
    memory = llama_cpp.llama_get_memory(llm.ctx)
    list(islice(llm.generate(range(40, 100), temp=0.0), 2))
    foreign_decode(llm, [5, 6, 7], llm.n_tokens)
    assert not llama_cpp.llama_memory_seq_rm(memory, 0, 20, -1), "some of it is ours"
    llama_cpp.llama_memory_clear(memory, True)
    foreign_decode(llm, [5] * 20, 0)
    foreign_decode(llm, [6] * 20, 0, seq=1)
    assert not llama_cpp.llama_memory_seq_rm(memory, 0, 10, -1), "another sequence was decoded last"
    llama_cpp.llama_memory_clear(memory, True)
    foreign_decode(llm, [5] * 20, 0)
    assert not llama_cpp.llama_memory_seq_rm(memory, 1 << 20, 10, -1)
    put_back = sequence_state(llm)
    put_back()
    assert not llama_cpp.llama_memory_seq_rm(memory, 0, 10, -1), "a state may be of other tokens"
    llama_cpp.llama_memory_clear(memory, True)
    foreign_decode(llm, [5] * 20, 0)
    list(islice(llm.generate(range(40, 100), temp=0.0), 2))
    assert not llama_cpp.llama_memory_seq_rm(memory, 0, 10, -1), "it is ours again"


def test_a_request_that_waits_goes_on_after_it(tiny_model, opened, reference):
    model = tiny_model("qwen35")
    llm, expected = opened(model), reference(model)
    prompt = expected.vocabulary.text(60, seed=1)
    alone = list(islice(opened(model).generate(prompt, temp=0.0), 8))
    stream = llm.generate(prompt, temp=0.0)
    said = [next(stream) for _ in range(3)]
    memory = llama_cpp.llama_get_memory(llm.ctx)
    assert llama_cpp.llama_memory_seq_rm(memory, -1, 0, -1), "all of it, which stock refuses"
    foreign_decode(llm, prompt[::-1], 0)
    assert llama_cpp.llama_memory_seq_rm(memory, -1, 30, -1)
    foreign_decode(llm, [7, 8], 30)
    assert difference(last_row(llm), expected.logits([*prompt[::-1][:30], 7, 8])[0]) <= SETTINGS[0].tolerance
    said += list(islice(stream, 5))
    assert said == alone
