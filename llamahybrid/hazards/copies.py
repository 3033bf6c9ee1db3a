"""Copies between sequences, shifts and removals: what is done later than it is asked for, or not at all."""

from __future__ import annotations

from llama_cpp import llama_cpp as lib

from llamahybrid.hazards.bench import PARTIAL, Bench, gap
from llamahybrid.hazards.probe import Model, Outcome, Verdict, probe, refused, went_on

_SPLIT = {"n_seq_max": 2, "kv_unified": False}
_SHARED = {"n_seq_max": 2, "kv_unified": True}


@probe(
    "pending-copy-saved",
    "Saving a sequence whose stream copy is pending",
    site="llama-kv-cache.cpp:451",
    sound="carries the copy out first",
    stock=Verdict.WRONG,
)
def copy_saved(bench: Bench) -> Outcome:
    """Not unified: copy twelve tokens to the second sequence, save it at once, restore elsewhere, go on."""
    bench.need_attention()
    context = bench.context(**_SPLIT).grown(12)
    context.cp(0, 1)
    other = bench.context(**_SPLIT)
    if not other.load(context.save(1), 1):
        return Outcome(Verdict.REFUSED, "the copy was not saved and restored")
    return went_on(other.goes_on(12, 1), "saved and restored")


@probe(
    "pending-copy-restored-into",
    "Restoring into a sequence whose stream copy is pending",
    site="llama-kv-cache.cpp:451",
    sound="carries the copy out first",
    stock=Verdict.WRONG,
)
def copy_restored_into(bench: Bench) -> Outcome:
    """Not unified: copy to the second sequence, remove that, restore another text into it, go on."""
    bench.need_attention()
    blob = bench.context(**_SPLIT).grown(12, 1, text=1).save(1)
    context = bench.context(**_SPLIT).grown(12)
    context.cp(0, 1)
    context.rm(1, -1, -1)
    if not context.load(blob, 1):
        return Outcome(Verdict.REFUSED, "the state was not restored")
    return went_on(context.goes_on(12, 1, text=1), "restored")


@probe(
    "pending-shift-saved",
    "Saving while a K-shift is pending",
    site="llama-kv-cache.cpp:817",
    sound="carries the shift out first",
    stock=Verdict.WRONG,
    model=Model("llama"),
)
def shift_saved(bench: Bench) -> Outcome:
    """Shift twelve tokens by five positions, save, restore elsewhere, and go on with both at position 17."""
    bench.need_attention()
    bench.need_multi_rope(False)
    context = bench.context().grown(12)
    if not lib.llama_memory_can_shift(context.memory):
        return Outcome(Verdict.REFUSED, "llama_memory_can_shift says no")
    lib.llama_memory_seq_add(context.memory, 0, 0, -1, 5)
    other = bench.context()
    if not other.load(context.save()):
        return Outcome(Verdict.REFUSED, "the shifted sequence was not saved and restored")
    if context.feed(17, 18) or other.feed(17, 18):
        return went_on(None, "saved and restored")
    return went_on(gap(other.logits(), context.logits()), "saved and restored")


@probe(
    "shift-under-m-rope",
    "seq_add on a model with M-RoPE",
    site="llama-kv-cache.cpp:577",
    sound="changes nothing",
    stock=Verdict.DIED,
)
def shift_under_m_rope(bench: Bench) -> Outcome:
    """Shift twelve tokens by five positions, where a position has several dimensions; go on at twelve."""
    bench.need_multi_rope(True)
    context = bench.context().grown(12)
    lib.llama_memory_seq_add(context.memory, 0, 0, -1, 5)
    return refused(context.goes_on(12), "seq_add took no effect")


@probe(
    "partial-stream-copy",
    "Copying a range between streams",
    site="llama-kv-cache.cpp:506",
    sound="changes nothing",
    stock=Verdict.DIED,
)
def partial_stream_copy(bench: Bench) -> Outcome:
    """Not unified: copy positions [2, 5) of twelve tokens to the second sequence; go on with the first."""
    bench.need_attention()
    context = bench.context(**_SPLIT).grown(12)
    context.cp(0, 1, 2, 5)
    return refused(context.goes_on(12), f"the copy ends at position {context.last(1)}")


@probe(
    "remove-all-sequences",
    "seq_rm of all sequences by id -1",
    site="llama-memory-recurrent.cpp:172",
    sound="removes them (stock always returns false)",
    stock=Verdict.REFUSED,
)
def remove_all(bench: Bench) -> Outcome:
    """Twelve tokens; seq_rm(-1, -1, -1); then a fresh prompt, or the old one where it was refused."""
    context = bench.context().grown(12)
    if context.rm(-1, -1, -1):
        return went_on(context.goes_on(0), "seq_rm returned true")
    return refused(context.goes_on(12), "seq_rm returned false")


@probe(
    "remove-inner-range",
    "Removing a range out of the middle of a hybrid",
    site="llama-memory-hybrid.cpp:143",
    sound="refuses: the recurrent state cannot forget it",
    stock=Verdict.WRONG,
)
def remove_inner(bench: Bench) -> Outcome:
    """Twelve tokens; seq_rm(0, 2, 5); go on, compared with a context that never saw those three tokens.

    Where positions may not have gaps there is no such context: there it is compared with all twelve.
    """
    bench.need_hybrid()
    context = bench.context().grown(12)
    if not context.rm(0, 2, 5):
        return refused(context.goes_on(12), "seq_rm returned false")
    if context.feed(12, 13):
        return went_on(None, "seq_rm returned true")
    without = bench.context()
    places = [position for position in range(13) if not 2 <= position < 5]
    gaps = not any(without.decode([(bench.token(position), position, (0,))]) for position in places)
    wanted = without.logits() if gaps else bench.clean(12)
    return went_on(gap(context.logits(), wanted), "seq_rm returned true")


@probe(
    "append-before-cut",
    "Attention appended to a sequence before its old tail is cut",
    site="llama-kv-cache.cpp:451",
    sound="refuses the copy, the restore or the decode: every position would be there twice",
    stock=Verdict.WRONG,
)
def append_before_cut(bench: Bench) -> Outcome:
    """Live: 24 tokens of another text; append [10, 20) of the wanted one, restore its snapshot, cut at 20.

    All calls succeed and the positions come out right.
    """
    bench.need_hybrid()

    def wanted(position: int) -> int:
        return bench.token(position, 0 if position < 10 else 1)

    def feed(begin: int, end: int) -> bool:
        return not donor.decode([(wanted(position), position, (0,)) for position in range(begin, end)])

    donor = bench.context(**_SHARED)
    if not (feed(0, 10) and feed(10, 20)):
        raise RuntimeError("a clean context refused a batch")
    snapshot = donor.save(flags=PARTIAL)
    donor.cp(0, 1, 10, 20)
    segment = donor.save(1)
    donor.rm(1, -1, -1)
    feed(20, 21)

    context = bench.context(**_SHARED).grown(24)
    if not context.load(segment, 1):
        return Outcome(Verdict.REFUSED, "the segment was not restored")
    context.cp(1, 0)
    context.rm(1, -1, -1)
    if not (context.load(snapshot, flags=PARTIAL) and context.rm(0, 20, -1)):
        return Outcome(Verdict.REFUSED, "the snapshot or the cut was refused")
    if context.decode([(wanted(20), 20, (0,))]):
        return went_on(None, "all calls succeeded")
    return went_on(gap(context.logits(), donor.logits()), "all calls succeeded")


PROBES = (
    copy_saved,
    copy_restored_into,
    shift_saved,
    shift_under_m_rope,
    partial_stream_copy,
    remove_all,
    remove_inner,
    append_before_cut,
)
