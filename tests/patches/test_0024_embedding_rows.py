"""0024: a model whose hidden states are wider than its embeddings can be asked for embeddings."""

from __future__ import annotations

import numpy as np
import pytest
from capi import Context, lib

NONE, LAST = 0, 3  # llama_pooling_type


def _context(path, length, pooling):
    context = Context(path, embeddings=True, pooling_type=pooling, n_ubatch=8)
    assert context.feed(0, length) == 0
    return context


def rows(path):
    """The row of the fourth token: among twelve, of four, of four pooled. And the model's width."""
    among, alone, pooled = _context(path, 12, NONE), _context(path, 4, NONE), _context(path, 4, LAST)
    read = [
        lib.llama_get_embeddings_ith(among.ctx, 3),
        lib.llama_get_embeddings_ith(alone.ctx, -1),
        lib.llama_get_embeddings_seq(pooled.ctx, 0),
    ]
    wide = lib.llama_model_n_embd_out(among.tested.model)
    width = lib.llama_model_n_embd(among.tested.model)
    return [np.ctypeslib.as_array(row, (wide,)).tolist() for row in read], width


@pytest.mark.parametrize("arch", ["deepseek4", "qwen4exp"])
def test_a_row_of_embeddings_is_filled_up_with_zeros(run, tiny_model, arch):
    read, width = run(rows, tiny_model(arch))
    among, alone, pooled = np.array(read)
    assert np.ptp(alone[:width])
    assert alone.size > width
    assert not alone[width:].any()
    assert np.allclose(among, alone, rtol=1e-3, atol=1e-4)
    assert np.allclose(pooled, alone, rtol=1e-3, atol=1e-4)
