"""Answers: sample the tokens of an answer in the decode loop, and decode them ahead of their reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from llamahybrid.core.batch import READER, Decode, Steps
from llamahybrid.core.progress import Progress
from llamahybrid.core.reply import Feed
from llamahybrid.core.request import Request
from llamahybrid.core.slot import SequenceChanged, Slot
from llamahybrid.errors import ContextOverflow
from llamahybrid.prompt_cache.base import Logits, Tokens


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
