"""Sliding windows: cuts to where the window is gone."""

from __future__ import annotations

from llamahybrid.harness.hazards.bench import PARTIAL, Bench, Context
from llamahybrid.harness.hazards.probe import Model, Outcome, Verdict, probe, refused, went_on

_SITE = "llama-kv-cache-iswa.cpp:113"
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


PROBES = (behind, inside, restored)
