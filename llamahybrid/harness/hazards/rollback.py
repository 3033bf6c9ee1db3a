"""Rollback planes: which cuts are granted, and where a pending rollback goes."""

from __future__ import annotations

from typing import Any

from llama_cpp import llama_cpp as lib

from llamahybrid.harness.hazards.case import probe
from llamahybrid.harness.hazards.context import PARTIAL, THREE, TWO, Context, cut
from llamahybrid.harness.hazards.effect import Effect, all_sound, granted, refused, went_on, wrong
from llamahybrid.harness.hazards.model import ModelUnderTest


def _pending(tested: ModelUnderTest, **params: Any) -> Context:
    """Twelve tokens in one batch, of which two are rolled back."""
    context = tested.with_planes(**params).grown(12)
    if not context.rm(0, 10, -1):
        raise RuntimeError("a rollback of two within one batch was refused")
    return context


def _pending_copied(tested: ModelUnderTest) -> Context:
    """The same, copied to a second sequence while that rollback is pending."""
    context = _pending(tested, **TWO)
    context.cp(0, 1)
    return context


@probe("Rollback within one batch (control)", "llama_memory_recurrent::seq_rm")
def rollback_one_batch(tested: ModelUnderTest) -> Effect:
    """Four planes; twelve tokens in one batch; roll back five, which is refused; roll back four."""
    context = tested.with_planes().grown(12)
    if context.rm(0, 7, -1):
        return wrong("seq_rm to 7 of 12 tokens returned true")
    return cut(context, 8, 12)


@probe("Rollback across single-token decodes", "llama_memory_recurrent::seq_rm")
def rollback_single_tokens(tested: ModelUnderTest) -> Effect:
    """Four planes; twelve one-token decodes; roll back four."""
    return cut(tested.with_planes().grown(12, chunk=1), 8, 12)


@probe("Rollback of one token decoded after a batch", "llama_memory_recurrent::seq_rm")
def rollback_last_token(tested: ModelUnderTest) -> Effect:
    """Four planes; eleven tokens in one batch, then one; roll back that one."""
    context = tested.with_planes().grown(11)
    context.feed(11, 12)
    return cut(context, 11, 12)


@probe("Rollback, decode, rollback", "llama_memory_recurrent::seq_rm")
def rollback_twice(tested: ModelUnderTest) -> Effect:
    """Roll back two of twelve tokens, decode one, roll back two."""
    context = _pending(tested)
    context.feed(10, 11)
    return cut(context, 9, 11)


@probe("Rollback right after a state restore", "llama_memory_recurrent::state_read_meta")
def rollback_after_restore(tested: ModelUnderTest) -> Effect:
    """Restore twelve tokens over twenty others of another text; roll back two."""
    blob = tested.with_planes().grown(12).save()
    context = tested.with_planes().grown(20, text=1)
    if not context.load(blob):
        raise RuntimeError("a sound state was refused")
    return cut(context, 10, 12)


@probe("Rollback with embeddings on", "llama_memory_recurrent::seq_rm")
def rollback_embeddings(tested: ModelUnderTest) -> Effect:
    """embeddings=True, ubatches of eight; ten tokens in one batch; roll back three."""
    return cut(tested.with_planes(n_ubatch=8, embeddings=True, pooling_type=0).grown(10), 7, 10)


@probe("Rollback of a sequence while others decoded", "llama_memory_recurrent::seq_rm")
def rollback_bystander(tested: ModelUnderTest) -> Effect:
    """Three unified sequences of eight tokens; decode one more of the outer two; roll the middle one back."""
    context = tested.with_planes(**THREE).filled({0: 8, 1: 8, 2: 8})
    context.decode([(5, 8, (0,)), (6, 8, (2,))])
    return cut(context, 6, 8, 1)


@probe("Rollback of one of two sequences that share their state", "llama_memory_recurrent::seq_rm")
def rollback_shared(tested: ModelUnderTest) -> Effect:
    """Twelve tokens; copy the sequence; roll the original back by two; go on with both."""
    context = tested.with_planes(**TWO).grown(12)
    context.cp(0, 1)
    if context.rm(0, 10, -1):
        said = f"seq_rm returned true, the copy ends at position {context.last(1)}"
        if context.last(1) != 11:
            return wrong(said)
        return all_sound(went_on(context.goes_on(end, seq), said) for end, seq in ((12, 1), (10, 0)))
    return all_sound(
        refused(context.goes_on(12, seq), f"seq_rm returned false, sequence {seq} goes on") for seq in (1, 0)
    )


@probe("A draft rejected whole: rollback to before its batch", "llama_memory_recurrent::seq_rm")
def rollback_to_batch_start(tested: ModelUnderTest) -> Effect:
    """Four planes, twelve tokens, snapshot; decode a draft of four in one batch; roll back those four.

    If that is refused, restore the snapshot, cut to twelve and go on. llama-server relies on this when a
    draft model with a recurrent memory takes its target back to before the batch.
    """
    context = tested.with_planes().grown(12)
    snapshot = context.save(flags=PARTIAL)
    context.feed(12, 16)
    if context.rm(0, 12, -1):
        return went_on(context.goes_on(12), "seq_rm to 12 of 16 tokens returned true")
    if not context.goes_back(snapshot, 12):
        return wrong("the rollback was refused, and so were the snapshot or its cut")
    return went_on(context.goes_on(12), "the rollback was refused, snapshot and cut were granted")


@probe("A draft rejected in part by a memory without planes", "llama_memory_recurrent::seq_rm")
def draft_rejected_recurrent(tested: ModelUnderTest) -> Effect:
    """Twelve tokens, snapshot; decode a draft of five; cut to 14, which is refused, and not in half.

    Then restore the snapshot, cut to twelve, decode the two accepted tokens again and go on.
    """
    tested.need("recurrent")
    context = tested.context().grown(12)
    snapshot = context.save(flags=PARTIAL)
    context.feed(12, 17)
    if context.rm(0, 14, -1):
        return went_on(context.goes_on(14), "seq_rm to 14 of 17 tokens returned true")
    left = context.last() + 1
    if not context.goes_back(snapshot, 12):
        return wrong("the cut was refused, and so were the snapshot or its cut")
    status = context.feed(12, 14)
    said = f"the cut was refused, {left} tokens left, snapshot and cut were granted"
    return went_on(status or context.goes_on(14), said)


@probe("A pending rollback outlives seq_rm with a finite end", "llama_memory_recurrent::seq_rm")
def stale_rollback_finite_removal(tested: ModelUnderTest) -> Effect:
    """Roll back two of twelve tokens, remove [0, 100), decode a fresh prompt."""
    context = _pending(tested)
    said = f"seq_rm(0, 0, 100) returned {context.rm(0, 0, 100)}".lower()
    return went_on(context.goes_on(0), said)


@probe("A pending rollback outlives seq_keep of another sequence", "llama_memory_recurrent::seq_keep")
def stale_rollback_keep(tested: ModelUnderTest) -> Effect:
    """Roll back two of twelve tokens, keep only the empty second sequence, decode a fresh prompt."""
    context = _pending(tested, **TWO)
    lib.llama_memory_seq_keep(context.memory, 1)
    found = context.starts_over(2)
    return went_on(found, f"seq_keep, {context.last() + 1} tokens decoded")


@probe("Copying a sequence while its rollback is pending", "llama_memory_recurrent::seq_cp")
def stale_rollback_copy(tested: ModelUnderTest) -> Effect:
    """Roll back two of twelve tokens, copy the sequence, go on with the copy, then with the original."""
    context = _pending_copied(tested)
    return all_sound(
        went_on(context.goes_on(10, seq), f"seq_cp, sequence {seq} from position 10") for seq in (1, 0)
    )


@probe("Saving a copy made while a rollback was pending", "llama_memory_recurrent::seq_cp")
def stale_rollback_copy_saved(tested: ModelUnderTest) -> Effect:
    """Roll back two of twelve tokens, copy the sequence, save the copy, restore it elsewhere, go on."""
    context = _pending_copied(tested)
    blob = context.save(1)
    other = tested.context()
    granted(other.load(blob), "the copy could not be saved and restored")
    same = "the same bytes" if blob == context.save(0) else "other bytes than the original"
    return went_on(other.goes_on(10), f"the copy saved {same}")


@probe("Whole-state size while a shared cell has differing rollbacks", "llama_memory_recurrent::state_write")
def stale_rollback_whole_state(tested: ModelUnderTest) -> Effect:
    """Roll back two of twelve tokens, copy the sequence, save the whole state, restore it, go on."""
    context = _pending_copied(tested)
    blob = context.save_whole()
    if not blob:
        return refused(context.goes_on(10), "the whole state was not saved")
    other = tested.with_planes(**TWO)
    granted(other.load_whole(blob), "the whole state was not restored")
    if status := other.feed(10, 11):
        return went_on(status, "saved and restored")
    return all_sound(
        went_on(found, f"saved and restored, {said}")
        for found, said in (
            (tested.gap(other.logits(), tested.clean(10)), "from the saved state"),
            (context.goes_on(10), "from the live state"),
        )
    )
