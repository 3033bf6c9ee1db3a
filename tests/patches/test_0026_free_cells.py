"""0026: free cells in view of a decode that is not stopped: what starts there is exact."""

from __future__ import annotations

import pytest
from capi import EXACT, Context, continued

THREE = {"n_seq_max": 3, "kv_unified": True}


def _hole(path: str) -> Context:
    """Two sequences of eight tokens with room between them, and a count of polls from here on."""
    context = Context(path, **THREE)
    for seq in range(3):
        context.feed(0, 8, seq)
    assert context.rm(1, -1, -1)
    context.count_polls()
    return context


def _decode(context: Context) -> int:
    return context.decode([(5, 8, (0,)), (6, 8, (2,))])


def fresh_beside_others(path):
    """Another sequence starts in a free cell that several decodes had in view."""
    context = _hole(path)
    for position in range(8, 12):
        assert context.decode([(context.bench.token(position, s), position, (s,)) for s in (0, 2)]) == 0
    assert context.feed(0, 8, 1) == 0
    return [continued(context, path, 12 if seq != 1 else 8, seq, **THREE) for seq in range(3)]


@pytest.mark.parametrize("arch", ["qwen35", "mamba"])
def test_a_fresh_sequence_in_a_free_cell_is_exact(run_both, tiny_model, arch):
    assert max(run_both(fresh_beside_others, tiny_model(arch))) < EXACT
