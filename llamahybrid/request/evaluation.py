"""Evaluation: what upstream's `eval()` and `generate()` ask for, done on the live sequence.

Upstream's own code, chat handlers and users call `eval()`; each finds the live sequence, brings it to the
`n_tokens` that upstream believes in, and decodes behind it. All of it is called inside a step of the gate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from operator import index
from typing import TypeVar

import numpy as np

from llamahybrid.capi.calls import Outputs
from llamahybrid.errors import ContextOverflow, DecodeError, LlamaHybridError, RequestSuperseded
from llamahybrid.memory.adoption import adopt_native, take_over
from llamahybrid.prompt_cache.base import Tokens
from llamahybrid.prompt_cache.nodes import common_prefix
from llamahybrid.request.arrays import UpstreamArrays
from llamahybrid.request.job import BatchLost
from llamahybrid.request.request import Request
from llamahybrid.request.runner import RequestRunner
from llamahybrid.speculation.drafts import Drafts

T = TypeVar("T")

NO_CELLS = 1
"""llama_decode: there is no room for the batch; it changed nothing."""


class Evaluation:
    """Tokens into context memory, cut where checkpoints are due, with upstream's arrays kept true."""

    def __init__(self, runner: RequestRunner, drafts: Drafts, arrays: UpstreamArrays) -> None:
        self.runner = runner
        self.drafts = drafts
        self.arrays = arrays
        self.active: Request | None = None
        """The request that is open."""
        self.handoff = False
        """A chat handler decoded content natively, and generates from it next."""
        self._live = runner.live
        self._n_vocab = runner.live.n_vocab
        self._n_ctx = runner.live.capacity

    def live_prefix(self, prompt: Tokens, salt: bytes = b"") -> int:
        """Tokens of a prompt of a request of this salt that are live."""
        serves = self._live.identity.serves(salt) and not self._live.state.is_invalid
        return common_prefix(self._live.tokens, prompt) if serves else 0

    def serve(self, salt: bytes) -> None:
        """Requests of this salt come next: upstream no longer believes in tokens of another one."""
        if self.arrays.serve(salt):
            self.handoff = False

    def claim(self) -> None:
        """What is live is of the salt that upstream's tokens are of, or nothing is; before it is used."""
        if not self._live.identity.serves(self.arrays.salt):
            self.runner.serve(self.arrays.salt)

    def take_over(self, other: Evaluation) -> None:
        """What is live in another slot is live here now, and upstream's arrays with it; of one salt."""
        other.claim()
        take_over(self._live, other.runner.live)
        saved = other.arrays.set_aside()
        self.arrays.bring_back(saved)
        self.arrays.bring_rows(saved)
        self.handoff = other.handoff
        other.reset()

    # -- a request -------------------------------------------------------------------------------

    def go_on_from(self, tokens: Tokens) -> None:
        """The next request answers content that was decoded natively, the end of `tokens`: it must be live.

        Raises RequestSuperseded where it is not.
        """
        if common_prefix(self._live.tokens, tokens) < len(tokens):  # image for image
            raise RequestSuperseded("another request came between the image and the answer to it")
        self.arrays.note_native(tokens)
        self.handoff = True

    def begin(self, prompt: Tokens, reset: bool) -> tuple[Request, Tokens]:
        """Open a request: plan the prompt and bring context memory to the restore point; what is left of it.

        `reset` False: the prompt continues the `n_tokens` that are there.

        Raises DecodeError where some of it was decoded natively and is live no more.
        """
        live, arrays = self._live, self.arrays
        self._notice_native()
        goes_on = self.handoff or not reset
        if not reset:
            prompt = np.concatenate([arrays.ids(), prompt])
        elif self.handoff:
            prompt = arrays.with_native(prompt)
        believed = prompt
        if goes_on and live.state.holds(prompt[: live.n]):  # what is disowned goes on all the same
            prompt = np.concatenate([live.tokens, prompt[live.n :]])
        self.handoff = False
        if len(prompt) == 0:
            raise ContextOverflow("the prompt is empty: there is nothing to sample from")
        self.require_fit(len(prompt))
        self._require_native(prompt)
        rows = min(arrays.true_rows, common_prefix(live.tokens, prompt))
        arrays.true_rows = 0
        request = self.runner.begin(prompt, rows if arrays.keeps_rows else None)
        rest = _text(prompt[live.n :])
        self.active = request
        arrays.true_rows = min(rows, live.n)
        self.mirror(believed[: live.n])
        request.drafts = self.drafts.begin(len(prompt))
        return request, rest

    def end(self) -> Request | None:
        """End the request that is open, keeping its progress; it."""
        request, self.active = self.active, None
        if request is not None:
            self.end_drafts(request)
            self.runner.end(request)
        return request

    def come_back(self, request: Request) -> None:
        """Memory is what it was when this request lost its place to another one."""
        self.claim()
        self.runner.check()
        self.decode(self.align(), None)
        total = request.plan.total
        self.drafts.resume(request.drafts, total, total + request.generated)

    def end_drafts(self, request: Request, goes_on: bool = False) -> None:
        """What was guessed and not handed out goes: the next request continues what the caller has seen.

        `goes_on`: so does this one, later, and decodes the last token that it handed out itself.
        """
        live, seen = self._live, request.plan.total + request.generated
        self.drafts.confirm(seen, over=True)
        keep = seen - goes_on
        if not goes_on and request.generated and live.n >= seen and live.tokens[seen - 1] != request.last:
            keep -= 1  # the last token handed out was sampled against a guess, which was wrong
        try:
            if live.n > keep and not live.state.is_invalid and not live.state.opaque:
                certain = live.tokens[:keep].copy()
                if self.drafts.go_back(keep):
                    if live.n < keep:  # directly: a cancelled request keeps its progress, too
                        live.decode(certain[live.n :], "last")
                        live.settle()
                    self.mirror(certain)
        finally:
            self.drafts.end()

    # -- eval ------------------------------------------------------------------------------------

    def eval(self, tokens: Sequence[int]) -> None:
        """Decode tokens behind the `n_tokens` that are there (see `Llama.eval`)."""
        if self.active is None:
            self.claim()
            self._notice_native()
            self.runner.check()
        work = np.concatenate([self.align(), self.checked(tokens)])
        self.require_fit(self._live.n + len(work))
        request = self.active
        if request is not None and not request.prefilling:
            self._decode_answer(work, request, unsure=len(tokens) - 1)
            return
        self.decode(work, request)
        if request is None or not request.prefilling:
            return
        if not self.runner.prompt_done(request):
            prompt = self.arrays.ids()
            self._live.empty()
            self.decode(prompt, request)
        self.drafts.policy.prefilled(request.plan.to_decode, request.prefill_seconds)

    def with_logits(self, work: Callable[[], T]) -> T:
        """`work()` with the logits of the last token, whatever others decoded meanwhile.

        Raises LlamaHybridError where there is none, AssertionError where there is no token.
        """
        if not self.arrays.n_tokens:
            raise AssertionError("there are no tokens to sample behind: eval some first")  # as upstream
        self._bring_logits()
        if self._live.row.logits() is None:  # the row there is another request's
            raise LlamaHybridError("there are no logits to sample from: eval a token first")
        return work()

    def bring(self) -> None:
        """Make context memory what upstream believes in, whatever came between."""
        self.claim()
        self._notice_native()
        self.runner.check()
        self.decode(self.align(), None)

    def _bring_logits(self) -> None:
        self.bring()
        ids = self.arrays.ids()
        if len(ids) and self._live.row.logits() is None:
            self.runner.begin(ids)  # stored logits, or all but the last token
            self.decode(ids[self._live.n :], None)

    def hold(self, tokens: Tokens) -> None:
        """Make context memory hold just these tokens, whatever it holds, and store its state."""
        live = self._live
        self.claim()
        live.shared.lose_all()
        live.empty()
        self.handoff, self.arrays.true_rows = False, 0
        if len(tokens):  # as for a prompt of one token more: nobody samples behind these
            self.runner.begin(np.append(tokens, tokens[-1:]), len(tokens))
        self.mirror(live.tokens)
        self.decode(tokens[live.n :], None)
        if live.n:
            self.runner.save_tip()

    def append(self, tokens: Sequence[int]) -> bool:
        """The hot path of `eval`: one generated token behind a sequence as it should be; False if it is not.

        After each token of a large model all of this runs from a cold cache: every call counts.
        """
        request, n = self.active, self._live.n
        if request is None or request.prefilling or len(tokens) != 1 or not self.arrays.takes_one(n):
            return False
        token = tokens[0]
        if n >= self._n_ctx or not 0 <= token < self._n_vocab:
            return False
        self.runner.before_token(request)
        try:
            self.runner.append(token)
        except BatchLost:
            return False
        self.arrays.append(token, n)
        return True

    def _decode_answer(self, work: Tokens, request: Request, unsure: int) -> None:
        """Decode tokens of the answer, the last `unsure` of which are guesses that may have to go again."""
        self.runner.before_token(request)
        self.drafts.prepare(unsure, request.checkpoints)
        clock = time.perf_counter()
        self.decode(work, request)
        self.drafts.policy.decoded(len(work), time.perf_counter() - clock)

    def decode(self, work: Tokens, request: Request | None) -> None:
        """Decode `work` at the live sequence's end, keeping upstream's arrays true batch by batch.

        Raises DecodeError where it, or what it follows on, was decoded natively and is live no more, and
        ContextOverflow where cells run out before positions do: images of M-RoPE models take more of them.
        """
        while len(work):
            first = self._live.n
            try:
                self._decode(_text(work), request)
                return
            except DecodeError as error:
                if error.code != NO_CELLS:
                    raise
                raise ContextOverflow(f"the context window of {self._n_ctx} has no cells left") from error
            except BatchLost:  # others had the buffers of all zeroed while this one waited
                whole = np.concatenate([self.arrays.ids()[:first], work])
                work = self._begin_again(whole, self.arrays.true_rows if self.arrays.keeps_rows else None)
                self.mirror(whole[: self._live.n])

    def _decode(self, work: Tokens, request: Request | None) -> None:
        first, arrays = self._live.n, self.arrays
        drafted = request is not None and not request.prefilling and len(work) > 1
        outputs: Outputs = "all" if arrays.keeps_rows or drafted else "last"
        for start, end in self.runner.decode(request, work, outputs):
            self.mirror(work[start - first : end - first], start)
            if arrays.keeps_rows:
                arrays.take_rows(start, self._live.native.all_logits(end - start, self._n_vocab))

    def mirror(self, ids: Tokens, start: int = 0) -> None:
        """Upstream's arrays say what the live sequence says: [start, ...) is `ids`."""
        self.arrays.mirror(ids, start, self._live.state.tip_logits)

    def align(self) -> Tokens:
        """Make context memory a prefix of what upstream believes in; what of that is still to be decoded."""
        live = self._live
        target = self.arrays.ids()
        n = len(target)
        if n == 0:
            self.runner.store_attention()
            live.cut(0)
        elif not live.state.holds(target):
            ahead = live.n > n and live.state.starts_with(target)
            if not (ahead and self.drafts.go_back(n)):
                self._begin_again(target)
        self.arrays.true_rows = min(self.arrays.true_rows, live.n)
        return target[live.n :]

    def _begin_again(self, target: Tokens, reuse_limit: int | None = None) -> Tokens:
        """Make context memory a prefix of `target`, whatever it holds; what of that is still to be decoded.

        Raises DecodeError where some of `target` was decoded natively and is live no more.
        """
        self._require_native(target)
        self.runner.begin(target, reuse_limit)
        return _text(target[self._live.n :])

    def _require_native(self, target: Tokens) -> None:
        """Raise DecodeError where some of `target` was decoded natively and is live no more."""
        _text(target[common_prefix(self._live.tokens, target) :])

    def _notice_native(self) -> None:
        """Take note of content that a chat handler decoded natively and counted in `n_tokens`."""
        live, n = self._live, self.arrays.n_tokens
        if n > live.n and live.touched_outside() and adopt_native(live, n):
            self.arrays.note_native(live.tokens)
            self.handoff = True
            self.arrays.true_rows = 0

    def checked(self, tokens: Sequence[int]) -> Tokens:
        """The ids as an array.

        Raises DecodeError, as the library would, for one outside the vocabulary, and TypeError for what is
        none: a text, a number with a fraction.
        """
        ids = np.asarray(tokens)  # whatever its kind: asked for integers, numpy makes them of texts
        if ids.ndim == 0:
            raise TypeError(f"token ids are a sequence of integers, not {type(tokens).__name__}")
        if ids.dtype.kind not in "iu":
            ids = np.asarray([index(token) for token in tokens], dtype=np.int64)
        ids = ids.astype(np.int64, copy=False).reshape(-1)
        if ids.size and (ids.min() < 0 or ids.max() >= self._n_vocab):
            raise DecodeError(-1, f"token ids must lie in [0, {self._n_vocab}); llama_decode would return -1")
        return ids.astype(np.int32)

    def require_fit(self, n: int) -> None:
        """Raise ContextOverflow where so many tokens are more than the context takes."""
        if n > self._n_ctx:
            raise ContextOverflow(f"{n} tokens do not fit into the context window of {self._n_ctx}")

    def reset(self) -> None:
        """Forget the live sequence."""
        self.arrays.reset()
        self.handoff = False
        self.runner.store_attention()
        self._live.empty()


def _text(tokens: Tokens) -> Tokens:
    """Tokens to be decoded. Raises DecodeError where they were decoded natively, which has no ids."""
    if bool((tokens < 0).any()):
        raise DecodeError(0, "natively decoded content is gone from context memory; decode it again")
    return tokens
