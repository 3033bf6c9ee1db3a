"""Executor: the operations of requests on the live sequence of one slot.

Upstream's own code, chat handlers and users call `eval()`; each call brings the live sequence to the
`n_tokens` of its view and decodes behind them. Operations that decode are generators which yield the tokens
to decode (`batch.Steps`). All of them run in the decode loop's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from operator import index

import numpy as np

from llamahybrid.capi.calls import Outputs
from llamahybrid.core.batch import READER, Decode, Steps
from llamahybrid.core.progress import Progress
from llamahybrid.core.reply import Feed
from llamahybrid.core.request import Request
from llamahybrid.core.runner import Runner
from llamahybrid.core.view import View
from llamahybrid.errors import ContextOverflow, DecodeError, LlamaHybridError, RequestSuperseded
from llamahybrid.memory.adoption import adopt_native, take_over
from llamahybrid.prompt_cache.base import Tokens
from llamahybrid.prompt_cache.nodes import common_prefix
from llamahybrid.speculation.drafts import Drafts

logger = logging.getLogger("llamahybrid")

NO_CELLS = 1
"""Result of llama_decode: no room for the batch; nothing was changed."""


class SequenceChanged(LlamaHybridError):
    """Raised into steps whose batch failed or whose memory was lost; they decode the tokens again."""


class Executor:
    """Decodes tokens in one slot, and updates the view of its request."""

    def __init__(self, runner: Runner, drafts: Drafts, view: View) -> None:
        self.runner = runner
        self.drafts = drafts
        self.view = view
        """The view of the request that has the slot, or had it last."""
        self.request: Request | None = None
        """The request that has the slot."""
        self.live = runner.live
        self._n_vocab = runner.live.n_vocab
        self._n_ctx = runner.live.capacity

    @property
    def active(self) -> Progress | None:
        """The progress of the request that has the slot, until it is over."""
        progress = None if self.request is None else self.request.progress
        return None if progress is None or progress.over else progress

    def live_prefix(self, prompt: Tokens, salt: bytes = b"") -> int:
        """Number of leading tokens of a prompt that are live, for a request of this salt."""
        serves = self.live.identity.serves(salt) and not self.live.state.is_invalid
        return common_prefix(self.live.tokens, prompt) if serves else 0

    def take(self, request: Request) -> None:
        """Give the slot to a request."""
        self.request, self.view = request, request.view
        self.view.serve(request.salt)
        self.view.keep_rows(request.rows)

    def claim(self) -> None:
        """Empty the live sequence where it belongs to another salt than the view."""
        if not self.live.identity.serves(self.view.salt):
            self.runner.serve(self.view.salt)

    def take_over(self, other: Executor) -> None:
        """Move the live sequence of another slot here."""
        take_over(self.live, other.live)

    # -- a prompt --------------------------------------------------------------------------------

    def prefill(self, request: Request, tokens: Sequence[int], reset: bool) -> Steps[Progress]:
        """Begin a request with a prompt and decode it; the last row of logits is kept.

        Arguments and errors as `begin`.
        """
        rest = self.begin(request, tokens, reset)
        progress = self.active
        assert progress is not None, "it has just begun"
        yield from self.decode(rest, progress)
        yield from self._finish_prompt(progress)
        return progress

    def _finish_prompt(self, progress: Progress) -> Steps[None]:
        """Verify the decoded prompt, or decode it again from zero."""
        if progress.prefilling and not self.runner.prompt_done(progress):
            whole = self.view.ids()
            self.live.empty()
            yield from self.decode(whole, progress)
        self.drafts.policy.prefilled(progress.prefill_seconds)

    def begin(self, request: Request, tokens: Sequence[int], reset: bool) -> Tokens:
        """Begin a request with a prompt: plan it, restore, and return the tokens to decode, shape (k,).

        `reset` False: the prompt continues the `n_tokens` that are there.

        Raises ContextOverflow, DecodeError where some of it was decoded natively and is live no more.
        """
        self.claim()
        prompt = self.checked(tokens)
        source, request.source = request.source, None
        if source is not None:
            self.view.take_rows_of(source, prompt)
            self._notice_native(source)
            if source.handoff:
                request.rests_on, source.handoff = source.native, False
        if request.rests_on is not None:
            self._go_on_from(request.rests_on)
            request.rests_on = None
        return self._begin(request, prompt, reset)

    def _go_on_from(self, tokens: Tokens) -> None:
        """Continue from natively decoded content, the end of `tokens`.

        Raises RequestSuperseded where it is not live.
        """
        if common_prefix(self.live.tokens, tokens) < len(tokens):  # images included
            raise RequestSuperseded("another request came between the image and the answer to it")
        self.view.note_native(tokens)
        self.view.handoff = True

    def _begin(self, request: Request, prompt: Tokens, reset: bool) -> Tokens:
        """Plan a prompt, restore its restore point, and return the remaining tokens, shape (k,)."""
        live, view = self.live, self.view
        self._notice_native(view)
        goes_on = view.handoff or not reset
        if not reset:
            prompt = np.concatenate([view.ids(), prompt])
        elif view.handoff:
            prompt = view.with_native(prompt)
        believed = prompt
        if goes_on and live.state.holds(prompt[: live.n]):  # natively decoded content has no ids: keep it
            prompt = np.concatenate([live.tokens, prompt[live.n :]])
        view.handoff = False
        if len(prompt) == 0:
            raise ContextOverflow("the prompt is empty: there is nothing to sample from")
        self.require_fit(len(prompt))
        self._require_native(prompt)
        rows = min(view.true_rows, common_prefix(live.tokens, prompt))
        view.true_rows = 0
        progress = self.runner.begin(prompt, rows if view.keeps_rows else None)
        rest = _text(prompt[live.n :])
        progress.salt = request.salt
        progress.prompt = prompt
        request.progress = progress
        if request.after is None:  # further answers to the same prompt are not reported
            progress.on_progress = request.on_progress
            progress.reach(progress.plan.cached)
        view.true_rows = min(rows, live.n)
        self.mirror(believed[: live.n])
        progress.drafts = self.drafts.begin(len(prompt))
        return rest

    # -- an answer -------------------------------------------------------------------------------

    def append(self, token: int, progress: Progress) -> Steps[None]:
        """Decode a token that the loop sampled; the reader updates the view."""
        self.runner.before_token(progress)
        if self.live.n >= self._n_ctx:
            raise ContextOverflow(f"the context window of {self._n_ctx} is full")
        try:
            if self.live.n != len(progress.prompt) + progress.decoded:  # lost while its reader was away
                raise SequenceChanged("another request had the memory zeroed")
            yield Decode(self.live, (token,), "last")
        except SequenceChanged:
            yield from self.restore_answer(progress, [*progress.said[: progress.decoded], token], row=True)
        progress.decoded += 1

    def lost_row(self) -> bool:
        """The row of logits to sample from is lost: another request had all buffers zeroed."""
        state = self.live.state
        return state.is_invalid or not (state.opaque or self.live.row.exists_for_tip())

    def restore_answer(self, progress: Progress, said: Sequence[int], row: bool = False) -> Steps[None]:
        """Restore the prompt and these tokens of its answer.

        `row`: with the row of logits of the last token.
        """
        self.claim()
        self.runner.check()
        target = np.concatenate([progress.prompt, np.asarray(said, dtype=np.int32)])
        if not self.live.state.holds(target) or (row and not self.live.row.exists_for_tip()):
            yield from self._decode_anew(target)

    def _decode_anew(self, target: Tokens) -> Steps[None]:
        while True:
            rest = self._begin_again(target)
            try:
                yield from self.runner.decode(None, rest, "last")
                return
            except SequenceChanged:
                continue

    def end(self, request: Request) -> None:
        """End the request that has the slot, and store its checkpoints."""
        progress = request.progress
        if progress is None or progress.over:
            return
        progress.over = True
        if self.request is not request:
            return  # another request has the slot
        if progress.said:
            self._drop_ahead(progress)
        else:
            self.end_drafts(progress)
        self.runner.end(progress)

    def _drop_ahead(self, progress: Progress) -> None:
        """Remove a token that was decoded ahead of the reader, if that needs no snapshot."""
        live, n = self.live, progress.plan.total + max(0, progress.generated - 1)
        if (
            n < live.n
            and not live.state.is_invalid
            and n >= live.profile.cut_floor(live.n, live.native.positions()[0])
        ):
            live.cut(n)

    def end_drafts(self, progress: Progress, goes_on: bool = False) -> None:
        """Remove drafted tokens that were not handed out: the next request continues the text.

        `goes_on`: the request itself continues later, and decodes its last token then.
        """
        live, seen = self.live, progress.plan.total + progress.generated
        self.drafts.confirm(seen, over=True)
        keep = seen - goes_on
        if not goes_on and progress.generated and live.n >= seen and live.tokens[seen - 1] != progress.last:
            keep -= 1  # the last token differs from the draft that was decoded in its place
        try:
            if live.n > keep and not live.state.is_invalid and not live.state.opaque:
                certain = live.tokens[:keep].copy()
                if self.drafts.go_back(keep):
                    if live.n < keep:  # directly, since steps of a cancelled request raise
                        live.decode(certain[live.n :], "last")
                    self.mirror(certain)
        finally:
            self.drafts.end()

    # -- preemption --------------------------------------------------------------------------------

    def leave(self, request: Request) -> Tokens:
        """Preempt a request; the ids from which it continues later."""
        progress = self.active
        if progress is None:
            return self.view.ids()
        if progress.said:
            ids = np.concatenate([progress.prompt, np.asarray(progress.said[: progress.decoded], np.int32)])
        else:
            # Shorten the view by the last token: upstream's code then decodes that token again, and does not
            # sample from a row that is lost.
            between = not request.entered  # else the caller processes the row of the last token
            progress.sent = request.sent
            if not request.sent:
                self.view.shorten(progress.plan.total + max(0, progress.generated - between))
            self.end_drafts(progress, goes_on=between)
            ids = self.view.ids()
        progress.drop_records()
        try:
            self.runner.save_tip()
        except Exception:  # it is decoded again later; who takes the slot has nothing to do with it
            logger.exception("the state of a preempted request was not stored")
        return ids

    def come_back(self, request: Request) -> Steps[None]:
        """Restore the sequence of a preempted request.

        Raises RequestSuperseded where natively decoded content is lost.
        """
        progress = self.active
        if progress is None:
            return
        if progress.sent:
            raise RequestSuperseded("tokens were sent to this generator before another took its place")
        try:
            if progress.said:
                yield from self.restore_answer(progress, progress.said[: progress.decoded])
            else:
                self.claim()
                self.runner.check()
                yield from self.decode(self.align(), None)
        except DecodeError as error:
            if not len(self.view.native):
                raise
            raise RequestSuperseded(f"another request took the place of this one: {error}") from error
        total = progress.plan.total
        self.drafts.resume(progress.drafts, total, total + progress.generated)

    # -- eval ------------------------------------------------------------------------------------

    def eval(self, tokens: Sequence[int]) -> Steps[None]:
        """Decode tokens behind the `n_tokens` of the view (see `Llama.eval`)."""
        if self.active is None:
            self.claim()
            self._notice_native(self.view)
            self.runner.check()
        progress = self.active
        if progress is None or progress.prefilling or not self._takes_one(tokens):
            more = self.checked(tokens)
            work = np.concatenate([self.align(), more])
            self.require_fit(self.live.n + len(work))
            if progress is not None and not progress.prefilling:
                yield from self._decode_answer(work, progress, unsure=len(more) - 1)
            else:
                yield from self.decode(work, progress)
                if progress is not None:
                    yield from self._finish_prompt(progress)
            return
        token, n = tokens[0], self.live.n
        self.runner.before_token(progress)
        try:
            yield Decode(self.live, (token,), "last")
        except SequenceChanged:
            yield from self.decode(np.array([*self.align(), token], np.int32), progress)
            return
        self.view.append(token, n)
        self.keep_tail(1)

    def _takes_one(self, tokens: Sequence[int]) -> bool:
        """A single token behind a sound sequence that equals the view."""
        n = self.live.n
        if len(tokens) != 1 or not self.view.takes_one(n) or n >= self._n_ctx or self.live.state.is_invalid:
            return False
        return type(tokens[0]) is int and 0 <= tokens[0] < self._n_vocab

    def bring(self) -> Steps[None]:
        """Restore the tokens of the view."""
        self.claim()
        self._notice_native(self.view)
        self.runner.check()
        yield from self.decode(self.align(), None)

    def bring_row(self) -> Steps[None]:
        """Restore the tokens of the view and copy the last row. Raises LlamaHybridError without one."""
        yield from self.bring()
        ids = self.view.ids()
        if len(ids) and self.live.row.logits() is None:
            self.runner.begin(ids)  # stored logits, or all but the last token
            yield from self.decode(ids[self.live.n :], None)
        if self.live.row.logits() is None:
            raise LlamaHybridError("there are no logits to sample from: eval a token first")
        self.keep_tail(1)

    def hold(self, tokens: Tokens) -> Steps[None]:
        """Restore exactly these tokens, and store their state."""
        live = self.live
        self.claim()
        live.shared.lose_all()
        live.empty()
        self.view.handoff, self.view.true_rows = False, 0
        if len(tokens):  # as for a prompt of one more token: no logits are needed
            self.runner.begin(np.append(tokens, tokens[-1:]), len(tokens))
        self.mirror(live.tokens)
        yield from self.decode(tokens[live.n :], None)
        if live.n:
            self.runner.save_tip()

    def reset(self) -> None:
        """Forget the live sequence."""
        self.view.reset()
        self.runner.store_attention()
        self.live.empty()

    def _decode_answer(self, work: Tokens, progress: Progress, unsure: int) -> Steps[None]:
        """Decode tokens of the answer; the last `unsure` are drafts."""
        self.runner.before_token(progress)
        self.drafts.prepare(unsure)
        clock = time.perf_counter()
        yield from self.decode(work, progress)
        self.drafts.policy.decoded(time.perf_counter() - clock)

    def decode(self, work: Tokens, progress: Progress | None) -> Steps[None]:
        """Decode `work` at the end of the live sequence, and update the view after each batch.

        Raises DecodeError where natively decoded content is lost, and
        ContextOverflow where cells run out before positions do: images of M-RoPE models take more of them.
        """
        while len(work):
            first = self.live.n
            try:
                yield from self._decode(_text(work), progress)
                return
            except DecodeError as error:
                if error.code != NO_CELLS:
                    raise
                raise ContextOverflow(f"the context window of {self._n_ctx} has no cells left") from error
            except SequenceChanged:  # another request had all buffers zeroed
                whole = np.concatenate([self.view.ids()[:first], work])
                work = self._begin_again(whole, self.view.true_rows if self.view.keeps_rows else None)
                self.mirror(whole[: self.live.n])

    def _decode(self, work: Tokens, progress: Progress | None) -> Steps[None]:
        first, view = self.live.n, self.view
        drafted = progress is not None and not progress.prefilling and len(work) > 1
        outputs: Outputs = "all" if view.keeps_rows or drafted else "last"

        def note(start: int, end: int) -> None:
            self.mirror(work[start - first : end - first], start)
            if view.keeps_rows:
                view.take_rows(start, self.live.native.all_logits(end - start, self._n_vocab))
            if end == first + len(work):
                self.keep_tail(end - start if drafted else 1)

        yield from self.runner.decode(progress, work, outputs, note, alone=outputs == "all")

    def keep_tail(self, rows: int = 1) -> None:
        """Copy the last rows of logits for the caller's thread to sample from."""
        view = self.view
        if rows == 1:
            row = self.live.row.logits()
            view.tail = None if row is None else row[np.newaxis].copy()
        else:
            view.tail = self.live.native.all_logits(rows, self._n_vocab).copy()
        view.tail_end = view.n_tokens

    def mirror(self, ids: Tokens, start: int = 0) -> None:
        """Write the tokens of the live sequence from `start` on into the view."""
        self.view.mirror(ids, start, self.live.state.tip_logits)

    def align(self) -> Tokens:
        """Make the live sequence a prefix of the view; the tokens of the view behind it."""
        live = self.live
        target = self.view.ids()
        n = len(target)
        if n == 0:
            self.runner.store_attention()
            live.cut(0)
        elif not live.state.holds(target):
            ahead = live.n > n and live.state.starts_with(target)
            if not (ahead and self.drafts.go_back(n)):
                self._begin_again(target)
        self.view.true_rows = min(self.view.true_rows, live.n)
        return target[live.n :]

    def _begin_again(self, target: Tokens, reuse_limit: int | None = None) -> Tokens:
        """Make the live sequence a prefix of `target`; the tokens of `target` behind it.

        Raises DecodeError where natively decoded content of `target` is lost.
        """
        self._require_native(target)
        self.runner.begin(target, reuse_limit)
        return _text(target[self.live.n :])

    def _require_native(self, target: Tokens) -> None:
        """Raise DecodeError where natively decoded content of `target` is lost."""
        _text(target[common_prefix(self.live.tokens, target) :])

    def _notice_native(self, view: View) -> None:
        """Adopt content that a chat handler decoded natively and counted in a view's `n_tokens`."""
        live, n = self.live, view.n_tokens
        if n > live.n and live.shared.touched_outside() and adopt_native(live, n):
            view.note_native(live.tokens)
            view.handoff = True
            view.true_rows = 0

    def checked(self, tokens: Sequence[int]) -> Tokens:
        """The ids as an array.

        Raises DecodeError, as the library would, for ids outside the vocabulary, and TypeError for other
        things than integers: a text, a fraction.
        """
        ids = np.asarray(tokens)  # without a dtype: numpy would parse texts as integers
        if ids.ndim == 0:
            raise TypeError(f"token ids are a sequence of integers, not {type(tokens).__name__}")
        if ids.dtype.kind not in "iu":
            ids = np.asarray([index(token) for token in tokens], dtype=np.int64)
        ids = ids.astype(np.int64, copy=False).reshape(-1)
        if ids.size and (ids.min() < 0 or ids.max() >= self._n_vocab):
            raise DecodeError(-1, f"token ids must lie in [0, {self._n_vocab}); llama_decode would return -1")
        return ids.astype(np.int32)

    def require_fit(self, n: int) -> None:
        """Raise ContextOverflow for more than `n_ctx` tokens."""
        if n > self._n_ctx:
            raise ContextOverflow(f"{n} tokens do not fit into the context window of {self._n_ctx}")


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
        if executor.lost_row():
            yield from executor.restore_answer(progress, progress.said[: progress.decoded], row=True)
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
        yield from executor.append(token, progress)


def _text(tokens: Tokens) -> Tokens:
    """Tokens to decode. Raises DecodeError for natively decoded content, which has no ids."""
    if bool((tokens < 0).any()):
        raise DecodeError(0, "natively decoded content is gone from context memory; decode it again")
    return tokens
