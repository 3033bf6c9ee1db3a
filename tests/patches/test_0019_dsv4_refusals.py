"""0019: deepseek4 rolls back, copies and goes on only with what it has, and refuses the rest."""

from __future__ import annotations

import pytest
from capi import PARTIAL, SPLIT, Context, gap, lib, on, sound

pytestmark = on("deepseek4")
PLANES = {"n_rs_seq": 4}
BLOCKS = 9  # tokens that complete two blocks of compressed rows, from what the state held before them


def far(context, begin, seq=0, *, text=0):
    """Tell whether `BLOCKS` more tokens are decoded with the logits of a context that saw the text alone."""
    end = begin + BLOCKS
    return context.feed(begin, end, seq, text=text) == 0 and sound(context, end, seq, text=text)


def test_a_cut_to_the_plane_of_a_token_that_was_decoded_alone_is_refused(path):
    """Beside a context that decoded in the same batches: on some CPUs they alone make 1.2e-4."""
    context, other = Context(path, **PLANES), Context(path, **PLANES)
    context.feed(0, 10, chunk=1)
    assert not context.rm(0, 6, -1)
    other.feed(0, 10, chunk=1)
    for one in (context, other):
        assert one.feed(10, 10 + BLOCKS) == one.feed(10 + BLOCKS, 11 + BLOCKS) == 0
    assert gap(context.logits(), other.logits()).exact


def test_a_cut_behind_a_cut_is_refused(path):
    context = Context(path, **PLANES).grown(12)
    assert context.rm(0, 10, -1)
    context.feed(10, 11)
    assert not context.rm(0, 9, -1)
    assert far(context, 11)


def test_a_cut_of_a_restored_state_is_refused(path):
    state = Context(path, **PLANES).grown(12).save()
    context = Context(path, **PLANES).grown(20, text=1)
    assert context.load(state)
    assert not context.rm(0, 10, -1)
    assert far(context, 12)


def test_a_cut_of_a_copy_is_refused(path):
    context = Context(path, **SPLIT, **PLANES).filled({0: 12, 1: 12})
    context.cp(0, 1)
    assert not context.rm(1, 10, -1)
    assert far(context, 12, 1)


@pytest.mark.right_on_stock
@pytest.mark.parametrize("length", [5, 12, 13, 14, 130])  # a row is compressed of four tokens, or of 128
def test_a_cut_to_a_plane_of_this_history_is_exact(path, length):
    for tokens in (1, 2, 4):
        context = Context(path, **PLANES).grown(length)
        assert context.rm(0, length - tokens, -1)
        assert far(context, length - tokens)


@pytest.mark.right_on_stock
def test_a_pending_rollback_outlives_a_stop(path):
    context = Context(path, **PLANES).grown(13)
    assert context.rm(0, 9, -1)
    assert context.stopped(1, lambda: context.feed(9, 10)) == 2
    assert far(context, context.last() + 1)


def test_a_copy_continues_from_the_pending_rollback(path):
    context = Context(path, **SPLIT, **PLANES).grown(13)
    assert context.rm(0, 9, -1)
    context.cp(0, 1)
    assert far(context, 9, 1)


def test_a_pending_copy_gets_the_content_of_its_time(path):
    context = Context(path, **SPLIT).grown(10)
    context.cp(0, 1)
    context.rm(0, -1, -1)
    assert far(context, 10, 1)
    assert far(context, 0)


def test_a_copy_of_a_part_changes_nothing(path):
    context = Context(path, **SPLIT).grown(12)
    for begin, end in ((2, 5), (2, -1), (0, 5)):
        context.cp(0, 1, begin, end)
    assert (context.first(1), context.last(1)) == (-1, -1)
    assert far(context, 12)


@pytest.mark.parametrize("params", [{}, SPLIT], ids=["one", "two"])
def test_a_sequence_out_of_range_is_refused(path, params):
    context = Context(path, **params).grown(12)
    context.cp(0, 5)
    context.cp(5, 0)
    lib.llama_memory_seq_keep(context.memory, 5)
    assert not context.read(context.save(), 5)
    assert not context.rm(5, -1, -1)
    assert not context.rm(5, 3, -1)
    assert not context.save(5)
    assert context.last(5) == -1
    assert far(context, 12)


def test_a_snapshot_without_its_compressed_rows_is_refused(path):
    snapshot = Context(path).grown(12).save(flags=PARTIAL)
    empty = Context(path)
    assert empty.load(snapshot, flags=PARTIAL)
    assert empty.feed(12, 13) < 0
    assert empty.rm(0, -1, -1)
    assert far(empty, 0)


@pytest.mark.right_on_stock
def test_a_snapshot_over_its_own_history_is_exact(path):
    context = Context(path).grown(12)
    snapshot = context.save(flags=PARTIAL)
    context.feed(12, 30)
    assert context.goes_back(snapshot, 12)
    assert far(context, 12)
