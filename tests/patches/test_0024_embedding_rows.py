"""0024: a model whose hidden states are wider than its embeddings can be asked for embeddings."""

from __future__ import annotations

import numpy as np
from capi import Context, lib, on

NONE, LAST = 0, 3  # llama_pooling_type


@on("deepseek4", "qwen4exp")
def test_a_row_of_embeddings_is_filled_up_with_zeros(path):
    """The row of the fourth token: among twelve, of four, of four pooled."""
    shape = {"embeddings": True, "n_ubatch": 8}
    among, alone = (Context(path, pooling_type=NONE, **shape).grown(length) for length in (12, 4))
    pooled = Context(path, pooling_type=LAST, **shape).grown(4)
    wide = lib.llama_model_n_embd_out(among.tested.model)
    width = lib.llama_model_n_embd(among.tested.model)
    first, second, third = (
        np.ctypeslib.as_array(row, (wide,))
        for row in (
            lib.llama_get_embeddings_ith(among.ctx, 3),
            lib.llama_get_embeddings_ith(alone.ctx, -1),
            lib.llama_get_embeddings_seq(pooled.ctx, 0),
        )
    )
    assert np.ptp(second[:width])
    assert wide > width
    assert not second[width:].any()
    assert np.allclose(first, second, rtol=1e-3, atol=1e-4)
    assert np.allclose(third, second, rtol=1e-3, atol=1e-4)
