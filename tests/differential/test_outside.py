"""Other hands on the context: raw calls between requests, as guidance makes them, are noticed."""

import ctypes
from itertools import islice

import llama_cpp
import numpy as np
import pytest

from tests.lab.reference import difference


def raw_decode(llm, tokens, start):
    """`llama_decode` on the raw context, as guidance does, behind the wrapper's back."""
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for index, token in enumerate(tokens):
        batch.token[index] = token
        batch.pos[index] = start + index
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = 0
        batch.logits[index] = index == len(tokens) - 1
    result = llama_cpp.llama_decode(llm.ctx, batch)
    llama_cpp.llama_batch_free(batch)
    assert result == 0


def seq_rm(llm, start, end=-1):
    """`llama_memory_seq_rm` on the raw context."""
    return llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(llm.ctx), 0, start, end)


def cut_tail(llm):
    assert seq_rm(llm, 40)


def replace_tail(llm):
    """As many tokens as before, others: positions alone cannot tell."""
    length = llm.n_tokens
    assert seq_rm(llm, 40)
    raw_decode(llm, [5] * (length - 40), 40)


def grow(llm):
    raw_decode(llm, [5, 6, 7], llm.n_tokens)


def clear(llm):
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llm.ctx), True)


def replace_all(llm):
    length = llm.n_tokens
    clear(llm)
    raw_decode(llm, [9] * length, 0)


ANYWHERE = (grow, clear, replace_all)  # what a recurrent memory allows, too


@pytest.mark.parametrize(
    ("arch", "change"),
    [("llama", change) for change in (cut_tail, replace_tail, *ANYWHERE)]
    + [(arch, change) for arch in ("qwen35", "jamba", "mamba") for change in ANYWHERE],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
@pytest.mark.parametrize("follow_up", ["append", "repeat"])
def test_a_change_behind_our_back_is_noticed(tiny_model, opened, reference, arch, change, follow_up):
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
    assert difference(seen[0], expected.logits(asked)[0]) <= 1e-3


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


@pytest.mark.parametrize("arch", ["llama", "qwen35", "mamba"])
@pytest.mark.parametrize("saved", [whole_state, sequence_state])
def test_a_state_of_as_many_tokens_that_others_load_is_noticed(tiny_model, opened, reference, arch, saved):
    """Neither positions nor counters nor sizes differ; what `eval` decoded is in no cache."""
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
    assert difference(seen[0], expected.logits([*prompt, 30, 31])[0]) <= 1e-3
