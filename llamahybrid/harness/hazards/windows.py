"""Sliding windows: cuts to where the window is gone, windows that do not fit the attention beside them."""

from __future__ import annotations

from llamahybrid.harness.hazards.case import probe
from llamahybrid.harness.hazards.context import (
    PARTIAL,
    TWO,
    Context,
    cut,
    load_range,
    next_prompt,
    save_range,
)
from llamahybrid.harness.hazards.effect import (
    Behaviour,
    Effect,
    NotApplicable,
    all_sound,
    granted,
    refused,
    went_on,
    wrong,
)
from llamahybrid.harness.hazards.model import ModelUnderTest

_SMALL = {"swa_full": False, "n_ubatch": 32}


def _grown(tested: ModelUnderTest) -> Context:
    """400 tokens with a window whose first contents have long been overwritten."""
    tested.need("window")
    return tested.context(**_SMALL).grown(400, chunk=32)


@probe("A cut behind the sliding window", "llama_kv_cache_iswa::seq_rm")
def cut_behind_window(tested: ModelUnderTest) -> Effect:
    """swa_full=False; 400 tokens in batches of 32; cut to 100, of all sequences and of the first; go on."""
    context = _grown(tested)
    if context.rm(-1, 100, -1):
        return went_on(context.goes_on(100), "seq_rm of all to 100 of 400 tokens returned true")
    return cut(context, 100, 400)


@probe("A cut inside the sliding window (control)", "llama_kv_cache_iswa::seq_rm")
def cut_inside_window(tested: ModelUnderTest) -> Effect:
    """swa_full=False; 400 tokens in batches of 32; cut to 398; go on."""
    return cut(_grown(tested), 398, 400)


@probe("A window restored from a snapshot (control)", "llama_kv_cache_iswa::seq_rm")
def window_restored(tested: ModelUnderTest) -> Effect:
    """Snapshot at 100 tokens, grow to 400, restore the snapshot, cut at 100, go on."""
    tested.need("window")
    context = tested.context(**_SMALL).grown(100, chunk=32)
    snapshot = context.save(flags=PARTIAL)
    context.feed(100, 400, chunk=32)
    granted(context.goes_back(snapshot, 100), "the snapshot or the cut was refused")
    return went_on(context.goes_on(100), "snapshot and cut were granted")


@probe("A window restored beside less attention", "llama_kv_cache_iswa::init_batch")
def window_without_attention(tested: ModelUnderTest) -> Effect:
    """swa_full=False; restore the PARTIAL snapshot of 100 tokens into an empty context; go on at 100.

    Again where 50 tokens are live.
    """
    tested.need("window")
    snapshot = tested.context(**_SMALL).grown(100, chunk=32).save(flags=PARTIAL)

    def beside(held: int) -> Effect:
        context = tested.context(**_SMALL).grown(held, chunk=32)
        granted(context.load(snapshot, flags=PARTIAL), "the snapshot was refused")
        return went_on(context.goes_on(100), f"the snapshot was restored beside {held} tokens of attention")

    return all_sound(beside(held) for held in (0, 50))


@probe("Attention of a range restored without its window", "llama_kv_cache_iswa::init_batch")
def range_without_window(tested: ModelUnderTest) -> Effect:
    """swa_full=False; restore the range [0, 100) into an empty context; go on at 100; start at 0.

    If both are refused, restore the PARTIAL snapshot of 100 tokens and go on; remove all and start again.
    """
    tested.need("window")
    donor = tested.context(**_SMALL).grown(100, chunk=32)
    part, snapshot = save_range(donor, 0, 100), donor.save(flags=PARTIAL)
    context = tested.context(**_SMALL)
    granted(load_range(context, part, 0, 100), "the range was refused")
    statuses = []
    for begin, text in ((100, 0), (0, 1)):
        statuses.append(context.feed(begin, begin + 8, text=text))
        if not statuses[-1]:
            return went_on(context.goes_on(begin + 8, text=text), "the range was restored")
    said = f"the range was restored, decodes returned {statuses} before its window was"
    if not context.load(snapshot, flags=PARTIAL):
        return wrong(f"{said}; the window of the range was refused")
    restored = went_on(context.goes_on(100), said)
    context.rm(0, -1, -1)
    return all_sound((restored, next_prompt(context, 8, f"{said}; removed, it starts again")))


@probe("A copy that ends behind the sliding window", "llama_kv_cache_iswa::seq_cp")
def copy_behind_window(tested: ModelUnderTest) -> Effect:
    """swa_full=False; 400 tokens in batches of 32; copy their first 100 to another sequence; go on there.

    Then the same with 150; then go on with the original. The window cache holds the last 256.
    """
    tested.need("window")
    context = tested.context(**_SMALL, **TWO).grown(400, chunk=32)

    def copied(end: int) -> Effect:
        context.cp(0, 1, 0, end)
        effect = went_on(context.goes_on(end, 1), f"{end} of 400 tokens were copied")
        context.rm(1, -1, -1)
        return effect

    said = "both copies were refused, the original goes on"
    effect = all_sound(copied(end) for end in (100, 150))
    return effect if effect.behaviour is not Behaviour.REFUSED else refused(context.goes_on(400), said)


@probe("The PARTIAL state of an empty sequence restored over a window", "llama_kv_cache::state_read_sinfo")
def empty_window_restored(tested: ModelUnderTest) -> Effect:
    """swa_full=False; 400 tokens; restore an empty sequence's PARTIAL state, cut to 100, go on.

    If that is refused, restore the PARTIAL snapshot of 100 tokens and go on.
    """
    tested.need("attention")  # not a window: llama_model_n_swa is 0 for deepseek4
    context = tested.context(**_SMALL)
    nothing = context.save(flags=PARTIAL)
    context.grown(100, chunk=32)
    snapshot = context.save(flags=PARTIAL)
    if len(snapshot) == len(context.save()):
        raise NotApplicable("a PARTIAL state is the whole state: the sequence is empty then, and says so")
    context.feed(100, 400, chunk=32)
    granted(context.load(nothing, flags=PARTIAL), "the empty state was refused")
    if not context.rm(0, 100, -1):
        return wrong("the empty state was restored, but the window is still there")
    found = context.goes_on(100)
    if not isinstance(found, int):
        return went_on(found, "the empty state was restored and the cut granted")
    if not context.load(snapshot, flags=PARTIAL):
        return wrong("the snapshot was refused")
    said = f"empty state and cut were granted, the decode returned {found} before the snapshot was restored"
    return went_on(context.goes_on(100), said)
