"""Rollback planes: which cuts are granted, and where a pending rollback goes."""

from __future__ import annotations

from typing import Any

from llama_cpp import llama_cpp as lib

from llamahybrid.hazards.bench import Bench, Context, gap
from llamahybrid.hazards.probe import Outcome, Verdict, probe, refused, went_on

_SITE = "llama-memory-recurrent.cpp:194"
_TWO = {"n_seq_max": 2, "kv_unified": True}
_THREE = {"n_seq_max": 3, "kv_unified": True}


def _rolled_back(context: Context, to: int, length: int, seq: int = 0) -> Outcome:
    """Cut `seq`, which holds the text of its number, from `length` to `to` tokens and go on from there."""
    if context.rm(seq, to, -1):
        said = f"seq_rm to {to} of {length} tokens returned true"
        return went_on(context.goes_on(to, seq, text=seq), said)
    said = f"seq_rm to {to} of {length} tokens returned false"
    return refused(context.goes_on(length, seq, text=seq), said)


def _pending(bench: Bench, **params: Any) -> Context:
    """Twelve tokens in one batch, of which two are rolled back."""
    context = bench.with_planes(**params).grown(12)
    if not context.rm(0, 10, -1):
        raise RuntimeError("a rollback of two within one batch was refused")
    return context


@probe(
    "rollback-one-batch",
    "Rollback within one batch (control)",
    site=_SITE,
    sound="grants it, exactly",
    stock=Verdict.EXACT,
)
def one_batch(bench: Bench) -> Outcome:
    """Four planes; twelve tokens in one batch; roll back four."""
    return _rolled_back(bench.with_planes().grown(12), 8, 12)


@probe(
    "rollback-single-tokens",
    "Rollback across single-token decodes",
    site=_SITE,
    sound="refuses: a one-token batch leaves one valid plane",
    stock=Verdict.WRONG,
)
def single_tokens(bench: Bench) -> Outcome:
    """Four planes; twelve one-token decodes; roll back four."""
    return _rolled_back(bench.with_planes().grown(12, chunk=1), 8, 12)


@probe(
    "rollback-last-token",
    "Rollback of one token decoded after a batch",
    site=_SITE,
    sound="refuses, or keeps the plane before the batch",
    stock=Verdict.WRONG,
)
def last_token(bench: Bench) -> Outcome:
    """Four planes; eleven tokens in one batch, then one; roll back that one."""
    context = bench.with_planes().grown(11)
    context.feed(11, 12)
    return _rolled_back(context, 11, 12)


@probe(
    "rollback-twice",
    "Rollback, decode, rollback",
    site=_SITE,
    sound="refuses the second rollback",
    stock=Verdict.WRONG,
)
def twice(bench: Bench) -> Outcome:
    """Roll back two of twelve tokens, decode one, roll back two."""
    context = _pending(bench)
    context.feed(10, 11)
    return _rolled_back(context, 9, 11)


@probe(
    "rollback-after-restore",
    "Rollback right after a state restore",
    site="llama-memory-recurrent.cpp:1000",
    sound="refuses: a restore fills the first plane only",
    stock=Verdict.WRONG,
)
def after_restore(bench: Bench) -> Outcome:
    """Restore twelve tokens over twenty others of another text; roll back two."""
    blob = bench.with_planes().grown(12).save()
    context = bench.with_planes().grown(20, text=1)
    if not context.load(blob):
        raise RuntimeError("a sound state was refused")
    return _rolled_back(context, 10, 12)


@probe(
    "rollback-embeddings",
    "Rollback with embeddings on",
    site=_SITE,
    sound="refuses: every ubatch is split to where few planes are filled",
    stock=Verdict.WRONG,
)
def embeddings(bench: Bench) -> Outcome:
    """embeddings=True, ubatches of eight; ten tokens in one batch; roll back three."""
    return _rolled_back(
        bench.with_planes(n_ubatch=8, embeddings=True, pooling_type=0).grown(10),
        7,
        10,
    )


@probe(
    "rollback-bystander",
    "Rollback of a sequence while others decoded",
    site=_SITE,
    sound="refuses: the others' batch moved its row",
    stock=Verdict.WRONG,
)
def bystander(bench: Bench) -> Outcome:
    """Three unified sequences of eight tokens; decode one more of the outer two; roll the middle one back."""
    context = bench.with_planes(**_THREE)
    for seq in range(3):
        context.grown(8, seq, text=seq)
    context.decode([(5, 8, (0,)), (6, 8, (2,))])
    return _rolled_back(context, 6, 8, 1)


@probe(
    "stale-rollback-finite-removal",
    "A pending rollback outlives seq_rm with a finite end",
    site="llama-memory-recurrent.cpp:177",
    sound="starts the next prompt clean",
    stock=Verdict.WRONG,
)
def finite_removal(bench: Bench) -> Outcome:
    """Roll back two of twelve tokens, remove [0, 100), decode a fresh prompt."""
    context = _pending(bench)
    said = f"seq_rm(0, 0, 100) returned {context.rm(0, 0, 100)}".lower()
    return went_on(context.goes_on(0), said)


@probe(
    "stale-rollback-keep",
    "A pending rollback outlives seq_keep of another sequence",
    site="llama-memory-recurrent.cpp:286",
    sound="starts the next prompt clean",
    stock=Verdict.WRONG,
)
def keep(bench: Bench) -> Outcome:
    """Roll back two of twelve tokens, keep only the empty second sequence, decode a fresh prompt."""
    context = _pending(bench, **_TWO)
    lib.llama_memory_seq_keep(context.memory, 1)
    if context.feed(0, 2):
        return went_on(None, "seq_keep")
    return went_on(context.goes_on(2), "seq_keep")


@probe(
    "stale-rollback-copy",
    "Copying a sequence while its rollback is pending",
    site="llama-memory-recurrent.cpp:249",
    sound="copies the rolled-back state",
    stock=Verdict.WRONG,
)
def copy(bench: Bench) -> Outcome:
    """Roll back two of twelve tokens, copy the sequence, go on with the copy."""
    context = _pending(bench, **_TWO)
    context.cp(0, 1)
    return went_on(context.goes_on(10, 1), "seq_cp")


@probe(
    "stale-rollback-copy-saved",
    "Saving a copy made while a rollback was pending",
    site="llama-memory-recurrent.cpp:249",
    sound="saves what the original would save",
    stock=Verdict.WRONG,
)
def copy_saved(bench: Bench) -> Outcome:
    """Roll back two of twelve tokens, copy the sequence, save the copy, restore it elsewhere, go on."""
    context = _pending(bench, **_TWO)
    context.cp(0, 1)
    blob = context.save(1)
    other = bench.context()
    if not other.load(blob):
        return Outcome(Verdict.REFUSED, "the copy could not be saved and restored")
    same = "the same bytes" if blob == context.save(0) else "other bytes than the original"
    return went_on(other.goes_on(10), f"the copy saved {same}")


@probe(
    "stale-rollback-whole-state",
    "Whole-state size while a shared cell has differing rollbacks",
    site="llama-memory-recurrent.cpp:797",
    sound="saves it, or returns 0",
    stock=Verdict.DIED,
)
def whole_state(bench: Bench) -> Outcome:
    """Roll back two of twelve tokens, copy the sequence, save the whole state, restore it, go on."""
    context = _pending(bench, **_TWO)
    context.cp(0, 1)
    blob = context.save_whole()
    if not blob:
        return refused(context.goes_on(10), "the whole state was not saved")
    other = bench.with_planes(**_TWO)
    if not other.load_whole(blob):
        return Outcome(Verdict.REFUSED, "the whole state was not restored")
    if other.feed(10, 11):
        return went_on(None, "saved and restored")
    return went_on(gap(other.logits(), bench.clean(10)), "saved and restored")


PROBES = (
    one_batch,
    single_tokens,
    last_token,
    twice,
    after_restore,
    embeddings,
    bystander,
    finite_removal,
    keep,
    copy,
    copy_saved,
    whole_state,
)
