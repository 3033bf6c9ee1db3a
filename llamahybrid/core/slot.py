"""Slot: a live sequence, the request that has it, and the operations of requests on it.

Upstream's own code, chat handlers and users call `eval()`; each call brings the live sequence to the
`n_tokens` of its view and decodes behind them. Operations that decode are generators which yield the tokens
to decode (`batch.Steps`). All of them run in the decode loop's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from operator import index

import numpy as np

from llamahybrid.capi.calls import Outputs
from llamahybrid.core.report import Progress
from llamahybrid.core.request import Decode, Request, Steps
from llamahybrid.core.runner import Runner
from llamahybrid.core.view import View
from llamahybrid.errors import ContextOverflow, DecodeError, LlamaHybridError, RequestSuperseded
from llamahybrid.memory.restore import adopt_native
from llamahybrid.prompt_cache.base import Logits, Tokens
from llamahybrid.prompt_cache.nodes import common_prefix
from llamahybrid.speculation.drafts import Drafts

logger = logging.getLogger("llamahybrid")

NO_CELLS = 1
"""Result of llama_decode: no room for the batch; nothing was changed."""


class SequenceChanged(LlamaHybridError):
    """Raised into steps whose batch failed or whose memory was lost; they decode the tokens again."""


class Slot:
    """Decodes tokens of requests in one live sequence, and updates their views."""

    def __init__(self, runner: Runner, drafts: Drafts) -> None:
        self.runner = runner
        self.drafts = drafts
        self.request: Request | None = None
        """The request that has the slot."""
        self.current: Request | None = None
        """The request whose tokens are live: that one, or one made inside it."""
        self.used = 0
        """When a request last left; larger is later."""
        self.live = runner.live
        self._n_vocab = runner.live.n_vocab
        self._n_ctx = runner.live.capacity

    @property
    def view(self) -> View:
        """The view of the current request."""
        assert self.current is not None, "operations are those of a request"
        return self.current.view

    @property
    def active(self) -> Progress | None:
        """The progress of the current request, until it is over."""
        current = self.current
        return None if current is None or current.over else current.progress

    def glimpse(self) -> tuple[str, Tokens]:
        """Return namespace and copied ids of the live tokens, for any thread.

        Empty while the slot changes to requests of another salt.
        """
        live = self.live
        before, name = live.identity.fingerprint, live.identity.namespace
        tokens = live.tokens.copy()
        return (name, tokens) if live.identity.fingerprint is before else ("", tokens[:0])

    def live_prefix(self, prompt: Tokens, salt: bytes = b"") -> int:
        """Number of leading tokens of a prompt that are live, for a request of this salt."""
        serves = self.live.identity.serves(salt) and not self.live.state.is_invalid
        return common_prefix(self.live.tokens, prompt) if serves else 0

    def take(self, request: Request) -> None:
        """Give the slot to a request."""
        self.current = request
        request.view.serve(request.salt)
        request.view.keep_rows(request.rows)

    def claim(self) -> None:
        """Empty the live sequence where it belongs to another salt than the view."""
        if not self.live.identity.serves(self.view.salt):
            self.runner.serve(self.view.salt)

    def _prepare(self) -> None:
        """Verify memory before an operation outside of a request."""
        self.claim()
        self._notice_native(self.view)
        self.runner.check()

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
            if common_prefix(self.live.tokens, request.rests_on) < len(request.rests_on):  # images included
                raise RequestSuperseded("another request came between the image and the answer to it")
            self.view.note_native(request.rests_on)
            self.view.handoff, request.rests_on = True, None
        return self._begin(request, prompt, reset)

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
        progress = self.runner.begin(prompt, rows if view.logits_all else None)
        rest = _text(prompt[live.n :])
        progress.prompt = prompt
        request.progress = progress
        if request.after is None:  # further answers to the same prompt are not reported
            progress.on_progress = request.on_progress
            progress.reach(progress.plan.cached)
        view.true_rows = min(rows, live.n)
        self.mirror(believed[: live.n])
        progress.drafts = self.drafts.begin(len(prompt))
        return rest

    # -- eval ------------------------------------------------------------------------------------

    def eval(self, tokens: Sequence[int]) -> Steps[None]:
        """Decode tokens behind the `n_tokens` of the view (see `Llama.eval`)."""
        if self.active is None:
            self._prepare()
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
        self.keep_tail()

    def _takes_one(self, tokens: Sequence[int]) -> bool:
        """A single token behind a sound sequence that equals the view."""
        n = self.live.n
        view = self.view
        if len(tokens) != 1 or view.n_tokens != n or view.logits_all:
            return False
        if n >= self._n_ctx or self.live.state.is_invalid:
            return False
        return type(tokens[0]) is int and 0 <= tokens[0] < self._n_vocab

    def bring(self) -> Steps[None]:
        """Restore the tokens of the view."""
        self._prepare()
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
        self.keep_tail()

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
        self.runner.store()
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
                work = self.begin_again(whole, self.view.true_rows if self.view.logits_all else None)
                self.mirror(whole[: self.live.n])

    def _decode(self, work: Tokens, progress: Progress | None) -> Steps[None]:
        first, view = self.live.n, self.view
        drafted = progress is not None and not progress.prefilling and len(work) > 1
        outputs: Outputs = "all" if view.logits_all or drafted else "last"
        rows: list[Logits] = []

        def note(start: int, end: int) -> None:
            self.mirror(work[start - first : end - first], start)
            if view.logits_all:
                view.take_rows(start, self.live.native.all_logits(end - start, self._n_vocab))
            if drafted:
                rows.append(self.live.native.all_logits(end - start, self._n_vocab).copy())
            if end == first + len(work):
                self.keep_tail(rows)

        yield from self.runner.decode(progress, work, outputs, note, alone=outputs == "all")

    def keep_tail(self, rows: Sequence[Logits] = ()) -> None:
        """Keep the last row of logits, or these, for the caller's thread to sample from."""
        view, row = self.view, self.live.row.logits()
        if rows:
            view.tail = rows[0] if len(rows) == 1 else np.concatenate(rows)
        else:
            view.tail = None if row is None else row[np.newaxis].copy()
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
            self.runner.store()
            live.cut(0)
        elif not live.state.holds(target):
            ahead = live.n > n and live.state.starts_with(target)
            if not (ahead and self.drafts.go_back(n)):
                self.begin_again(target)
        self.view.true_rows = min(self.view.true_rows, live.n)
        return target[live.n :]

    def begin_again(self, target: Tokens, reuse_limit: int | None = None) -> Tokens:
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
        things than integers: a text, a fraction, a list of prompts.
        """
        try:
            ids = np.asarray(tokens)  # without a dtype: numpy would parse texts as integers
        except ValueError:  # sequences of different lengths
            raise TypeError("token ids are a sequence of integers, not of sequences") from None
        if ids.ndim != 1:
            kind = type(tokens).__name__ if ids.ndim == 0 else "of sequences"
            raise TypeError(f"token ids are a sequence of integers, not {kind}")
        if ids.dtype.kind not in "iu":
            ids = np.asarray([index(token) for token in tokens], dtype=np.int64)
        ids = ids.astype(np.int64, copy=False)
        if ids.size and (ids.min() < 0 or ids.max() >= self._n_vocab):
            raise DecodeError(-1, f"token ids must lie in [0, {self._n_vocab}); llama_decode would return -1")
        return ids.astype(np.int32)

    def require_fit(self, n: int) -> None:
        """Raise ContextOverflow for more than `n_ctx` tokens."""
        if n > self._n_ctx:
            raise ContextOverflow(f"{n} tokens do not fit into the context window of {self._n_ctx}")


def _text(tokens: Tokens) -> Tokens:
    """Tokens to decode. Raises DecodeError for natively decoded content, which has no ids."""
    if bool((tokens < 0).any()):
        raise DecodeError(0, "natively decoded content is gone from context memory; decode it again")
    return tokens
