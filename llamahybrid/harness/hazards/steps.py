"""Common steps of probes: cut, restore an unsuitable state, stop a decode, and go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llamahybrid.harness.hazards.context import ABORTED, BOTH, Context
from llamahybrid.harness.hazards.outcome import Gap, Outcome, all_sound, refused, went_on


def cut(context: Context, to: int, length: int, seq: int = 0) -> Outcome:
    """Cut `seq`, which holds the text of its number, from `length` to `to` tokens and go on from there."""
    done = context.rm(seq, to, -1)
    said = f"seq_rm to {to} of {length} tokens returned {done}".lower()
    found = context.goes_on(to if done else length, seq, text=seq)
    return went_on(found, said) if done else refused(found, said)


def all_go_on(
    judge: Callable[[Gap | int, str], Outcome], context: Context, said: str, ends: Mapping[int, int] = BOTH
) -> Outcome:
    """Go on with each of these sequences, which hold the text of their number, at its end."""
    return all_sound(judge(context.goes_on(end, seq, text=seq), said) for seq, end in ends.items())


def after_failure(context: Context, length: int) -> Outcome:
    """Go on at `length`, the live state's end before a restore that returned 0."""
    said = f"the restore returned 0, {context.last() + 1} tokens left"
    return refused(context.goes_on_after_refusal(length), said)


def still_there(context: Context, before: bytes, length: int, said: str) -> Outcome:
    """Go on at `length` after something was refused; `before` is the state that sequence 0 had then."""
    same = "the same" if context.save() == before else "other"
    said = f"{said}, {context.last() + 1} tokens left with {same} bytes"
    return refused(context.goes_on_after_refusal(length), said)


def next_prompt(context: Context, length: int, said: str, *, text: int = 1) -> Outcome:
    """Decode another prompt from position 0 and go on."""
    return went_on(context.starts_over(length, text=text), said)


def stop(context: Context, polls: int, part: float, decode: Callable[[], int]) -> None:
    """Stop a decode of `polls` polls after `part` of them."""
    status = context.stopped(max(1, int(polls * part)), decode)
    if status != ABORTED:
        raise RuntimeError(f"the decode was not stopped: it returned {status}")
