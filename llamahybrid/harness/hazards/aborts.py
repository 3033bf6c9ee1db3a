"""The memory after stopped decodes."""

from __future__ import annotations

import ctypes
from functools import partial

from llama_cpp import llama_cpp as lib

from llamahybrid.harness.hazards.case import probe
from llamahybrid.harness.hazards.context import (
    ABORTED,
    PARTIAL,
    THREE,
    TWO,
    Context,
    all_go_on,
    next_prompt,
    stop,
)
from llamahybrid.harness.hazards.effect import Behaviour, Effect, NotApplicable, all_sound, went_on, wrong
from llamahybrid.harness.hazards.model import ModelUnderTest

_PARTS = (0.1, 0.5, 0.97)
_EIGHT = {0: 8, 1: 8, 2: 8}
_Evaluate = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)


def _stop(context: Context, fed: int, part: float) -> None:
    """Decode `fed` more tokens and stop after `part` of the polls that this takes."""
    held = context.last() + 1
    twin = context.tested.context(**context.params).grown(held)
    polls = twin.polls_of(lambda: twin.feed(held, held + fed))
    if not polls:
        raise NotApplicable("the backend does not poll the abort callback")
    stop(context, polls, part, lambda: context.feed(held, held + fed))


def _after(context: Context, said: str) -> Effect:
    """Go on where the context says that it ends."""
    end = context.last() + 1
    return went_on(context.goes_on(end), f"{said}, {end} tokens left")


def _stopped(tested: ModelUnderTest, held: int, fed: int, part: float, **params: object) -> Effect:
    """Hold `held` tokens, stop while decoding `fed` more, go on where the context says that it ends.

    If that is refused, remove everything and start another prompt.
    """
    tested.need("recurrent")
    context = tested.context(**params).grown(held)
    _stop(context, fed, part)
    effect = _after(context, "the decode returned 2")
    if effect.behaviour is not Behaviour.REFUSED:
        return effect
    context.rm(0, -1, -1)
    again = next_prompt(context, 8, "after the removal of all")
    return effect if again.behaviour is Behaviour.EXACT else wrong(f"{effect.detail}; {again.detail}")


@probe("A decode stopped inside its only ubatch", "llama_context::decode")
def abort_in_token(tested: ModelUnderTest) -> Effect:
    """Twelve tokens; stop after 10, 50 and 97 % of the next one; go on where the context says it ends.

    Without rollback planes, and with four where the model has them.
    """
    return all_sound(_stopped(tested, 12, 1, part, n_rs_seq=planes) for planes in (0, 4) for part in _PARTS)


@probe("A decode stopped in its second ubatch", "llama_context::decode")
def abort_second_ubatch(tested: ModelUnderTest) -> Effect:
    """48 tokens in ubatches of 16; stop in the middle of the second; go on where the context says it ends."""
    return _stopped(tested, 0, 48, 0.5, n_ubatch=16)


@probe("A decode stopped when its second ubatch is due", "llama_context::decode")
def abort_between_ubatches(tested: ModelUnderTest) -> Effect:
    """48 tokens in ubatches of 16; stop at the first poll after the first ubatch; go on at its end."""
    tested.need("recurrent")
    twin, context = tested.context(n_ubatch=16), tested.context(n_ubatch=16)
    polls = twin.polls_of(lambda: twin.feed(0, 16))
    status = context.stopped(polls + 1, lambda: context.feed(0, 48))
    readable = context.has_logits()
    effect = _after(context, f"the decode returned {status}")
    exact = effect.behaviour is Behaviour.EXACT
    return wrong(f"{effect.detail}, and logits to sample from") if exact and readable else effect


@probe("A stop that is there before the decode begins", "llama_context::decode")
def abort_at_once(tested: ModelUnderTest) -> Effect:
    """Twelve tokens; the first poll of the next decode says stop; go on where the context says it ends."""
    tested.need("recurrent")
    context = tested.context().grown(12)
    status = context.stopped(1, lambda: context.feed(12, 20))
    return _after(context, f"the decode returned {status}")


@probe("A decode of two sequences stopped beside a third", "llama_context::decode")
def abort_bystander(tested: ModelUnderTest) -> Effect:
    """Three sequences; stop after 10, 50 and 97 % of a decode of the outer two; go on with the middle one."""
    tested.need("recurrent")

    def stopped(part: float) -> Effect:
        twin, context = tested.context(), tested.context(**THREE).filled(_EIGHT)
        polls = twin.polls_of(lambda: twin.feed(0, 1))
        stop(context, polls, part, lambda: _decode_around(context))
        end = context.last(1) + 1
        return went_on(context.goes_on(8, 1, text=1), f"stopped after {part:.0%}, {end} tokens left")

    return all_sound(stopped(part) for part in _PARTS)


@probe("A stopped decode of tokens that two sequences share", "llama_context::decode")
def abort_shared_tokens(tested: ModelUnderTest) -> Effect:
    """Stop half-way through a batch of eight tokens of two sequences; start both again where they end."""
    tested.need_shared_tokens()
    twin, context = tested.context(**TWO), tested.context(**TWO)
    polls = twin.polls_of(lambda: twin.feed(0, 8))
    both = [(tested.token(position), position, (0, 1)) for position in range(8)]
    status = context.stopped(max(1, polls // 2), lambda: context.decode(both))
    if status != ABORTED:
        raise NotApplicable("the backend does not poll the abort callback")
    ends = context.last_of()
    said = f"the decode returned {status}, the sequences end at {ends}"
    if ends != [-1, -1]:
        return wrong(said)
    return all_sound(went_on(context.goes_on(0, seq), said) for seq in (0, 1))


@probe("A decode stopped in the very first ubatch (control)", "llama_context::decode")
def abort_first_ubatch(tested: ModelUnderTest) -> Effect:
    """An empty context; stop in the middle of twelve tokens; start again."""
    return _stopped(tested, 0, 12, 0.4)


@probe("A snapshot restored after a stopped decode (control)", "llama_context::decode")
def abort_restored(tested: ModelUnderTest) -> Effect:
    """Twelve tokens, snapshot; stop half-way through the next; restore the snapshot, cut at twelve, go on.

    Once without rollback planes, and once with four where the model has them.
    """
    tested.need("recurrent")

    def after(planes: int) -> Effect:
        context = tested.context(n_rs_seq=planes).grown(12)
        snapshot = context.save(flags=PARTIAL)
        _stop(context, 1, 0.5)
        if not context.goes_back(snapshot, 12):
            return wrong(f"n_rs_seq = {planes}: the snapshot or the cut was refused")
        return went_on(context.goes_on(12), f"n_rs_seq = {planes}: the snapshot was restored")

    return all_sound(after(planes) for planes in (0, 4))


@probe("The eval callback returns false in the middle of a graph", "ggml_backend_sched_compute_splits")
def eval_callback_stop(tested: ModelUnderTest) -> Effect:
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
    context = tested.context(cb_eval=callback).grown(12)
    snapshot = context.save(flags=PARTIAL)
    before = seen
    context.feed(12, 13)
    stop_at = seen + (seen - before) // 2
    status = context.feed(13, 14)
    stop_at = 0
    said = f"the decode returned {status}"
    effect = _after(context, said)
    if not effect.behaviour.sound:
        return effect
    context.goes_back(snapshot, 12)
    return went_on(context.goes_on(12), f"{said}, the snapshot was restored")


@probe("A decode of two sequences stopped where a third was removed", "llama_memory_recurrent::find_slot")
def abort_beside_free_cells(tested: ModelUnderTest) -> Effect:
    """Three sequences; remove the second, stop a decode of the others, remove those, start all three again.

    Stopped once after each tenth of the polls that the decode takes.
    """
    tested.need("recurrent")
    context, stopped = _hole(tested), 0
    polls = context.polls_of(lambda: _decode_around(context))
    effect = Effect(Behaviour.FAILED, "the decode was never stopped")
    for part in range(1, 10):
        context = _hole(tested)
        if context.stopped(max(2, polls * part // 10), partial(_decode_around, context)) != ABORTED:
            continue
        stopped += 1
        for seq in (0, 2):
            context.rm(seq, -1, -1)
        context.filled({0: 8, 2: 8, 1: 8})
        said = f"stopped {stopped} times"
        effect = all_go_on(went_on, context, said, {1: 8, 0: 8, 2: 8})
        if effect.behaviour is not Behaviour.EXACT:
            return Effect(effect.behaviour, f"{said}, last after {part}0 %", effect.difference)
    return effect


def _hole(tested: ModelUnderTest) -> Context:
    """Two sequences of eight tokens, and room between them for another."""
    context = tested.context(**THREE).filled(_EIGHT)
    context.rm(1, -1, -1)
    return context


def _decode_around(context: Context) -> int:
    return context.decode([(5, 8, (0,)), (6, 8, (2,))])
