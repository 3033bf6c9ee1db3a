"""0012: a sliding-window sequence is not cut where the window that the next token needs is gone."""

from __future__ import annotations

import pytest
from capi import EXACT, PARTIAL, Context, continued

SMALL = {"swa_full": False, "n_ubatch": 32}


def _grown(path: str) -> Context:
    """A sequence whose first window has long been overwritten."""
    context = Context(path, **SMALL)
    assert context.feed(0, 400, chunk=32) == 0
    return context


def behind_the_window(path):
    context = _grown(path)
    cut = context.rm(0, 100, -1)
    return cut, context.ends()[1], continued(context, path, 100 if cut else 400, **SMALL)


def all_sequences_behind_the_window(path):
    context = _grown(path)
    return context.rm(-1, 100, -1), context.rm(-1, -1, -1), context.ends()


def inside_the_window(path):
    context = _grown(path)
    cut = context.rm(0, 398, -1)
    return cut, continued(context, path, 398, **SMALL)


def restored_at_the_cut(path):
    context = Context(path, **SMALL)
    context.feed(0, 100, chunk=32)
    snapshot = context.save(flags=PARTIAL)
    context.feed(100, 400, chunk=32)
    read = context.read(snapshot, flags=PARTIAL)
    return read == len(snapshot), context.rm(0, 100, -1), continued(context, path, 100, **SMALL)


def test_a_cut_behind_the_window_is_refused(run, tiny_model):
    cut, last, off = run(behind_the_window, tiny_model("gemma3", window=16))
    assert not cut
    assert last == 399
    assert off < EXACT


def test_nor_for_all_sequences_at_once(run, tiny_model):
    assert run(all_sequences_behind_the_window, tiny_model("gemma3", window=16)) == [False, True, [-1, -1]]


@pytest.mark.parametrize("arch", ["gemma3", "gemma2"])
def test_a_cut_within_it_and_one_at_a_restored_snapshot_are_exact(run_both, tiny_model, arch):
    cut, off = run_both(inside_the_window, tiny_model(arch, window=16))
    assert cut
    assert off < EXACT
    read, cut, off = run_both(restored_at_the_cut, tiny_model(arch, window=16))
    assert read
    assert cut
    assert off < EXACT
