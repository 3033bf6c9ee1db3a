"""0001: a rollback is granted only to snapshot planes that hold this history, and stays with its state."""

from __future__ import annotations

import pytest
from capi import EXACT, Context, continued, difference, fresh, lib

PLANES = {"n_rs_seq": 4}
THREE = {**PLANES, "n_seq_max": 3, "kv_unified": True}
TWO = {**PLANES, "n_seq_max": 2, "kv_unified": True}
ROLLBACK = ("qwen35", "lfm2", "nemotron_h")


def after_one_batch(path):
    context = Context(path, **PLANES)
    context.feed(0, 12)
    granted = [context.rm(0, 12 - back, -1) for back in (5, 4)]
    return granted, continued(context, path, 8)


def after_single_tokens(path):
    context = Context(path, **PLANES)
    context.feed(0, 12, chunk=1)
    granted = context.rm(0, 8, -1)
    return granted, continued(context, path, 8 if granted else 12)


def twice(path):
    context = Context(path, **PLANES)
    context.feed(0, 12)
    context.rm(0, 10, -1)
    context.feed(10, 11)
    granted = context.rm(0, 9, -1)
    return granted, continued(context, path, 9 if granted else 11)


def after_a_restore(path):
    context = Context(path, **PLANES)
    context.feed(0, 12)
    blob = context.save()
    other = Context(path, **PLANES)
    other.feed(0, 20, text=1)
    assert other.load(blob)
    granted = other.rm(0, 10, -1)
    return granted, continued(other, path, 10 if granted else 12)


def with_all_outputs(path):
    small = {**PLANES, "n_ubatch": 8, "embeddings": True, "pooling_type": 0}
    context = Context(path, **small)
    context.feed(0, 10)
    granted = context.rm(0, 7, -1)
    return granted, continued(context, path, 7 if granted else 10, **small)


def of_a_bystander(path):
    context = Context(path, **THREE)
    for seq in range(3):
        context.feed(0, 8, seq)
    context.decode([(5, 8, (0,)), (6, 8, (2,))])
    granted = context.rm(1, 6, -1)
    return granted, continued(context, path, 6 if granted else 8, 1, **THREE)


def then_removed_by_a_finite_range(path):
    context = Context(path, **PLANES)
    context.feed(0, 12)
    context.rm(0, 10, -1)
    context.rm(0, 0, 100)
    return True, continued(context, path, 0)


def then_another_kept(path):
    context = Context(path, **TWO)
    context.feed(0, 12)
    context.rm(0, 10, -1)
    lib.llama_memory_seq_keep(context.memory, 1)
    return True, continued(context, path, 0)


def then_copied(path):
    context = Context(path, **TWO)
    context.feed(0, 12)
    context.rm(0, 10, -1)
    context.cp(0, 1)
    assert context.feed(10, 11, 1, text=0) == 0
    copy = difference(context.logits(), fresh(path, 10))
    return True, max(copy, continued(context, path, 10))


def of_a_shared_state(path):
    context = Context(path, **TWO)
    context.feed(0, 12)
    context.cp(0, 1)
    granted = context.rm(0, 10, -1)
    if granted:
        return granted, abs(context.ends(1)[1] - 11)
    return granted, continued(context, path, 12)


def saved_whole_while_copied(path):
    context = Context(path, **TWO)
    context.feed(0, 12)
    context.rm(0, 10, -1)
    context.cp(0, 1)
    return lib.llama_state_get_size(context.ctx) > 0, continued(context, path, 10)


@pytest.mark.parametrize("arch", ROLLBACK)
def test_a_rollback_within_single_token_decodes_is_refused(run, tiny_model, arch):
    assert run(after_one_batch, tiny_model(arch)) == [[False, True], pytest.approx(0, abs=EXACT)]
    granted, off = run(after_single_tokens, tiny_model(arch))
    assert not granted
    assert off < EXACT


@pytest.mark.parametrize(
    "probe", [twice, after_a_restore, with_all_outputs, of_a_bystander, of_a_shared_state]
)
def test_planes_of_another_history_are_not_used(run, tiny_model, probe):
    granted, off = run(probe, tiny_model("qwen35"))
    assert not granted
    assert off < EXACT


@pytest.mark.parametrize("probe", [then_removed_by_a_finite_range, then_another_kept, then_copied])
def test_a_pending_rollback_goes_with_its_state(run, tiny_model, probe):
    granted, off = run(probe, tiny_model("qwen35"))
    assert granted
    assert off < EXACT


def test_a_copied_rollback_can_be_saved(run, tiny_model):
    granted, off = run(saved_whole_while_copied, tiny_model("qwen35"))
    assert granted
    assert off < EXACT
