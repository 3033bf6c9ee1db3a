"""0025: ranges over a window, and nothing refused in ordinary use; the rest is in the hazard catalogue."""

from __future__ import annotations

from pathlib import Path

import pytest
from capi import TWO, Context, NotApplicable, load_range, on, save_range, sound

from llamahybrid.harness.hazards.effect import Gap

SMALL = {"swa_full": False, "n_ubatch": 32}
ROOMY = {**SMALL, **TWO, "n_ctx": 1024}


@pytest.mark.needs("0015")
@on("gemma4")
def test_a_range_is_not_written_into_another_context(path):
    """Ranges asked of a draft context whose cells and tensors are those of its target."""
    target = Context(path, **SMALL)
    draft = Context(str(Path(path).with_name("assistant.gguf")), **SMALL, ctx_other=target.ctx)
    target.grown(40, chunk=32)
    part, before = save_range(target, 0, 20), target.save()
    assert draft.last() == 39
    with pytest.raises(NotApplicable):
        save_range(draft, 0, 20)
    assert not load_range(draft, part, 0, 20)
    assert target.save() == before
    assert sound(target, 40)


@pytest.mark.needs("0015")
@on(windowed=["gemma3"])
def test_a_range_ahead_of_its_window_is_refused(path):
    """50 tokens, then a range of 100 over them: going on behind the range, and behind the window."""
    part = save_range(Context(path, **SMALL).grown(100, chunk=32), 0, 100)
    context = Context(path, **SMALL).grown(50, chunk=32)
    assert load_range(context, part, 0, 100)
    assert context.feed(100, 101) < 0
    assert context.feed(50, 51) < 0


@pytest.mark.right_on_stock
@on("dots3note", "gemma4", windowed=("gemma3", "gemma2", "cohere2", "lfm2"))
def test_ordinary_use_is_not_refused(path):
    """Snapshots, cuts in the window, drops, two sequences in turn, a batch of both."""
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
    for length, seq in ((320, 0), (301, 1)):
        found = context.goes_on(length, seq, text=seq)
        assert isinstance(found, Gap)
        assert found.largest < 10 * found.share * found.span
