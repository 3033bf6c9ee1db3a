"""0025: ranges over a window, and nothing refused in ordinary use; the rest is in the hazard catalogue."""

from __future__ import annotations

from pathlib import Path

import pytest
from capi import EXACT, Context, continued, lib

from llamahybrid.harness.hazards.context import load_range, save_range
from llamahybrid.harness.hazards.effect import NotApplicable

SMALL = {"swa_full": False, "n_ubatch": 32}
SHARED = {**SMALL, "n_seq_max": 2, "kv_unified": True}
ROOMY = {**SHARED, "n_ctx": 1024}


def _grown(path: str, length: int) -> Context:
    context = Context(path, **SMALL)
    assert context.feed(0, length, chunk=32) == 0
    return context


def range_over_window(path):
    """50 tokens, then a range of 100 over them: going on behind the range, and behind the window."""
    if not hasattr(lib._lib, "llama_state_seq_set_data_range"):
        return None
    donor = _grown(path, 100)
    part = save_range(donor, 0, 100)
    context = _grown(path, 50)
    assert load_range(context, part, 0, 100)
    return context.feed(100, 101), context.feed(50, 51)


def ordinary_use(path):
    """Snapshots, cuts in the window, drops, two sequences in turn, a batch of both: nothing is refused."""
    context = Context(path, **ROOMY)
    for begin in range(0, 300, 30):
        for seq in (0, 1):
            assert context.feed(begin, begin + 30, seq) == 0
    assert context.decode([(context.tested.token(300, s), 300, (s,)) for s in (0, 1)]) == 0
    cut = context.rm(0, 299, -1)  # a hybrid refuses
    assert context.feed(299 if cut else 301, 320, chunk=7) == 0
    snapshot = context.save(0)
    assert context.rm(0, -1, -1)
    assert context.load(snapshot)
    return continued(context, path, 320, **ROOMY), continued(context, path, 301, 1, **ROOMY)


def draft_on_another_memory(path):
    """Ranges asked of a draft context whose cells and tensors are those of its target."""
    if not hasattr(lib._lib, "llama_state_seq_set_data_range"):
        return None
    folder = Path(path).parent
    target = Context(path, **SMALL)
    draft = Context(str(folder / "assistant.gguf"), **SMALL, ctx_other=target.ctx)
    target.feed(0, 40, chunk=32)
    part, before = save_range(target, 0, 20), target.save()
    assert draft.ends()[1] == 39
    try:
        read = len(save_range(draft, 0, 20))
    except NotApplicable:
        read = 0
    written = load_range(draft, part, 0, 20)
    return read, written, target.save() == before, continued(target, path, 40, **SMALL)


@pytest.mark.needs("0015")
def test_a_range_is_not_written_into_another_context(run, more_model):
    found = run(draft_on_another_memory, more_model("gemma4"))
    assert found is not None
    read, written, same, off = found
    assert (read, written, same) == (0, False, True)
    assert off < EXACT


@pytest.mark.parametrize("arch", ["dots3note", "gemma4"])
def test_ordinary_use_with_an_indexer_or_shared_cells_is_not_refused(run_both, more_model, arch):
    first, second = run_both(ordinary_use, more_model(arch))
    assert first < 10 * EXACT
    assert second < 10 * EXACT


@pytest.mark.needs("0015")
def test_a_range_ahead_of_its_window_is_refused(run, tiny_model):
    found = run(range_over_window, tiny_model("gemma3", window=16))
    assert found is not None
    assert max(found) < 0


@pytest.mark.parametrize("arch", ["gemma3", "gemma2", "cohere2", "lfm2"])
def test_ordinary_use_is_not_refused(run_both, tiny_model, arch):
    first, second = run_both(ordinary_use, tiny_model(arch, window=16))
    assert first < 10 * EXACT
    assert second < 10 * EXACT
