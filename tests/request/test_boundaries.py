"""Boundaries lie before tokens that open something, not before those that close it or are plain text."""

import llama_cpp
import numpy as np
import pytest

from llamahybrid.request.boundaries import Boundaries


@pytest.fixture(scope="module")
def llm(tiny_model):
    return llama_cpp.Llama(str(tiny_model("qwen35")), n_ctx=64, verbose=False)


def found(llm, text):
    tokens = np.array(llm.tokenize(text, add_bos=False, special=True), dtype=np.int32)
    positions = Boundaries(llm._model.vocab, llm.n_vocab()).find(tokens)
    return [llm.detokenize(tokens[p : p + 1].tolist(), special=True) for p in positions]


def test_messages_and_thinking_open_boundaries(llm):
    text = b"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\nHello<|im_end|>\n"
    assert found(llm, text) == [b"<|im_start|>", b"<think>"]  # the first message starts at 0: no cut


def test_plain_text_has_none(llm):
    assert found(llm, b"no marks < here > at all") == []
