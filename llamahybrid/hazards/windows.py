"""Sliding windows: cuts to where the window is gone, windows that do not fit the attention beside them."""

from __future__ import annotations

from llamahybrid.hazards.bench import PARTIAL, Bench, Context, load_range, save_range
from llamahybrid.hazards.probe import Model, Outcome, Verdict, probe, refused, went_on

_SITE = "llama-kv-cache-iswa.cpp:113"
_DECODE = "llama-kv-cache-iswa.cpp:159"
_GEMMA3 = Model("gemma3", 16)
_SMALL = {"swa_full": False, "n_ubatch": 32}


def _grown(bench: Bench) -> Context:
    """400 tokens with a window whose first contents have long been overwritten."""
    bench.need_window()
    return bench.context(**_SMALL).grown(400, chunk=32)


def _cut(context: Context, to: int) -> Outcome:
    """Cut 400 tokens to `to` and go on from where the context then is."""
    if context.rm(0, to, -1):
        return went_on(context.goes_on(to), f"seq_rm to {to} of 400 tokens returned true")
    return refused(context.goes_on(400), f"seq_rm to {to} of 400 tokens returned false")


@probe(
    "cut-behind-window",
    "A cut behind the sliding window",
    site=_SITE,
    sound="refuses: the window before the cut is gone",
    stock=Verdict.WRONG,
    model=_GEMMA3,
)
def behind(bench: Bench) -> Outcome:
    """swa_full=False; 400 tokens in batches of 32; cut to 100; go on."""
    return _cut(_grown(bench), 100)


@probe(
    "cut-inside-window",
    "A cut inside the sliding window (control)",
    site=_SITE,
    sound="grants it, exactly (a hybrid: refuses)",
    stock=Verdict.EXACT,
    model=_GEMMA3,
)
def inside(bench: Bench) -> Outcome:
    """swa_full=False; 400 tokens in batches of 32; cut to 398; go on."""
    return _cut(_grown(bench), 398)


@probe(
    "window-restored",
    "A window restored from a snapshot (control)",
    site=_SITE,
    sound="exact",
    stock=Verdict.EXACT,
    model=_GEMMA3,
)
def restored(bench: Bench) -> Outcome:
    """Snapshot at 100 tokens, grow to 400, restore the snapshot, cut at 100, go on."""
    bench.need_window()
    context = bench.context(**_SMALL).grown(100, chunk=32)
    snapshot = context.save(flags=PARTIAL)
    context.feed(100, 400, chunk=32)
    if not (context.load(snapshot, flags=PARTIAL) and context.rm(0, 100, -1)):
        return Outcome(Verdict.REFUSED, "the snapshot or the cut was refused")
    return went_on(context.goes_on(100), "snapshot and cut were granted")


def _window_onto(bench: Bench, held: int) -> Outcome:
    """Restore the PARTIAL snapshot of 100 tokens into a context that holds `held`, go on at 100."""
    bench.need_window()
    snapshot = bench.context(**_SMALL).grown(100, chunk=32).save(flags=PARTIAL)
    context = bench.context(**_SMALL).grown(held, chunk=32)
    if not context.load(snapshot, flags=PARTIAL):
        return Outcome(Verdict.REFUSED, "the snapshot was refused")
    return went_on(context.goes_on(100), f"the snapshot was restored beside {held} tokens of attention")


@probe(
    "window-without-attention",
    "A window restored into empty attention",
    site=_DECODE,
    sound="refuses to decode: the layers without a window have nothing",
    stock=Verdict.WRONG,
    model=_GEMMA3,
)
def without_attention(bench: Bench) -> Outcome:
    """swa_full=False; restore the PARTIAL snapshot of 100 tokens into an empty context; go on at 100."""
    return _window_onto(bench, 0)


@probe(
    "window-ahead-of-attention",
    "A window restored beside attention that ends earlier",
    site=_DECODE,
    sound="refuses to decode: the layers without a window lack tokens",
    stock=Verdict.WRONG,
    model=_GEMMA3,
)
def ahead_of_attention(bench: Bench) -> Outcome:
    """swa_full=False; restore the PARTIAL snapshot of 100 tokens where 50 are live; go on at 100."""
    return _window_onto(bench, 50)


@probe(
    "range-without-window",
    "Attention of a range restored without its window",
    site=_DECODE,
    sound="refuses to decode until the window is restored, then exact",
    stock=Verdict.NOT_APPLICABLE,
    model=_GEMMA3,
)
def range_without_window(bench: Bench) -> Outcome:
    """swa_full=False; restore the range [0, 100) into an empty context; go on at 100, or start at 0.

    Where both are refused, restore the PARTIAL snapshot of 100 tokens and go on.
    """
    bench.need_window()
    donor = bench.context(**_SMALL).grown(100, chunk=32)
    part, snapshot = save_range(donor, 0, 100), donor.save(flags=PARTIAL)
    for begin in (100, 0):
        context = bench.context(**_SMALL)
        if not load_range(context, part, 0, 100):
            return Outcome(Verdict.REFUSED, "the range was refused")
        if not context.feed(begin, begin + 8, text=0 if begin else 1):
            return went_on(context.goes_on(begin + 8, text=0 if begin else 1), "the range was restored")
    if not context.load(snapshot, flags=PARTIAL):
        return Outcome(Verdict.WRONG, "the window of the range was refused")
    return went_on(context.goes_on(100), "range and window were restored")


@probe(
    "copy-behind-window",
    "A copy that ends behind the sliding window",
    site="llama-kv-cache-iswa.cpp:122",
    sound="refuses to decode: the window before the copy's end is gone",
    stock=Verdict.WRONG,
    model=_GEMMA3,
)
def copy_behind(bench: Bench) -> Outcome:
    """swa_full=False; 400 tokens in batches of 32; copy their first 150 to another sequence; go on there.

    The window cache holds the last 256.
    """
    bench.need_window()
    context = bench.context(**_SMALL, n_seq_max=2, kv_unified=True).grown(400, chunk=32)
    context.cp(0, 1, 0, 150)
    return went_on(context.goes_on(150, 1), "150 of 400 tokens were copied")


@probe(
    "empty-window-restored",
    "The PARTIAL state of an empty sequence restored over a window",
    site="llama-kv-cache.cpp:2179",
    sound="drops the window: a cut is granted, and nothing is decoded before a snapshot is restored",
    stock=Verdict.WRONG,
    model=_GEMMA3,
)
def empty_window(bench: Bench) -> Outcome:
    """swa_full=False; 400 tokens; restore an empty sequence's PARTIAL state, cut to 100, go on.

    Where that is refused, restore the PARTIAL snapshot of 100 tokens and go on.
    """
    bench.need_window()
    context = bench.context(**_SMALL)
    nothing = context.save(flags=PARTIAL)
    context.grown(100, chunk=32)
    snapshot = context.save(flags=PARTIAL)
    context.feed(100, 400, chunk=32)
    if not context.load(nothing, flags=PARTIAL):
        return Outcome(Verdict.REFUSED, "the empty state was refused")
    if not context.rm(0, 100, -1):
        return Outcome(Verdict.WRONG, "the empty state was restored, but the window is still there")
    if gap := context.goes_on(100):
        return went_on(gap, "the empty state was restored and the cut granted")
    if not context.load(snapshot, flags=PARTIAL):
        return Outcome(Verdict.WRONG, "the snapshot was refused")
    return went_on(context.goes_on(100), "empty state, cut and snapshot were granted")


PROBES = (
    behind,
    inside,
    restored,
    without_attention,
    ahead_of_attention,
    range_without_window,
    copy_behind,
    empty_window,
)
