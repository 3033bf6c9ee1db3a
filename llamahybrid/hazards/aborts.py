"""Decodes that are stopped: what the memory holds afterwards."""

from __future__ import annotations

import ctypes

from llama_cpp import llama_cpp as lib

from llamahybrid.hazards.bench import ABORTED, PARTIAL, Bench, Context
from llamahybrid.hazards.probe import (
    LLAMA,
    Model,
    NotApplicable,
    Outcome,
    Verdict,
    all_sound,
    on,
    probe,
    went_on,
    wrong,
)

_SITE = "llama-context.cpp: llama_context::decode"
_PARTS = (0.1, 0.5, 0.97)
_THREE = {"n_seq_max": 3, "kv_unified": True}
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
    """Hold `held` tokens, stop while decoding `fed` more, go on where the context says that it ends.

    Where that is refused, remove everything and start another prompt.
    """
    bench.need_recurrent()
    context = _context(bench, held, planes, **params)
    _stop(context, fed, part)
    outcome = _after(context, "the decode returned 2")
    if outcome.verdict is not Verdict.REFUSED:
        return outcome
    context.rm(0, -1, -1)
    again = went_on(context.feed(0, 8, text=1) or context.goes_on(8, text=1), "after the removal of all")
    return outcome if again.verdict is Verdict.EXACT else wrong(f"{outcome.detail}; {again.detail}")


@probe(
    "abort-in-token",
    "A decode stopped inside its only ubatch",
    site=_SITE,
    sound="drops what it spoiled, or leaves the state as it was",
    stock=Verdict.WRONG,
    patched=Verdict.REFUSED,
    says="the decode returned 2, 0 tokens left; the next decode returned -2",
    patches=("0002",),
    also=on(Verdict.WRONG, "jamba", "lfm2", "mamba"),
    # nothing is left of it: an empty sequence may start anywhere
    otherwise={Model("mamba"): (Verdict.EXACT, "the decode returned 2, 0 tokens left")},
)
def in_token(bench: Bench) -> Outcome:
    """Twelve tokens; stop after 10, 50 and 97 % of the next one; go on where the context says it ends."""
    return all_sound(_stopped(bench, 12, 1, part) for part in _PARTS)


@probe(
    "abort-in-token-planes",
    "A decode stopped inside its only ubatch, with rollback planes",
    site=_SITE,
    sound="drops what it spoiled, or leaves the state as it was",
    stock=Verdict.WRONG,
    patched=Verdict.REFUSED,
    says="the decode returned 2, 0 tokens left; the next decode returned -2",
    patches=("0002",),
)
def in_token_planes(bench: Bench) -> Outcome:
    """Four planes; twelve tokens; stop after 10, 50 and 97 % of the next; go on where the context ends."""
    return all_sound(_stopped(bench, 12, 1, part, planes=4) for part in _PARTS)


@probe(
    "abort-second-ubatch",
    "A decode stopped in its second ubatch",
    site=_SITE,
    sound="keeps the first ubatch exactly, or drops what it spoiled",
    stock=Verdict.WRONG,
    patched=Verdict.REFUSED,
    says="the decode returned 2, 0 tokens left; the next decode returned -2",
    patches=("0002",),
)
def second_ubatch(bench: Bench) -> Outcome:
    """48 tokens in ubatches of 16; stop in the middle of the second; go on where the context says it ends."""
    return _stopped(bench, 0, 48, 0.5, n_ubatch=16)


@probe(
    "abort-between-ubatches",
    "A decode stopped when its second ubatch is due",
    site=_SITE,
    sound="keeps the first ubatch exactly, and leaves no logits",
    stock=Verdict.WRONG,
    patched=Verdict.EXACT,
    says="the decode returned 2, 16 tokens left",
    patches=("0002",),
    also=on(Verdict.WRONG, "jamba", "lfm2", "mamba"),
)
def between_ubatches(bench: Bench) -> Outcome:
    """48 tokens in ubatches of 16; stop at the first poll after the first ubatch; go on at its end."""
    bench.need_recurrent()
    twin = bench.context(n_ubatch=16)
    twin.count_polls()
    twin.feed(0, 16)
    context = bench.context(n_ubatch=16)
    context.count_polls()
    context.stop_at = twin.polls + 1
    status = context.feed(0, 48)
    context.stop_at = None
    readable = context.has_logits()
    outcome = _after(context, f"the decode returned {status}")
    exact = outcome.verdict is Verdict.EXACT
    return wrong(f"{outcome.detail}, and logits to sample from") if exact and readable else outcome


@probe(
    "abort-at-once",
    "A stop that is there before the decode begins",
    site=_SITE,
    sound="leaves the state as it was",
    stock=Verdict.WRONG,
    patched=Verdict.EXACT,
    says="the decode returned 2, 12 tokens left",
    patches=("0002",),
)
def at_once(bench: Bench) -> Outcome:
    """Twelve tokens; the first poll of the next decode says stop; go on where the context says it ends."""
    bench.need_recurrent()
    context = bench.context().grown(12)
    context.count_polls()
    context.stop_at = 1
    status = context.feed(12, 20)
    context.stop_at = None
    return _after(context, f"the decode returned {status}")


@probe(
    "abort-bystander",
    "A decode of two sequences stopped beside a third",
    site=_SITE,
    sound="leaves the third as it was, or drops it",
    stock=Verdict.WRONG,
    patched=Verdict.REFUSED,
    says="stopped after 97%, 0 tokens left; the next decode returned -2",
    patches=("0002",),
)
def bystander(bench: Bench) -> Outcome:
    """Three sequences; stop after 10, 50 and 97 % of a decode of the outer two; go on with the middle one."""
    bench.need_recurrent()

    def stopped(part: float) -> Outcome:
        twin = bench.context().grown(0)
        twin.count_polls()
        twin.feed(0, 1)
        context = bench.context(**_THREE)
        for seq in range(3):
            context.grown(8, seq, text=seq)
        context.count_polls()
        context.stop_at = max(1, int(twin.polls * part))
        status = _decode_around(context)
        context.stop_at = None
        if status != ABORTED:
            raise RuntimeError(f"the decode was not stopped: it returned {status}")
        end = context.last(1) + 1
        return went_on(context.goes_on(8, 1, text=1), f"stopped after {part:.0%}, {end} tokens left")

    return all_sound(stopped(part) for part in _PARTS)


@probe(
    "abort-shared-tokens",
    "A stopped decode of tokens that two sequences share",
    site=_SITE,
    sound="leaves both sequences alike, and what starts afresh is exact",
    stock=Verdict.WRONG,
    patched=Verdict.EXACT,
    says="the decode returned 2, the sequences end at [-1, -1]",
    patches=("0002",),
    model=LLAMA,
)
def shared_tokens(bench: Bench) -> Outcome:
    """Stop half-way through a batch of eight tokens of two sequences; start both again where they end."""
    bench.need_shared_tokens()
    shape = {"n_seq_max": 2, "kv_unified": True}
    twin = bench.context(**shape)
    twin.count_polls()
    twin.feed(0, 8)
    context = bench.context(**shape)
    context.count_polls()
    context.stop_at = max(1, twin.polls // 2)
    status = context.decode([(bench.token(position), position, (0, 1)) for position in range(8)])
    context.stop_at = None
    if status != ABORTED:
        raise NotApplicable("the backend does not poll the abort callback")
    ends = [context.last(seq) for seq in (0, 1)]
    said = f"the decode returned {status}, the sequences end at {ends}"
    if ends != [-1, -1]:
        return wrong(said)
    return all_sound(went_on(context.goes_on(0, seq), said) for seq in (0, 1))


@probe(
    "abort-first-ubatch",
    "A decode stopped in the very first ubatch (control)",
    site=_SITE,
    sound="leaves nothing; the prompt starts again, exactly",
    stock=Verdict.EXACT,
    patched=Verdict.EXACT,
    says="the decode returned 2, 0 tokens left",
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
    patched=Verdict.EXACT,
    says="n_rs_seq = 4: the snapshot was restored",
    also=on(Verdict.EXACT, "jamba", "lfm2", "mamba"),
)
def restored(bench: Bench) -> Outcome:
    """Twelve tokens, snapshot; stop half-way through the next; restore the snapshot, cut at twelve, go on.

    Once without rollback planes, and once with four where the model has them.
    """
    bench.need_recurrent()

    def after(planes: int) -> Outcome:
        context = bench.context(n_rs_seq=planes).grown(12)
        snapshot = context.save(flags=PARTIAL)
        _stop(context, 1, 0.5)
        if not (context.load(snapshot, flags=PARTIAL) and context.rm(0, 12, -1)):
            return wrong(f"n_rs_seq = {planes}: the snapshot or the cut was refused")
        return went_on(context.goes_on(12), f"n_rs_seq = {planes}: the snapshot was restored")

    return all_sound(after(planes) for planes in (0, 4))


@probe(
    "eval-callback-stop",
    "The eval callback returns false in the middle of a graph",
    site="ggml-backend.cpp: ggml_backend_sched_compute_splits",
    sound="reports an abort and drops what it spoiled",
    stock=Verdict.WRONG,
    patched=Verdict.EXACT,
    says="the decode returned 2, the snapshot was restored",
    patches=("0011",),
    also=on(Verdict.WRONG, "jamba", LLAMA),
)
def eval_callback(bench: Bench) -> Outcome:
    """Twelve tokens, snapshot; cb_eval returns false half-way through the next; go on at the reported end.

    Then restore the snapshot, cut at twelve and go on.
    """
    seen, stop_at = 0, 0

    def evaluate(_tensor: int, ask: bool, _user: int) -> bool:
        nonlocal seen
        seen += not ask
        return ask or not stop_at or seen < stop_at

    native = _Evaluate(evaluate)
    callback = ctypes.cast(native, lib.ggml_backend_sched_eval_callback)
    context = bench.context(cb_eval=callback).grown(12)
    snapshot = context.save(flags=PARTIAL)
    before = seen
    context.feed(12, 13)
    stop_at = seen + (seen - before) // 2
    status = context.feed(13, 14)
    stop_at = 0
    said = f"the decode returned {status}"
    outcome = _after(context, said)
    if not outcome.verdict.sound:
        return outcome
    context.load(snapshot, flags=PARTIAL)
    context.rm(0, 12, -1)
    return went_on(context.goes_on(12), f"{said}, the snapshot was restored")


@probe(
    "abort-beside-free-cells",
    "A decode of two sequences stopped where a third was removed",
    site="llama-memory-recurrent.cpp: llama_memory_recurrent::find_slot",
    sound="keeps what is exact or drops it; what starts afresh is exact",
    stock=Verdict.WRONG,
    patched=Verdict.EXACT,
    says="stopped 9 times",
    patches=("0026",),
    also={**on(Verdict.WRONG, "jamba", "lfm2"), **on(Verdict.EXACT, "mamba", "rwkv7")},
)
def beside_free_cells(bench: Bench) -> Outcome:
    """Three sequences; remove the second, stop a decode of the others, remove those, start all three again.

    Stopped once after each tenth of the polls that the decode takes.
    """
    bench.need_recurrent()
    context = _hole(bench)
    _decode_around(context)
    polls, stopped = context.polls, 0
    outcome = Outcome(Verdict.FAILED, "the decode was never stopped")
    for part in range(1, 10):
        context = _hole(bench)
        context.stop_at = max(2, polls * part // 10)
        status = _decode_around(context)
        context.stop_at = None
        if status != ABORTED:
            continue
        stopped += 1
        for seq in (0, 2):
            context.rm(seq, -1, -1)
        for seq in (0, 2, 1):
            context.grown(8, seq, text=seq)
        said = f"stopped {stopped} times"
        outcome = all_sound(went_on(context.goes_on(8, seq, text=seq), said) for seq in (1, 0, 2))
        if outcome.verdict is not Verdict.EXACT:
            return Outcome(outcome.verdict, f"{said}, last after {part}0 %", outcome.difference)
    return outcome


def _hole(bench: Bench) -> Context:
    """Two sequences of eight tokens, and room between them for another."""
    context = bench.context(**_THREE)
    for seq in range(3):
        context.grown(8, seq, text=seq)
    context.rm(1, -1, -1)
    context.count_polls()
    return context


def _decode_around(context: Context) -> int:
    return context.decode([(5, 8, (0,)), (6, 8, (2,))])


PROBES = (
    in_token,
    in_token_planes,
    second_ubatch,
    between_ubatches,
    at_once,
    bystander,
    shared_tokens,
    first_ubatch,
    restored,
    eval_callback,
    beside_free_cells,
)
