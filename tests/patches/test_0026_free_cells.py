"""0026: a decode that is stopped leaves no state in cells that are free."""

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


def stopped_beside_a_free_cell(path):
    """How far off three fresh sequences are, the worst of nine places to stop at."""
    whole = _hole(path)
    _decode(whole)
    worst, stopped = 0.0, 0
    for part in range(1, 10):
        context = _hole(path)
        context.stop_at = max(2, whole.polls * part // 10)
        stopped += _decode(context) == 2
        context.stop_at = None
        for seq in (0, 2):
            assert context.rm(seq, -1, -1)
        for seq in (0, 2, 1):
            assert context.feed(0, 8, seq) == 0
        for seq in (1, 0, 2):
            worst = max(worst, continued(context, path, 8, seq, **THREE))
    return stopped, worst


def fresh_beside_others(path):
    """The same without a stop, and with the free cell in the view of several decodes."""
    context = _hole(path)
    for position in range(8, 12):
        assert context.decode([(context.bench.token(position, s), position, (s,)) for s in (0, 2)]) == 0
    assert context.feed(0, 8, 1) == 0
    return [continued(context, path, 12 if seq != 1 else 8, seq, **THREE) for seq in range(3)]


@pytest.mark.parametrize("arch", ["qwen35", "jamba", "lfm2"])
def test_fresh_sequences_start_from_nothing(run, tiny_model, arch):
    stopped, worst = run(stopped_beside_a_free_cell, tiny_model(arch))
    assert stopped >= 7
    assert worst < EXACT


@pytest.mark.parametrize("arch", ["mamba", "rwkv7"])  # their batches take no free cells along
def test_recurrent_models_are_exact_as_before(run_both, tiny_model, arch):
    stopped, worst = run_both(stopped_beside_a_free_cell, tiny_model(arch))
    assert stopped >= 7
    assert worst < EXACT


@pytest.mark.parametrize("arch", ["qwen35", "mamba"])
def test_what_is_not_stopped_stays_exact(run_both, tiny_model, arch):
    assert max(run_both(fresh_beside_others, tiny_model(arch))) < EXACT
