"""Answers: sample the tokens of an answer in the decode loop, and decode them ahead of their reader."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from llamahybrid.core.batch import READER, Decode, Steps
from llamahybrid.core.executor import Executor, SequenceChanged
from llamahybrid.core.progress import Progress
from llamahybrid.core.reply import Feed
from llamahybrid.core.request import Request
from llamahybrid.errors import ContextOverflow
from llamahybrid.prompt_cache.base import Tokens


def answer_steps(
    request: Request, feed: Feed, sample: Callable[[Executor], int], pauses: Callable[[int], bool]
) -> Steps[None]:
    """Sample tokens and decode them, for a reader of `feed`.

    A token is decoded once its reader has asked for it, so while the reader works on it; one that `pauses`
    when its reader asks for the next: the answer may end there, and the state must not go beyond.
    """
    progress = request.progress
    assert progress is not None, "its prompt is decoded"
    while True:
        assert request.slot is not None, "a task runs in a slot"
        executor = request.slot.executor
        if _lost_row(executor):
            yield from restore_answer(executor, progress, progress.said[: progress.decoded], row=True)
        token = sample(executor)
        progress.said.append(token)
        last = feed.given + 1 >= request.most
        feed.needs = feed.given + 1 + (last or pauses(token))
        feed.publish(token)
        while not feed.due:
            feed.paused = True  # before the check: a reader that asks at this moment then sees it
            if not feed.due:
                yield READER
        feed.paused = False
        assert request.slot is not None, "a task runs in a slot"
        executor = request.slot.executor
        yield from _append(executor, token, progress)


def _append(executor: Executor, token: int, progress: Progress) -> Steps[None]:
    """Decode a token that the loop sampled; the reader updates the view."""
    executor.runner.before_token(progress)
    if executor.live.n >= executor.live.capacity:
        raise ContextOverflow(f"the context window of {executor.live.capacity} is full")
    try:
        if executor.live.n != len(progress.prompt) + progress.decoded:  # lost while its reader was away
            raise SequenceChanged("another request had the memory zeroed")
        yield Decode(executor.live, (token,), "last")
    except SequenceChanged:
        yield from restore_answer(executor, progress, [*progress.said[: progress.decoded], token], row=True)
    progress.decoded += 1


def _lost_row(executor: Executor) -> bool:
    """The row of logits to sample from is lost: another request had all buffers zeroed."""
    state = executor.live.state
    return state.is_invalid or not (state.opaque or executor.live.row.exists_for_tip())


def restore_answer(
    executor: Executor, progress: Progress, said: Sequence[int], row: bool = False
) -> Steps[None]:
    """Restore the prompt and these tokens of its answer.

    `row`: with the row of logits of the last token.
    """
    executor.claim()
    executor.runner.check()
    target = np.concatenate([progress.prompt, np.asarray(said, dtype=np.int32)])
    if not executor.live.state.holds(target) or (row and not executor.live.row.exists_for_tip()):
        yield from _decode_anew(executor, target)


def _decode_anew(executor: Executor, target: Tokens) -> Steps[None]:
    while True:
        rest = executor.begin_again(target)
        try:
            yield from executor.runner.decode(None, rest, "last")
            return
        except SequenceChanged:
            continue
