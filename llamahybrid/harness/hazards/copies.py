"""Several sequences: copies, shifts and removals that are delayed or impossible, a batch of several."""

from __future__ import annotations

from llama_cpp import llama_cpp as lib

from llamahybrid.harness.hazards.case import probe
from llamahybrid.harness.hazards.context import BOTH, PARTIAL, SPLIT, TWO, all_go_on, next_prompt
from llamahybrid.harness.hazards.effect import Behaviour, Effect, granted, refused, went_on, wrong
from llamahybrid.harness.hazards.model import ModelUnderTest


@probe("Saving a sequence whose stream copy is pending", "llama_kv_cache::seq_cp")
def pending_copy_saved(tested: ModelUnderTest) -> Effect:
    """Not unified: copy twelve tokens to the second sequence, save it at once, restore elsewhere, go on."""
    tested.need("attention")
    context = tested.context(**SPLIT).grown(12)
    context.cp(0, 1)
    other = tested.context(**SPLIT)
    granted(other.load(context.save(1), 1), "the copy was not saved and restored")
    return went_on(other.goes_on(12, 1), "saved and restored")


@probe("Restoring into a sequence whose stream copy is pending", "llama_kv_cache::seq_cp")
def pending_copy_restored_into(tested: ModelUnderTest) -> Effect:
    """Not unified: copy to the second sequence, remove that, restore another text into it, go on."""
    tested.need("attention")
    blob = tested.context(**SPLIT).grown(12, 1, text=1).save(1)
    context = tested.context(**SPLIT).grown(12)
    context.cp(0, 1)
    context.rm(1, -1, -1)
    granted(context.load(blob, 1), "the state was not restored")
    return went_on(context.goes_on(12, 1, text=1), "restored")


@probe("Saving while a K-shift is pending", "llama_kv_cache::update")
def pending_shift_saved(tested: ModelUnderTest) -> Effect:
    """Shift twelve tokens by five positions, save, restore elsewhere, and go on with both at position 17."""
    tested.need("attention")
    tested.need_multi_rope(False)
    context = tested.context().grown(12)
    granted(lib.llama_memory_can_shift(context.memory), "llama_memory_can_shift says no")
    lib.llama_memory_seq_add(context.memory, 0, 0, -1, 5)
    other = tested.context()
    granted(other.load(context.save()), "the shifted sequence was not saved and restored")
    if status := context.feed(17, 18) or other.feed(17, 18):
        return went_on(status, "saved and restored")
    return went_on(tested.gap(other.logits(), context.logits()), "saved and restored")


@probe("seq_add and seq_div on a model with M-RoPE", "llama_kv_cache::seq_add")
def shift_under_m_rope(tested: ModelUnderTest) -> Effect:
    """Shift twelve tokens by five and halve their positions, which have several dimensions; go on at 12."""
    tested.need_multi_rope(True)
    context = tested.context().grown(12)
    lib.llama_memory_seq_add(context.memory, 0, 0, -1, 5)
    lib.llama_memory_seq_div(context.memory, 0, 0, -1, 2)
    said = f"the sequence ends at position {context.last()}"
    return refused(context.goes_on(12), said)


@probe("Copying a range between streams", "llama_kv_cache::seq_cp")
def partial_stream_copy(tested: ModelUnderTest) -> Effect:
    """Not unified: copy positions [2, 5) of twelve tokens to the second sequence; go on with the first."""
    tested.need("attention")
    context = tested.context(**SPLIT).grown(12)
    context.cp(0, 1, 2, 5)
    said = f"the copy ends at position {context.last(1)}"
    return refused(context.goes_on(12), said)


@probe("seq_rm of all sequences by id -1", "llama_memory_recurrent::seq_rm")
def remove_all_sequences(tested: ModelUnderTest) -> Effect:
    """Two sequences of twelve tokens; seq_rm(-1, -1, -1); a fresh prompt in the second one.

    If that was refused, go on with both.
    """
    context = tested.context(**TWO).filled(BOTH)
    if context.rm(-1, -1, -1):
        ends = context.last_of()
        said = f"seq_rm returned true, the sequences end at {ends}"
        return went_on(context.starts_over(12, 1), said) if ends == [-1, -1] else wrong(said)
    return all_go_on(refused, context, "seq_rm returned false")


@probe("Removing a part of all sequences of a recurrent memory", "llama_memory_recurrent::seq_rm")
def remove_part_of_all(tested: ModelUnderTest) -> Effect:
    """Two sequences of twelve tokens; seq_rm of -1 from 12, of [5, 5), from 6, of [0, 6); go on with both."""
    tested.need("recurrent")
    context = tested.context(**TWO).filled(BOTH)
    parts = ((12, -1), (5, 5), (6, -1), (0, 6))
    answers = [int(context.rm(-1, *part)) for part in parts]
    said = f"seq_rm returned {answers}"
    return wrong(said) if any(answers[2:]) else all_go_on(refused, context, said)


@probe("seq_rm of sequence -7", "llama_kv_cache::seq_rm")
def remove_negative_sequence(tested: ModelUnderTest) -> Effect:
    """Twelve tokens; seq_rm(-7, -1, -1); then another prompt, or the old one where it was refused."""
    context = tested.context().grown(12)
    if not context.rm(-7, -1, -1):
        return refused(context.goes_on(12), "seq_rm returned false")
    said = f"seq_rm returned true, the sequence ends at position {context.last()}"
    return next_prompt(context, 8, said)


@probe("Removing a range out of the middle of a hybrid", "llama_memory_hybrid::seq_rm")
def remove_inner_range(tested: ModelUnderTest) -> Effect:
    """Twelve tokens; seq_rm(0, 2, 5); go on, compared with a context that never saw those three tokens.

    If positions may not have gaps, it is compared with all twelve. A library that refuses it has to refuse
    [0, 5) and [0, 11), too; ranges without tokens ([5, 5), [5, 2), [12, 40)) may be granted.
    """
    tested.need("hybrid")
    context = tested.context().grown(12)
    if not context.rm(0, 2, 5):
        ranges = ((2, 5), (0, 5), (-1, 11), (5, 5), (5, 2), (12, 40))
        answers = [int(context.rm(0, *each)) for each in ranges]
        said = f"seq_rm returned {answers}"
        return wrong(said) if any(answers[:3]) else refused(context.goes_on(12), said)
    if status := context.feed(12, 13):
        return went_on(status, "seq_rm returned true")
    without = tested.context()
    places = [position for position in range(13) if not 2 <= position < 5]
    gaps = not any(without.decode([(tested.token(position), position, (0,))]) for position in places)
    wanted = without.logits() if gaps else tested.clean(12)
    return went_on(tested.gap(context.logits(), wanted), "seq_rm returned true")


@probe("Attention appended to a sequence before its old tail is cut", "llama_kv_cache::seq_cp")
def append_before_cut(tested: ModelUnderTest) -> Effect:
    """Live: 24 tokens of another text; append [10, 20) of the wanted one, restore its snapshot, cut at 20.

    All calls succeed and the positions come out right.
    """
    tested.need("attention")

    def wanted(position: int) -> int:
        return tested.token(position, 0 if position < 10 else 1)

    def feed(begin: int, end: int) -> bool:
        return not donor.decode([(wanted(position), position, (0,)) for position in range(begin, end)])

    donor = tested.context(**TWO)
    if not (feed(0, 10) and feed(10, 20)):
        raise RuntimeError("a clean context refused a batch")
    snapshot = donor.save(flags=PARTIAL)
    donor.cp(0, 1, 10, 20)
    segment = donor.save(1)
    donor.rm(1, -1, -1)
    size = len(donor.save())
    feed(20, 21)

    context = tested.context(**TWO).grown(24)
    granted(context.load(segment, 1), "the segment was not restored")
    context.cp(1, 0)
    context.rm(1, -1, -1)
    apart = lib.llama_model_is_hybrid(tested.model) or lib.llama_model_n_swa(tested.model)
    back = context.goes_back(snapshot, 20) if apart else context.rm(0, 20, -1)
    granted(back, "the snapshot or the cut was refused")
    more = len(context.save()) - size
    said = f"all calls succeeded, the state is {more} bytes longer than a clean one"
    if status := context.decode([(wanted(20), 20, (0,))]):
        return went_on(status, said)
    effect = went_on(tested.gap(context.logits(), donor.logits()), said)
    return wrong(said) if more and effect.behaviour is Behaviour.EXACT else effect


@probe("A batch with several tokens of several sequences", "llm_graph_context::build_rwkv_token_shift_store")
def tokens_of_several(tested: ModelUnderTest) -> Effect:
    """Two sequences of twelve tokens; five more of both in one batch; go on with both."""
    context = tested.context(n_seq_max=2, kv_unified=True).filled({0: 12, 1: 12})
    status = context.decode(
        (tested.token(place, seq), place, (seq,)) for seq in (0, 1) for place in range(12, 17)
    )
    if status:
        raise RuntimeError(f"llama_decode returned {status} for a batch of two sequences")
    return all_go_on(went_on, context, "decoded in one batch", {0: 17, 1: 17})


@probe(
    "A batch of several sequences that do not begin at the first state",
    "llama_model_plamo2::graph::build_plamo2_mamba_layer",
)
def batch_of_several(tested: ModelUnderTest) -> Effect:
    """Three sequences of twelve tokens; two steps of the last two in one batch each; go on with all three."""
    context = tested.context(n_seq_max=6, kv_unified=True).filled({0: 12, 1: 12, 2: 12})
    for place in (12, 13):
        status = context.decode((tested.token(place, seq), place, (seq,)) for seq in (1, 2))
        if status:
            raise RuntimeError(f"llama_decode returned {status} for a batch of two sequences")
    return all_go_on(went_on, context, "decoded in one batch", {0: 12, 1: 14, 2: 14})
