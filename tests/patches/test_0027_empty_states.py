"""0027: the state of an empty sequence, restored, leaves the sequence empty."""

from __future__ import annotations

import ctypes

import pytest
from capi import EXACT, PARTIAL, Context, continued, lib

SHARED = {"n_seq_max": 2, "kv_unified": True}
SPLIT = {"n_seq_max": 2, "kv_unified": False}
SMALL = {"swa_full": False, "n_ubatch": 32}


def _emptied(path: str, shape: dict[str, object]) -> tuple[tuple[int, int], int, float | None, float | None]:
    context = Context(path, **shape)
    nothing = context.save(1)
    context.feed(0, 12)
    context.feed(0, 12, 1)
    assert context.load(nothing)
    ends, status = context.ends(), context.feed(0, 8, text=2)
    off = continued(context, path, 12, 1, **shape)
    context.rm(0, -1, -1)
    context.feed(0, 8)
    return ends, status, continued(context, path, 8, **shape), off


def emptied(path):
    return _emptied(path, SHARED)


def emptied_stream(path):
    return _emptied(path, SPLIT)


def emptied_from_file(path):
    context = Context(path, **SHARED)
    context.feed(0, 12)
    name = f"{path}.empty".encode()
    assert lib.llama_state_seq_save_file(context.ctx, name, 1, None, 0)
    count, tokens = ctypes.c_size_t(), (ctypes.c_int32 * 1)()
    assert lib.llama_state_seq_load_file(context.ctx, name, 0, tokens, 1, count)
    return context.ends()


def window_dropped(path):
    """A windowed sequence that loses its window, is cut behind it and gets that position's snapshot."""
    context = Context(path, **SMALL)
    nothing = context.save(flags=PARTIAL)
    context.feed(0, 100, chunk=32)
    snapshot = context.save(flags=PARTIAL)
    context.feed(100, 400, chunk=32)
    assert context.load(nothing, flags=PARTIAL)
    cut, torn = context.rm(0, 100, -1), context.feed(100, 101)
    assert context.load(snapshot, flags=PARTIAL)
    return cut, torn, continued(context, path, 100, **SMALL)


def recurrent_part_dropped(path):
    """What the PARTIAL state of an empty sequence does to a hybrid: attention stays, byte for byte."""
    context = Context(path)
    nothing = context.save(flags=PARTIAL)
    context.feed(0, 12)
    snapshot, whole = context.save(flags=PARTIAL), context.save()
    assert context.load(nothing, flags=PARTIAL)
    assert context.load(snapshot, flags=PARTIAL)
    return context.save() == whole, continued(context, path, 12)


ARCHS = ["llama", "gemma3", "qwen35", "lfm2", "qwen4exp", "deepseek4"]


@pytest.mark.parametrize("probe", [emptied, emptied_stream], ids=["unified", "streams"])
@pytest.mark.parametrize("arch", ARCHS)
def test_the_sequence_is_empty(run, tiny_model, arch, probe):
    ends, status, off, beside = run(probe, tiny_model(arch))
    assert ends == [-1, -1]
    assert status == 0
    assert off < EXACT
    assert beside < EXACT


@pytest.mark.parametrize("arch", ["deepseek32", "minimax-m3", "dots3note"])
def test_with_an_indexer_too(run, more_model, arch):
    ends, status, off, beside = run(emptied, more_model(arch))
    assert ends == [-1, -1]
    assert status == 0
    assert off < EXACT
    assert beside < EXACT


def test_from_a_file_too(run, tiny_model):
    assert run(emptied_from_file, tiny_model("llama")) == [-1, -1]


@pytest.mark.parametrize("arch", ["gemma3", "gemma2", "deepseek4"])
def test_a_window_is_lost_and_the_cut_granted(run, tiny_model, arch):
    cut, torn, off = run(window_dropped, tiny_model(arch, window=16))
    assert cut
    assert torn < 0
    assert off < EXACT


@pytest.mark.parametrize("arch", ["qwen35", "jamba", "falcon-h1", "lfm2"])
def test_a_hybrid_loses_its_recurrent_part_only(run_both, tiny_model, arch):
    same, off = run_both(recurrent_part_dropped, tiny_model(arch))
    assert same
    assert off < EXACT
