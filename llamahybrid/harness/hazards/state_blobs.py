"""Restores of truncated, wrong and manipulated blobs."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from llama_cpp import llama_cpp as lib

from llamahybrid.harness.hazards.case import probe
from llamahybrid.harness.hazards.context import (
    BOTH,
    FULL,
    ON_DEVICE,
    PARTIAL,
    SPLIT,
    TWO,
    after_failure,
    all_go_on,
    next_prompt,
    still_there,
)
from llamahybrid.harness.hazards.effect import Effect, all_sound, granted, refused, went_on, wrong
from llamahybrid.harness.hazards.model import ModelUnderTest
from llamahybrid.harness.hazards.process import memory_left, peak_memory

_CUTS = (4, 8, 12, 16, 40, 200, -2000, -100, -8, -1)
"""Ends of truncated blobs, counted from the beginning or the end."""
_HEADER = struct.calcsize("<Ii")  # magic, sequence
_MIB = 1 << 20


def _truncated(tested: ModelUnderTest, flags: int) -> Effect:
    """Twenty live tokens; offer a state of thirty others that ends too early, at each of `_CUTS`; go on."""
    blob = tested.context().grown(30, text=3).save(flags=flags)
    context = tested.context().grown(20)
    before = context.save()
    cuts = [cut for cut in _CUTS if abs(cut) < len(blob)]
    for cut in cuts:
        if context.read(blob[:cut], flags=flags):
            return wrong(f"a state cut at byte {cut} was accepted")
    return still_there(context, before, 20, f"{len(cuts)} restores returned 0")


@probe("A truncated state over a live sequence", "llama_kv_cache::state_read_meta")
def failed_full_restore(tested: ModelUnderTest) -> Effect:
    """Twenty live tokens; restore a full state of others that ends early, in ten places; go on at twenty."""
    return _truncated(tested, FULL)


@probe("A truncated PARTIAL snapshot over a live hybrid", "llama_memory_recurrent::state_read_meta")
def failed_partial_restore(tested: ModelUnderTest) -> Effect:
    """Twenty live tokens; restore a PARTIAL one of others that ends early, in ten places; go on at twenty."""
    return _truncated(tested, PARTIAL)


@probe("The next prompt after a failed restore", "llama_memory_hybrid::state_read")
def failed_restore_next_prompt(tested: ModelUnderTest) -> Effect:
    """Twelve live tokens; a truncated full state; then another prompt from position 0, nothing removed.

    Again with a PARTIAL snapshot.
    """
    donor = tested.context().grown(12)

    def after(flags: int) -> Effect:
        context = tested.context().grown(12)
        if context.load(donor.save(flags=flags)[:-8], flags=flags):
            return wrong("the truncated state was accepted")
        if status := context.feed(0, 12, text=1):
            context.rm(0, -1, -1)
            said = f"the restore returned 0, the next prompt {status} until the sequence was removed"
            return refused(context.starts_over(12, text=1), said)
        return went_on(context.goes_on(12, text=1), "the next prompt was accepted after a failed restore")

    return all_sound(after(flags) for flags in (FULL, PARTIAL))


@probe("A truncated whole-context state over a live one", "llama_context::state_set_data")
def failed_whole_restore(tested: ModelUnderTest) -> Effect:
    """Two sequences; restore a whole state of others that ends early, in ten places; go on with both."""
    blob = tested.context(**TWO).grown(30, text=3).save_whole()
    context = tested.context(**TWO).filled({0: 20, 1: 15})
    before = context.save(0), context.save(1)
    for cut in _CUTS:
        if context.load_whole(blob[:cut]):
            return wrong(f"a state cut at byte {cut} was accepted")
    same = "with the same bytes" if (context.save(0), context.save(1)) == before else "with other bytes"
    ends = context.last_of()
    said = f"{len(_CUTS)} restores returned 0, the sequences end at {ends} {same}"
    if ends != [19, 14]:
        return refused(context.goes_on_after_refusal(20), said)
    return all_go_on(refused, context, said, {0: 20, 1: 15})


@probe("A PARTIAL snapshot restored into empty attention", "llama_batch_allocr::init")
def snapshot_without_attention(tested: ModelUnderTest) -> Effect:
    """Restore the PARTIAL snapshot of twelve tokens into an empty context; go on at twelve."""
    tested.need("hybrid")
    blob = tested.context().grown(12).save(flags=PARTIAL)
    context = tested.context()
    granted(context.load(blob, flags=PARTIAL), "the restore returned 0")
    return went_on(context.goes_on(12), "the snapshot was accepted")


@probe(
    "The PARTIAL state of an empty sequence restored over a live hybrid", "llama_memory_hybrid::init_batch"
)
def state_lost(tested: ModelUnderTest) -> Effect:
    """Twelve tokens; restore the PARTIAL state of an empty sequence; decode another prompt from 0.

    If that is refused, remove the sequence and decode that prompt again.
    """
    tested.need("hybrid")
    context = tested.context()
    nothing = context.save(flags=PARTIAL)
    context.grown(12)
    if not context.load(nothing, flags=PARTIAL):
        return after_failure(context, 12)
    if status := context.feed(0, 12, text=1):
        context.rm(0, -1, -1)
        said = f"the next prompt returned {status} until the sequence was removed"
        return next_prompt(context, 12, said)
    return went_on(context.goes_on(12, text=1), "the next prompt was decoded beside the old attention")


@probe("An ON_DEVICE blob older than the sequence's last save", "llama_context::state_seq_set_data")
def on_device_older_blob(tested: ModelUnderTest) -> Effect:
    """Save on the device at twelve and at twenty tokens; restore the first blob, cut at twelve, go on."""
    tested.need("recurrent")
    context = tested.context().grown(12)
    blob = context.save(flags=PARTIAL | ON_DEVICE)
    context.feed(12, 20)
    context.save(flags=PARTIAL | ON_DEVICE)
    if not context.load(blob, flags=PARTIAL | ON_DEVICE):
        return after_failure(context, 20)
    context.rm(0, 12, -1)
    return went_on(context.goes_on(12), "the restore of the older blob returned success")


@probe("The newest ON_DEVICE blob (control)", "llama_context::state_seq_set_data")
def on_device_restore(tested: ModelUnderTest) -> Effect:
    """Save on the device at twelve tokens, grow to twenty, restore, cut at twelve, go on."""
    tested.need("recurrent")
    context = tested.context().grown(12)
    blob = context.save(flags=PARTIAL | ON_DEVICE)
    context.feed(12, 20)
    back = context.load(blob, flags=PARTIAL | ON_DEVICE) and context.rm(0, 12, -1)
    granted(back, "the restore or the cut was refused")
    return went_on(context.goes_on(12), "the restore returned success")


@probe("A recurrent cell with a negative position in a blob", "llama_memory_recurrent::state_read_meta")
def negative_position(tested: ModelUnderTest) -> Effect:
    """Twelve live tokens; restore their PARTIAL state with the first cell's position set to -7.

    If that is accepted, remove the sequence and decode another prompt. Of a hybrid the full state, too.
    """
    tested.need("recurrent")

    def offered(flags: int, place: int) -> Effect:
        context = tested.context().grown(12)
        blob = bytearray(context.save(flags=flags))
        struct.pack_into("<i", blob, place, -7)
        if not context.load(bytes(blob), flags=flags):
            return after_failure(context, 12)
        context.rm(0, -1, -1)
        return next_prompt(context, 12, "the restore returned success")

    # a hybrid's attention comes first, and a number of streams before it
    hybrid = lib.llama_model_is_hybrid(tested.model)
    blobs = ((PARTIAL, _HEADER + 4), (FULL, _HEADER + 8))[: 1 + hybrid]
    return all_sound(offered(*blob) for blob in blobs)


@probe("A damaged length in a whole-context state", "llama_io_read_i::read_string")
def damaged_length(tested: ModelUnderTest) -> Effect:
    """Twelve live tokens; restore 68 bytes whose first length says 256 MiB, then 4 GiB with 1 GiB left."""
    context = tested.context().grown(12)
    before = peak_memory()
    read = context.load_whole(struct.pack("<I", 256 * _MIB) + b"x" * 64)
    grown = peak_memory() - before
    with memory_left(1024 * _MIB):
        read |= context.load_whole(struct.pack("<I", 0xFFFFFFF0) + b"x" * 64)
    if grown > 64 * _MIB:
        return wrong(f"allocated {grown // _MIB} MiB on the word of a damaged length")
    if read:
        return went_on(context.goes_on(12), "the restore returned success")
    return after_failure(context, 12)


@probe("The state of an empty sequence restored over a live one", "llama_kv_cache::state_read_sinfo")
def empty_state(tested: ModelUnderTest) -> Effect:
    """Two sequences; restore an empty one's state over the first; decode another prompt in it.

    Go on with both. First with one stream for both, then with a stream for each.
    """

    def emptied(shape: Mapping[str, Any], streams: str) -> Effect:
        context = tested.context(**shape)
        nothing = context.save(1)
        context.filled(BOTH)
        if not context.load(nothing):
            return after_failure(context, 12)
        said = f"{streams}: the restore returned success, the sequence ends at position {context.last()}"
        if context.last() >= 0:
            return wrong(said)
        return all_sound(
            went_on(gap, said) for gap in (context.starts_over(12, text=2), context.goes_on(12, 1, text=1))
        )

    return all_sound(emptied(*each) for each in ((TWO, "one stream"), (SPLIT, "two streams")))
