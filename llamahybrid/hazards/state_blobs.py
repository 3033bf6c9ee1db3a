"""Restores that go wrong: half a blob, the wrong blob, a blob that lies."""

from __future__ import annotations

import struct

from llamahybrid.hazards.bench import FULL, ON_DEVICE, PARTIAL, Bench, Context, memory_left, peak_memory
from llamahybrid.hazards.probe import Model, Outcome, Verdict, probe, refused, went_on

_WINDOWED = Model("lfm2", 16)
_SHARED = {"n_seq_max": 2, "kv_unified": True}
_HEADER = struct.calcsize("<Ii")  # magic, sequence
_MIB = 1 << 20


def _after_failure(context: Context, length: int, read: bool) -> Outcome:
    """Go on at `length`, the live state's end before the restore."""
    if read:
        return went_on(context.goes_on(length), "the restore returned success")
    said = f"the restore returned 0, {context.last() + 1} tokens left"
    return refused(context.goes_on_after_refusal(length), said)


def _next_prompt(bench: Bench, flags: int) -> Outcome:
    """Restore a truncated state over a live one, then decode another prompt of twelve without removing."""
    blob = bench.context().grown(12).save(flags=flags)
    context = bench.context().grown(12)
    if context.load(blob[:-8], flags=flags):
        return Outcome(Verdict.WRONG, "the truncated state was accepted")
    if context.feed(0, 12, text=1):
        return Outcome(Verdict.REFUSED, "restore and next prompt were refused")
    return went_on(context.goes_on(12, text=1), "the next prompt was accepted after a failed restore")


@probe(
    "failed-full-restore",
    "A truncated state over a live sequence",
    site="llama-kv-cache.cpp:2354",
    sound="refuses, and the live state stays (or is dropped whole)",
    stock=Verdict.REFUSED,
)
def failed_full(bench: Bench) -> Outcome:
    """Twelve live tokens; restore a full state that lacks its last eight bytes; go on at twelve."""
    context = bench.context().grown(12)
    blob = bench.context().grown(12).save()
    return _after_failure(context, 12, context.load(blob[:-8]))


@probe(
    "failed-partial-restore",
    "A truncated PARTIAL snapshot over a live hybrid",
    site="llama-memory-recurrent.cpp:1000",
    sound="refuses, and the live state stays (or is dropped whole)",
    stock=Verdict.WRONG,
)
def failed_partial(bench: Bench) -> Outcome:
    """Twelve live tokens; restore a PARTIAL snapshot that lacks its last eight bytes; go on at twelve."""
    context = bench.context().grown(12)
    blob = context.save(flags=PARTIAL)
    return _after_failure(context, 12, context.load(blob[:-8], flags=PARTIAL))


@probe(
    "failed-restore-next-prompt",
    "The next prompt after a failed restore with a window",
    site="llama-memory-hybrid-iswa.cpp:200",
    sound="leaves no attention of the old prompt behind",
    stock=Verdict.WRONG,
    model=_WINDOWED,
)
def failed_next(bench: Bench) -> Outcome:
    """Twelve live tokens; a truncated full state; then another prompt from position 0, nothing removed."""
    return _next_prompt(bench, FULL)


@probe(
    "failed-partial-next-prompt",
    "The next prompt after a failed PARTIAL restore",
    site="llama-memory-hybrid.cpp:197",
    sound="leaves no attention of the old prompt behind",
    stock=Verdict.WRONG,
)
def failed_partial_next(bench: Bench) -> Outcome:
    """Twelve live tokens; a truncated PARTIAL snapshot; then another prompt from position 0."""
    return _next_prompt(bench, PARTIAL)


@probe(
    "failed-whole-restore",
    "A truncated whole-context state over a live one",
    site="llama-context.cpp:3178",
    sound="refuses, and the live state stays (or is dropped whole)",
    stock=Verdict.REFUSED,
)
def failed_whole(bench: Bench) -> Outcome:
    """Twelve live tokens; restore a whole state that lacks its last eight bytes; go on at twelve."""
    blob = bench.context(**_SHARED).grown(12).save_whole()
    context = bench.context(**_SHARED).grown(12)
    return _after_failure(context, 12, context.load_whole(blob[:-8]))


@probe(
    "snapshot-without-attention",
    "A PARTIAL snapshot restored into empty attention",
    site="llama-batch.cpp:288",
    sound="refuses to decode with a gap in the attention",
    stock=Verdict.WRONG,
)
def without_attention(bench: Bench) -> Outcome:
    """Restore the PARTIAL snapshot of twelve tokens into an empty context; go on at twelve."""
    bench.need_hybrid()
    blob = bench.context().grown(12).save(flags=PARTIAL)
    context = bench.context()
    if not context.load(blob, flags=PARTIAL):
        return Outcome(Verdict.REFUSED, "the restore returned 0")
    return went_on(context.goes_on(12), "the snapshot was accepted")


@probe(
    "on-device-older-blob",
    "An ON_DEVICE blob older than the sequence's last save",
    site="llama-context.cpp:3241",
    sound="refuses: the device buffer holds newer data",
    stock=Verdict.WRONG,
)
def on_device_older(bench: Bench) -> Outcome:
    """Save on the device at twelve and at twenty tokens; restore the first blob, cut at twelve, go on."""
    bench.need_recurrent()
    context = bench.context().grown(12)
    blob = context.save(flags=PARTIAL | ON_DEVICE)
    context.feed(12, 20)
    context.save(flags=PARTIAL | ON_DEVICE)
    if not context.load(blob, flags=PARTIAL | ON_DEVICE):
        return _after_failure(context, 20, False)
    context.rm(0, 12, -1)
    return went_on(context.goes_on(12), "the restore returned success")


@probe(
    "on-device-restore",
    "The newest ON_DEVICE blob (control)",
    site="llama-context.cpp:3241",
    sound="exact",
    stock=Verdict.EXACT,
)
def on_device_newest(bench: Bench) -> Outcome:
    """Save on the device at twelve tokens, grow to twenty, restore, cut at twelve, go on."""
    bench.need_recurrent()
    context = bench.context().grown(12)
    blob = context.save(flags=PARTIAL | ON_DEVICE)
    context.feed(12, 20)
    if not (context.load(blob, flags=PARTIAL | ON_DEVICE) and context.rm(0, 12, -1)):
        return Outcome(Verdict.REFUSED, "the restore or the cut was refused")
    return went_on(context.goes_on(12), "the restore returned success")


@probe(
    "negative-position",
    "A recurrent cell with a negative position in a blob",
    site="llama-memory-recurrent.cpp:992",
    sound="refuses",
    stock=Verdict.WRONG,
)
def negative_position(bench: Bench) -> Outcome:
    """Twelve live tokens; restore their PARTIAL snapshot with its cell's position set to -7.

    Where that is accepted, remove the sequence and decode another prompt.
    """
    bench.need_recurrent()
    context = bench.context().grown(12)
    blob = bytearray(context.save(flags=PARTIAL))
    struct.pack_into("<i", blob, _HEADER + 4, -7)
    if not context.load(bytes(blob), flags=PARTIAL):
        return _after_failure(context, 12, False)
    context.rm(0, -1, -1)
    if context.feed(0, 12, text=1):
        return went_on(None, "the restore returned success")
    return went_on(context.goes_on(12, text=1), "the restore returned success")


@probe(
    "damaged-length",
    "A damaged length in a whole-context state",
    site="llama-io.cpp:12",
    sound="refuses without allocating what the length says",
    stock=Verdict.WRONG,
)
def damaged_length(bench: Bench) -> Outcome:
    """Twelve live tokens; restore 68 bytes whose first length says 256 MiB, then 4 GiB with 1 GiB left."""
    context = bench.context().grown(12)
    before = peak_memory()
    read = context.load_whole(struct.pack("<I", 256 * _MIB) + b"x" * 64)
    grown = peak_memory() - before
    with memory_left(1024 * _MIB):
        read |= context.load_whole(struct.pack("<I", 0xFFFFFFF0) + b"x" * 64)
    if grown > 64 * _MIB:
        return Outcome(Verdict.WRONG, f"allocated {grown // _MIB} MiB on the word of a damaged length")
    return _after_failure(context, 12, read)


@probe(
    "empty-state",
    "The state of an empty sequence restored over a live one",
    site="llama-kv-cache.cpp:2179",
    sound="leaves the sequence empty",
    stock=Verdict.WRONG,
    model=Model("llama"),
)
def empty_state(bench: Bench) -> Outcome:
    """Twelve live tokens; restore the full state of an empty sequence; decode another prompt of twelve."""
    context = bench.context(**_SHARED).grown(12)
    if not context.load(context.save(1)):
        return _after_failure(context, 12, False)
    if context.feed(0, 12, text=1):
        held = context.last() + 1
        said = f"the restore returned success, the next prompt was refused, {held} tokens are left"
        return Outcome(Verdict.WRONG if held else Verdict.REFUSED, said)
    return went_on(context.goes_on(12, text=1), "the restore returned success")


PROBES = (
    failed_full,
    failed_partial,
    failed_next,
    failed_partial_next,
    failed_whole,
    without_attention,
    on_device_older,
    on_device_newest,
    negative_position,
    damaged_length,
    empty_state,
)
