"""Leaving: how a request leaves its slot, at its end or preempted, and how it continues later."""

from __future__ import annotations

import logging

import numpy as np

from llamahybrid.core.answering import restore_answer
from llamahybrid.core.batch import Steps
from llamahybrid.core.progress import Progress
from llamahybrid.core.request import Request
from llamahybrid.core.slot import Slot
from llamahybrid.errors import DecodeError, RequestSuperseded
from llamahybrid.prompt_cache.base import Tokens

logger = logging.getLogger("llamahybrid")


def end(slot: Slot, request: Request) -> None:
    """End the request that has the slot, and store its checkpoints."""
    progress = request.progress
    if progress is None or progress.over:
        return
    progress.over = True
    if slot.current is not request:
        return  # another request has the slot
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
        return slot.view.ids()
    if progress.said:
        ids = np.concatenate([progress.prompt, np.asarray(progress.said[: progress.decoded], np.int32)])
    else:
        # Shorten the view by the last token: upstream's code then decodes that token again, and does not
        # sample from a row that is lost. Not where the caller processes that row, nor before a first token.
        between = not request.entered and progress.generated > 0
        progress.sent = request.sent
        if not request.sent:
            slot.view.shorten(progress.plan.total + progress.generated - between)
        _end_drafts(slot, progress, goes_on=between)
        ids = slot.view.ids()
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
    progress = slot.active
    if progress is None:
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
