"""0019: deepseek4 rolls back, copies and goes on only with what it has, and refuses the rest."""

from __future__ import annotations

import pytest
from capi import EXACT, PARTIAL, Context, difference, fresh, lib

SPLIT = {"n_seq_max": 2, "kv_unified": False}
PLANES = {"n_rs_seq": 4}
BLOCKS = 9  # tokens that complete two blocks of compressed rows, from what the state held before them


def further(context, path, begin, seq=0, *, text=0, **params):
    """Return the difference of logits after `BLOCKS` more tokens from `begin`; None for refused ones."""
    end = begin + BLOCKS
    if context.feed(begin, end, seq, text=text) or context.feed(end, end + 1, seq, text=text):
        return None
    return difference(context.logits(), fresh(path, end, text=text, seq=seq, **params))


def cut_after_single_tokens(path):
    """Beside a context that decoded in the same batches: on some CPUs they alone make 1.2e-4."""
    context, other = Context(path, **PLANES), Context(path, **PLANES)
    context.feed(0, 10, chunk=1)
    granted = context.rm(0, 6, -1)
    other.feed(0, 10, chunk=1)
    for one in (context, other):
        if one.feed(10, 10 + BLOCKS) or one.feed(10 + BLOCKS, 11 + BLOCKS):
            return granted, None
    return granted, difference(context.logits(), other.logits())


def cut_after_a_cut(path):
    context = Context(path, **PLANES)
    context.feed(0, 12)
    assert context.rm(0, 10, -1)
    context.feed(10, 11)
    return context.rm(0, 9, -1), further(context, path, 11)


def cut_after_a_restore(path):
    blob = Context(path, **PLANES)
    blob.feed(0, 12)
    context = Context(path, **PLANES)
    context.feed(0, 20, text=1)
    assert context.load(blob.save())
    return context.rm(0, 10, -1), further(context, path, 12)


def cut_of_a_copy(path):
    context = Context(path, **SPLIT, **PLANES)
    context.feed(0, 12)
    context.feed(0, 12, 1)
    context.cp(0, 1)
    return context.rm(1, 10, -1), further(context, path, 12, 1, text=0, **SPLIT)


def cut_within_a_batch(path):
    apart = []
    for length in (5, 12, 13, 14, 130):  # a row is compressed of four tokens, or of 128
        for tokens in (1, 2, 4):
            context = Context(path, **PLANES)
            context.feed(0, length)
            assert context.rm(0, length - tokens, -1)
            apart.append(further(context, path, length - tokens))
    return max(apart)


def cut_then_stopped(path):
    context = Context(path, **PLANES)
    context.feed(0, 13)
    assert context.rm(0, 9, -1)
    context.count_polls()
    context.stop_at = 1
    assert context.feed(9, 10) == 2
    context.stop_at = None
    return further(context, path, context.last() + 1)


def copy_while_a_cut_waits(path):
    context = Context(path, **SPLIT, **PLANES)
    context.feed(0, 13)
    assert context.rm(0, 9, -1)
    context.cp(0, 1)
    return further(context, path, 9, 1, text=0, **SPLIT)


def moved(path):
    context = Context(path, **SPLIT)
    context.feed(0, 10)
    context.cp(0, 1)
    context.rm(0, -1, -1)
    return further(context, path, 10, 1, text=0, **SPLIT), further(context, path, 0, **SPLIT)


def copy_of_a_part(path):
    context = Context(path, **SPLIT)
    context.feed(0, 12)
    for begin, end in ((2, 5), (2, -1), (0, 5)):
        context.cp(0, 1, begin, end)
    return context.ends(1), further(context, path, 12, **SPLIT)


def far_sequences(path, **params):
    context = Context(path, **params)
    context.feed(0, 12)
    context.cp(0, 5)
    context.cp(5, 0)
    lib.llama_memory_seq_keep(context.memory, 5)
    said = [
        context.read(context.save(), 5),
        context.rm(5, -1, -1),
        context.rm(5, 3, -1),
        len(context.save(5)),
        context.last(5),
    ]
    return said, further(context, path, 12, **params)


def far_of_one(path):
    return far_sequences(path)


def far_of_two(path):
    return far_sequences(path, **SPLIT)


def snapshot_alone(path):
    context = Context(path)
    context.feed(0, 12)
    snapshot = context.save(flags=PARTIAL)
    empty = Context(path)
    assert empty.load(snapshot, flags=PARTIAL)
    torn = empty.feed(12, 13)
    assert empty.rm(0, -1, -1)
    return torn, further(empty, path, 0)


def snapshot_and_cut(path):
    context = Context(path)
    context.feed(0, 12)
    snapshot = context.save(flags=PARTIAL)
    context.feed(12, 30)
    assert context.load(snapshot, flags=PARTIAL)
    assert context.rm(0, 12, -1)
    return further(context, path, 12)


@pytest.mark.parametrize(
    "probe",
    [cut_after_single_tokens, cut_after_a_cut, cut_after_a_restore, cut_of_a_copy],
)
def test_a_cut_to_a_plane_of_another_history_is_refused(run, tiny_model, probe):
    granted, off = run(probe, tiny_model("deepseek4"))
    assert not granted
    assert off < EXACT


def test_a_cut_to_a_plane_of_this_history_is_exact(run_both, tiny_model):
    assert run_both(cut_within_a_batch, tiny_model("deepseek4")) < EXACT


def test_a_pending_rollback_outlives_a_stop(run_both, tiny_model):
    off = run_both(cut_then_stopped, tiny_model("deepseek4"))
    assert off < EXACT


def test_a_copy_continues_from_the_pending_rollback(run, tiny_model):
    assert run(copy_while_a_cut_waits, tiny_model("deepseek4")) < EXACT


def test_a_pending_copy_gets_the_content_of_its_time(run, tiny_model):
    assert max(run(moved, tiny_model("deepseek4"))) < EXACT


def test_a_copy_of_a_part_changes_nothing(run, tiny_model):
    copied, off = run(copy_of_a_part, tiny_model("deepseek4"))
    assert copied == [-1, -1]
    assert off < EXACT


@pytest.mark.parametrize("probe", [far_of_one, far_of_two])
def test_a_sequence_out_of_range_is_refused(run, tiny_model, probe):
    said, off = run(probe, tiny_model("deepseek4"))
    assert said == [0, False, False, 0, -1]
    assert off < EXACT


def test_a_snapshot_without_its_compressed_rows_is_refused(run, tiny_model):
    torn, removed = run(snapshot_alone, tiny_model("deepseek4"))
    assert torn < 0
    assert removed < EXACT


def test_a_snapshot_over_its_own_history_is_exact(run_both, tiny_model):
    assert run_both(snapshot_and_cut, tiny_model("deepseek4")) < EXACT
