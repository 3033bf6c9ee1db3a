"""DecodingLlama: tokens into context memory, cut where checkpoints are due, with upstream's arrays kept true.

Upstream's own code, chat handlers and users call `eval()`; each finds the live sequence, brings it to the
`n_tokens` that upstream believes in, and decodes behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp as native

from llamahybrid.capi.calls import Outputs
from llamahybrid.errors import ContextOverflow, DecodeError
from llamahybrid.prompt_cache.base import Tokens
from llamahybrid.request.gate import RequestGate
from llamahybrid.request.report import RequestReport
from llamahybrid.request.request import Request
from llamahybrid.request.requests import Requests
from llamahybrid.request.runner import RequestRunner
from llamahybrid.speculation.drafts import Drafts


class DecodingLlama(llama_cpp.Llama):  # type: ignore[misc]
    """`llama_cpp.Llama` whose `eval()` works on a live sequence."""

    n_tokens: int
    on_request: Callable[[RequestReport], None] | None
    runner: RequestRunner | None
    requests: Requests
    _gate: RequestGate
    _drafts: Drafts | None
    _explain: bool
    _score_rows: int
    """Rows of `scores` that are those of the live tokens."""
    _handoff: bool
    """A chat handler decoded content natively, and generates from it next."""
    _native_from: int | None
    """Where natively decoded content starts."""

    def eval(self, tokens: Sequence[int]) -> None:
        """Decode tokens behind the `n_tokens` that are there, in native batches of at most `n_batch`.

        Raises ContextOverflow before anything is decoded when they do not fit, DecodeError when the
        library fails; the state is sound either way.
        """
        if self.runner is None:
            super().eval(tokens)
            return
        if self._gate.inside and not self._gate.telling and self._append(tokens):
            return
        self._gate.alone(self._eval, tokens)

    def _eval(self, tokens: Sequence[int]) -> None:
        """`eval` inside a step."""
        assert self.runner is not None
        if self.requests.active is None:
            self._notice_native()
            self.runner.check()
        work = np.concatenate([self._align(), self._checked(tokens)])
        self._fits(self.runner.live.n + len(work))
        request = self.requests.active
        if request is not None and not request.prefilling:
            self._decode_answer(work, request, unsure=len(tokens) - 1)
            return
        self._decode(work, request)
        if request is None or not request.prefilling:
            return
        if not self.runner.prompt_done(request):
            prompt = self.input_ids[: self.n_tokens].astype(np.int32)
            self.runner.live.empty()
            self._decode(prompt, request)
        if self._drafts is not None:
            self._drafts.pace.prefilled(request.plan.left, request.prefill_seconds)

    def _decode_answer(self, work: Tokens, request: Request, unsure: int) -> None:
        """Decode tokens of the answer, the last `unsure` of which are guesses that may have to go again."""
        assert self.runner is not None
        assert self._drafts is not None
        self.runner.before_token(request)
        self._drafts.prepare(len(work), unsure, request.checkpoints)
        clock = time.perf_counter()
        self._decode(work, request)
        self._drafts.decoded(len(work), time.perf_counter() - clock)

    def _append(self, tokens: Sequence[int]) -> bool:
        """The hot path of `eval`: one generated token behind a sequence as it should be; False if it is not.

        After each token of a large model all of this runs from a cold cache: every call counts.
        """
        request, runner = self.requests.active, self.runner
        if request is None or request.prefilling or len(tokens) != 1 or self._logits_all or runner is None:
            return False
        token, n = tokens[0], runner.live.n
        if self.n_tokens != n or n >= self._n_ctx or not 0 <= token < self._n_vocab:
            return False
        runner.before_token(request)
        runner.append(token)
        self.input_ids[n] = token
        self.n_tokens = n + 1
        self._requires_eval = False
        return True

    def _decode(self, work: Tokens, request: Request | None) -> None:
        """Decode `work` at the live sequence's end, keeping upstream's arrays true batch by batch."""
        assert self.runner is not None
        first = self.runner.live.n
        drafted = request is not None and not request.prefilling and len(work) > 1
        outputs: Outputs = "all" if self._logits_all or drafted else "last"
        for start, end in self.runner.decode(request, work, outputs) if len(work) else ():
            self._settle(work[start - first : end - first], start)
            if self._logits_all:
                rows = native.llama_get_logits(self._ctx.ctx)
                self.scores[start:end] = np.ctypeslib.as_array(rows, shape=(end - start, self._n_vocab))
                if self._score_rows >= start:
                    self._score_rows = end

    def _settle(self, ids: Tokens, start: int = 0) -> None:
        """Upstream's arrays say what the live sequence says: [start, ...) is `ids`, opaque ones left out."""
        end = start + len(ids)
        np.copyto(self.input_ids[start:end], ids, where=ids >= 0)
        self.n_tokens = end
        self._score_rows = min(self._score_rows, end) if start == 0 else self._score_rows
        assert self.runner is not None
        self._requires_eval = not self.runner.live.tip_logits

    def _align(self) -> Tokens:
        """Make context memory a prefix of `input_ids[:n_tokens]`; what of it is still to be decoded."""
        assert self.runner is not None
        live = self.runner.live
        target = np.asarray(self.input_ids[: self.n_tokens], dtype=np.int32)
        n = len(target)
        if n == 0:
            live.cut(0)
        elif not live.holds(target):
            ahead = live.n > n and live.starts_with(target)
            if not (ahead and self._drafts is not None and self._drafts.go_back(n)):
                if self._native_from is not None and n > self._native_from:
                    raise DecodeError(
                        0, "natively decoded content is gone from context memory; decode it again"
                    )
                self.runner.begin(target)
        self._score_rows = min(self._score_rows, live.n)
        return target[live.n :]

    def _notice_native(self) -> None:
        """Take note of content that a chat handler decoded natively and counted in `n_tokens`."""
        assert self.runner is not None
        live = self.runner.live
        start = live.n
        if self.n_tokens > start and live.touched_outside() and live.adopt_native(self.n_tokens):
            self._native_from = start if self._native_from is None else min(start, self._native_from)
            self._handoff = True
            self._score_rows = 0

    def _checked(self, tokens: Sequence[int]) -> Tokens:
        """The ids as an array. Raises DecodeError, as the library would, for one outside the vocabulary."""
        ids = np.asarray(tokens, dtype=np.int64).reshape(-1)
        if ids.size and (ids.min() < 0 or ids.max() >= self._n_vocab):
            raise DecodeError(-1, f"token ids must lie in [0, {self._n_vocab}); llama_decode would return -1")
        return ids.astype(np.int32)

    def _fits(self, n: int) -> None:
        if n > self._n_ctx:
            raise ContextOverflow(f"{n} tokens do not fit into the context window of {self._n_ctx}")

    def _retire(self) -> None:
        """End the request that is open, keeping its progress."""
        request, self.requests.active = self.requests.active, None
        if request is None or self.runner is None or self._ctx.ctx is None:
            return
        self._end_drafts(request)
        self.runner.end(request)
        self._tell(request)

    def _tell(self, request: Request | None) -> None:
        """Report a request that is over."""
        if request is None or self.on_request is None:
            return
        self._gate.telling = True
        try:
            self.on_request(request.report(self._spell, explain=self._explain))
        finally:
            self._gate.telling = False

    def _come_back(self, request: Request) -> None:
        """Memory is what it was when this request lost its place to another one."""
        assert self.runner is not None
        assert self._drafts is not None
        self.runner.check()
        self._decode(self._align(), None)
        self._drafts.resume(request.drafts, request.plan.total, request.plan.total + request.generated)

    def _end_drafts(self, request: Request, goes_on: bool = False) -> None:
        """What was guessed and not handed out goes: the next request continues what the caller has seen.

        `goes_on`: so does this one, later, and decodes the last token that it handed out itself.
        """
        assert self.runner is not None
        assert self._drafts is not None
        live, seen = self.runner.live, request.plan.total + request.generated
        self._drafts.settle(seen, over=True)
        keep = seen - goes_on
        if not goes_on and request.generated and live.n >= seen and live.tokens[seen - 1] != request.last:
            keep -= 1  # the last token handed out was sampled against a guess, which was wrong
        try:
            if live.n > keep and not live.is_junk and not live.opaque:
                certain = live.tokens[:keep].copy()
                if self._drafts.go_back(keep):
                    if live.n < keep:  # directly: a cancelled request keeps its progress, too
                        live.decode(certain[live.n :], "last")
                        live.recount()
                    self._settle(certain)
        finally:
            self._drafts.end()

    def _spell(self, token: int) -> str:
        """The text of one token; its id where it has none (what was decoded natively, a closed model)."""
        if not 0 <= token < self._n_vocab or self._gate.closed:
            return str(token)
        text: bytes = self._model.detokenize([token], special=True)
        return text.decode("utf-8", errors="replace")

    @property
    def _scores(self) -> Any:
        # A criterion is shown the last row even where a request was cancelled before its first batch.
        return self.scores[: max(1, self.n_tokens), :]
