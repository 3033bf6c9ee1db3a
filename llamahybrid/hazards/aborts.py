"""Decodes that are stopped, or poisoned: what the memory holds afterwards."""

from __future__ import annotations

import ctypes

import numpy as np
from llama_cpp import llama_cpp as lib

from llamahybrid.hazards.bench import ABORTED, PARTIAL, Bench, Context
from llamahybrid.hazards.probe import NotApplicable, Outcome, Verdict, probe, went_on

_SITE = "llama-context.cpp:1893"
_Evaluate = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)


def _context(bench: Bench, held: int, planes: int, **params: object) -> Context:
    """A context that holds `held` tokens."""
    return (bench.with_planes(planes, **params) if planes else bench.context(**params)).grown(held)


def _stop(context: Context, fed: int, part: float) -> None:
    """Decode `fed` more tokens and stop after `part` of the polls that this takes."""
    held = context.last() + 1
    twin = _context(context.bench, held, 0, **context.params)
    twin.count_polls()
    twin.feed(held, held + fed)
    if not twin.polls:
        raise NotApplicable("the backend does not poll the abort callback")
    context.count_polls()
    context.stop_at = max(1, int(twin.polls * part))
    status = context.feed(held, held + fed)
    context.stop_at = None
    if status != ABORTED:
        raise RuntimeError(f"the decode was not stopped: it returned {status}")


def _after(context: Context, said: str) -> Outcome:
    """Go on where the context says that it ends."""
    end = context.last() + 1
    return went_on(context.goes_on(end), f"{said}, {end} tokens left")


def _stopped(bench: Bench, held: int, fed: int, part: float, planes: int = 0, **params: object) -> Outcome:
    """Hold `held` tokens, stop while decoding `fed` more, go on where the context says that it ends."""
    bench.need_recurrent()
    context = _context(bench, held, planes, **params)
    _stop(context, fed, part)
    return _after(context, "the decode returned 2")


@probe(
    "abort-in-token",
    "A decode stopped inside its only ubatch",
    site=_SITE,
    sound="drops what it spoiled, or leaves the state as it was",
    stock=Verdict.WRONG,
)
def in_token(bench: Bench) -> Outcome:
    """Twelve tokens; stop half-way through the next one; go on where the context says that it ends."""
    return _stopped(bench, 12, 1, 0.5)


@probe(
    "abort-in-token-planes",
    "The same with rollback planes",
    site=_SITE,
    sound="drops what it spoiled, or leaves the state as it was",
    stock=Verdict.WRONG,
)
def in_token_planes(bench: Bench) -> Outcome:
    """Four planes; twelve tokens; stop half-way through the next; go on where the context says it ends."""
    return _stopped(bench, 12, 1, 0.5, planes=4)


@probe(
    "abort-second-ubatch",
    "A decode stopped in its second ubatch",
    site=_SITE,
    sound="keeps the first ubatch exactly, or drops what it spoiled",
    stock=Verdict.WRONG,
)
def second_ubatch(bench: Bench) -> Outcome:
    """48 tokens in ubatches of 16; stop in the middle of the second; go on where the context says it ends."""
    return _stopped(bench, 0, 48, 0.5, n_ubatch=16)


@probe(
    "abort-first-ubatch",
    "A decode stopped in the very first ubatch (control)",
    site=_SITE,
    sound="leaves nothing; the prompt starts again, exactly",
    stock=Verdict.EXACT,
)
def first_ubatch(bench: Bench) -> Outcome:
    """An empty context; stop in the middle of twelve tokens; start again."""
    return _stopped(bench, 0, 12, 0.4)


@probe(
    "abort-restored",
    "A snapshot restored after a stopped decode (control)",
    site=_SITE,
    sound="exact",
    stock=Verdict.EXACT,
)
def restored(bench: Bench) -> Outcome:
    """Twelve tokens, snapshot; stop half-way through the next; restore the snapshot, cut at twelve, go on."""
    bench.need_recurrent()
    context = bench.context().grown(12)
    snapshot = context.save(flags=PARTIAL)
    _stop(context, 1, 0.5)
    if not (context.load(snapshot, flags=PARTIAL) and context.rm(0, 12, -1)):
        return Outcome(Verdict.REFUSED, "the snapshot or the cut was refused")
    return went_on(context.goes_on(12), "the snapshot was restored")


@probe(
    "eval-callback-stop",
    "The eval callback returns false in the middle of a graph",
    site="ggml-backend.cpp:1845",
    sound="reports an abort and drops what it spoiled",
    stock=Verdict.WRONG,
)
def eval_callback(bench: Bench) -> Outcome:
    """Twelve tokens; cb_eval returns false half-way through the next; go on at the end that is reported."""
    seen, stop_at = 0, 0

    def evaluate(_tensor: int, ask: bool, _user: int) -> bool:
        nonlocal seen
        seen += not ask
        return ask or not stop_at or seen < stop_at

    native = _Evaluate(evaluate)
    callback = ctypes.cast(native, lib.ggml_backend_sched_eval_callback)
    context = bench.context(cb_eval=callback).grown(12)
    before = seen
    context.feed(12, 13)
    stop_at = seen + (seen - before) // 2
    status = context.feed(13, 14)
    stop_at = 0
    return _after(context, f"the decode returned {status}")


@probe(
    "abort-beside-free-cells",
    "A decode of two sequences stopped where a third was removed",
    site="llama-memory-recurrent.cpp:702",
    sound="keeps what is exact or drops it; what starts afresh is exact",
    stock=Verdict.WRONG,
)
def beside_free_cells(bench: Bench) -> Outcome:
    """Three sequences; remove the second, stop a decode of the others, remove those, start all three again.

    Stopped once after each tenth of the polls that the decode takes.
    """
    bench.need_recurrent()
    exact = Outcome(Verdict.FAILED, "the decode was never stopped")
    for part in range(1, 10):
        context = _hole(bench)
        _decode_around(context)
        polls, context = context.polls, _hole(bench)
        context.stop_at = max(2, polls * part // 10)
        status = _decode_around(context)
        context.stop_at = None
        if status != ABORTED:
            continue
        for seq in (0, 2):
            context.rm(seq, -1, -1)
        for seq in (0, 2, 1):
            context.grown(8, seq, text=seq)
        for seq in (1, 0, 2):
            exact = went_on(context.goes_on(8, seq, text=seq), f"stopped at {part}0 %, sequence {seq}")
            if exact.verdict is not Verdict.EXACT:
                return exact
    return exact


def _hole(bench: Bench) -> Context:
    """Two sequences of eight tokens, and room between them for another."""
    context = bench.context(n_seq_max=3, kv_unified=True)
    for seq in range(3):
        context.grown(8, seq, text=seq)
    context.rm(1, -1, -1)
    context.count_polls()
    return context


def _decode_around(context: Context) -> int:
    return context.decode([(5, 8, (0,)), (6, 8, (2,))])


def _poisoned(bench: Bench, flash: int = 1) -> Context:
    """A context whose recurrent row was made NaN through a snapshot, and whose logits show it."""
    bench.need_recurrent()
    context = bench.context(flash_attn_type=flash).grown(12)
    snapshot = bytearray(context.save(flags=PARTIAL))
    snapshot[-4000:] = np.full(1000, np.nan, np.float32).tobytes()
    if not context.load(bytes(snapshot), flags=PARTIAL):
        raise NotApplicable("the library refuses a state that holds NaN")
    context.feed(12, 13)
    if np.isfinite(context.logits()).all():
        raise NotApplicable("NaN in the last rows of the state does not reach the logits")
    return context


_NAN = "llama-graph.cpp:3530"


@probe(
    "nan-after-removal",
    "NaN in a recurrent row after seq_rm",
    site=_NAN,
    sound="starts the next prompt clean",
    stock=Verdict.WRONG,
)
def nan_after_removal(bench: Bench) -> Outcome:
    """Poison the state with NaN, remove the sequence, decode a fresh prompt of twelve and go on."""
    context = _poisoned(bench)
    if not context.rm(0, -1, -1):
        return Outcome(Verdict.REFUSED, "seq_rm returned false")
    context.feed(0, 12)
    return went_on(context.goes_on(12), "seq_rm returned true")


@probe(
    "nan-after-clear",
    "NaN in a recurrent row after clear without data",
    site=_NAN,
    sound="starts the next prompt clean",
    stock=Verdict.WRONG,
)
def nan_after_clear(bench: Bench) -> Outcome:
    """Poison the state with NaN, llama_memory_clear(false), decode a fresh prompt of twelve and go on."""
    context = _poisoned(bench)
    lib.llama_memory_clear(context.memory, False)
    context.feed(0, 12)
    return went_on(context.goes_on(12), "cleared")


@probe(
    "nan-after-clear-data",
    "NaN in a recurrent row after clear with data (control)",
    site=_NAN,
    sound="starts the next prompt clean",
    stock=Verdict.EXACT,
)
def nan_after_clear_data(bench: Bench) -> Outcome:
    """Poison the state with NaN, llama_memory_clear(true), decode a fresh prompt of twelve and go on."""
    context = _poisoned(bench)
    lib.llama_memory_clear(context.memory, True)
    context.feed(0, 12)
    return went_on(context.goes_on(12), "cleared with data")


def _poisoned_attention(bench: Bench) -> Context:
    """A context without flash attention in whose attention KV a computation left NaN.

    By way of the recurrent state; where there is none, NaN lies in the last values of a restored state.
    """
    if not lib.llama_model_is_recurrent(bench.model) and not lib.llama_model_is_hybrid(bench.model):
        context = bench.context().grown(12)
        state = context.save()
        if not context.load(state[:-64] + b"\xff" * 64):
            raise NotApplicable("the library refuses a state that holds NaN")
        context.feed(12, 13)
        if np.isfinite(context.logits()).all():
            raise NotApplicable("NaN in the last values of the state does not reach the logits")
        return context
    bench.need_attention()
    return _poisoned(bench, flash=0)


@probe(
    "nan-in-attention",
    "NaN in attention KV after seq_rm",
    site="llama-kv-cache.cpp:1260",
    sound="starts the next prompt clean",
    stock=Verdict.WRONG,
)
def nan_in_attention(bench: Bench) -> Outcome:
    """No flash attention; decode a token on poisoned state, remove all, decode another prompt and go on."""
    context = _poisoned_attention(bench)
    if not context.rm(0, -1, -1):
        return Outcome(Verdict.REFUSED, "seq_rm returned false")
    context.feed(0, 8, text=1)
    return went_on(context.goes_on(8, text=1), "seq_rm returned true")


@probe(
    "nan-in-attention-cleared",
    "NaN in attention KV after clear without data",
    site="llama-kv-cache.cpp:1260",
    sound="starts the next prompt clean",
    stock=Verdict.WRONG,
)
def nan_in_attention_cleared(bench: Bench) -> Outcome:
    """The same with llama_memory_clear(false) in place of the removal."""
    context = _poisoned_attention(bench)
    lib.llama_memory_clear(context.memory, False)
    context.feed(0, 8, text=1)
    return went_on(context.goes_on(8, text=1), "cleared")


PROBES = (
    in_token,
    in_token_planes,
    second_ubatch,
    first_ubatch,
    restored,
    eval_callback,
    beside_free_cells,
    nan_after_removal,
    nan_after_clear,
    nan_after_clear_data,
    nan_in_attention,
    nan_in_attention_cleared,
)
