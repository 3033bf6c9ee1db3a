"""Answers: sampled in the decode loop, decoded ahead of their reader, preempted, continued and ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from llamahybrid.core.report import Progress
from llamahybrid.core.request import READER, Decode, Feed, Request, Steps
from llamahybrid.core.slot import SequenceChanged, Slot
from llamahybrid.errors import ContextOverflow, DecodeError, RequestSuperseded
from llamahybrid.prompt_cache.base import Logits, Tokens

logger = logging.getLogger("llamahybrid")


def answer_steps(
    request: Request, feed: Feed, sample: Callable[[int | Logits], int], pauses: Mapping[int, bool] | None
) -> Steps[None]:
    """Sample tokens and decode them, for a reader of `feed`; `sample` takes the place of their logits.

    A token is decoded once its reader has asked for it, so while the reader works on it; one that `pauses`
    when its reader asks for the next: the answer may end there, and the state must not go beyond. None: each.
    """
    progress = request.progress
    assert progress is not None, "its prompt is decoded"
    while True:
        assert request.slot is not None, "a task runs in a slot"
        slot = request.slot
        row, state = slot.live.row, slot.live.state
        if not row.exists_for_tip() and (state.is_invalid or not state.opaque):
            # Another request had all buffers zeroed.
            yield from restore_answer(slot, progress, progress.said[: progress.decoded], row=True)
        token = sample(row.place())
        progress.said.append(token)
        given = len(progress.said)
        feed.publish(token, given + (given >= request.most or pauses is None or pauses[token]))
        while feed.asked < feed.needs:
            feed.paused = True  # before the check: a reader that asks at this moment then sees it
            if feed.asked < feed.needs:
                yield READER
        feed.paused = False
        assert request.slot is not None, "a task runs in a slot"
        slot = request.slot
        if request.parked:  # preempted while its reader was away
            yield from come_back(slot)
        live = slot.live
        slot.runner.before_token(progress)
        if live.state.n >= live.capacity:
            raise ContextOverflow(f"the context window of {live.capacity} is full")
        try:
            if live.state.n != len(progress.prompt) + progress.decoded:  # lost while its reader was away
                raise SequenceChanged("another request had the memory zeroed")
            yield Decode(live, (token,), "last")
        except SequenceChanged:
            said = [*progress.said[: progress.decoded], token]
            yield from restore_answer(slot, progress, said, row=True)
        progress.decoded += 1


def restore_answer(slot: Slot, progress: Progress, said: Sequence[int], row: bool = False) -> Steps[None]:
    """Restore the prompt and these tokens of its answer.

    `row`: with the row of logits of the last token.
    """
    slot.claim()
    slot.runner.check()
    target = np.concatenate([progress.prompt, np.asarray(said, dtype=np.int32)])
    if not slot.live.state.holds(target) or (row and not slot.live.row.exists_for_tip()):
        yield from _decode_anew(slot, target)


def _decode_anew(slot: Slot, target: Tokens) -> Steps[None]:
    while True:
        rest = slot.begin_again(target)
        try:
            yield from slot.runner.decode(None, rest, "last")
            return
        except SequenceChanged:
            continue


def end(slot: Slot, request: Request) -> None:
    """End the request that has the slot, and store its checkpoints."""
    progress = request.progress
    if progress is None or slot.current is not request:
        return  # it has not begun, or another request has the slot
    if progress.said:
        _drop_ahead(slot, progress)
    else:
        _end_drafts(slot, progress)
    slot.runner.end(progress)


def _drop_ahead(slot: Slot, progress: Progress) -> None:
    """Remove a token that was decoded ahead of the reader, if that needs no snapshot."""
    live, n = slot.live, progress.plan.total + max(0, progress.generated - 1)
    if (
        n < live.n
        and not live.state.is_invalid
        and n >= live.profile.cut_floor(live.n, live.native.positions()[0])
    ):
        live.cut(n)


def _end_drafts(slot: Slot, progress: Progress, goes_on: bool = False) -> None:
    """Remove drafted tokens that were not handed out: the next request continues the text.

    `goes_on`: the request itself continues later, and decodes its last token then.
    """
    live, seen = slot.live, progress.plan.total + progress.generated
    slot.drafts.confirm(seen, over=True)
    keep = seen - goes_on
    if not goes_on and progress.generated and live.n >= seen and live.tokens[seen - 1] != progress.last:
        keep -= 1  # the last token differs from the draft that was decoded in its place
    try:
        if live.n > keep and not live.state.is_invalid and not live.state.opaque:
            certain = live.tokens[:keep].copy()
            if slot.drafts.go_back(keep):
                if live.n < keep:  # directly, since steps of a cancelled request raise
                    live.decode(certain[live.n :], "last")
                slot.mirror(certain)
    finally:
        slot.drafts.end()


def preempt(slot: Slot, request: Request) -> Tokens:
    """Preempt a request; the ids from which it continues later."""
    progress = slot.active
    if progress is None:
        return request.view.ids()
    if progress.said:
        ids = np.concatenate([progress.prompt, np.asarray(progress.said[: progress.decoded], np.int32)])
    else:
        # Shorten the view by the last token: upstream's code then decodes that token again, and does not
        # sample from a row that is lost. Not where the caller processes that row, nor before a first token.
        between = not request.entered and progress.generated > 0
        progress.sent = request.sent
        if not request.sent:
            request.view.shorten(progress.plan.total + progress.generated - between)
        _end_drafts(slot, progress, goes_on=between)
        ids = request.view.ids()
    progress.drop_records()
    try:
        slot.runner.save_tip()
    except Exception:  # it is decoded again later; who takes the slot has nothing to do with it
        logger.exception("the state of a preempted request was not stored")
    return ids


def come_back(slot: Slot) -> Steps[None]:
    """Restore the sequence of the preempted request that has the slot again.

    Raises RequestSuperseded where natively decoded content is lost.
    """
    request, progress = slot.current, slot.active
    if request is None or progress is None:
        return
    if progress.sent:
        raise RequestSuperseded("tokens were sent to this generator before another took its place")
    try:
        if progress.said:
            yield from restore_answer(slot, progress, progress.said[: progress.decoded])
        else:
            slot.claim()
            slot.runner.check()
            yield from slot.decode(slot.align(), None)
    except DecodeError as error:
        if not len(slot.view.native):
            raise
        raise RequestSuperseded(f"another request took the place of this one: {error}") from error
    total = progress.plan.total
    slot.drafts.resume(progress.drafts, total, total + progress.generated)
    request.parked = False
    if request.known is not None and request.known.forgotten:
        slot.runner.stop_storing()
    request.known = None
