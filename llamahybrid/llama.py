"""Llama: the drop-in for `llama_cpp.Llama` whose prompts reuse what was decoded before.

Thin: plan, restore, then upstream's own `generate()`, whose `eval()` calls come back here and are cut
where checkpoints are due. With `prompt_cache=False`, for embeddings, encoders and vocabularies without a
model, everything is upstream's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaDraftModel

from llamahybrid.capi.shim import library
from llamahybrid.decoding import DecodingLlama
from llamahybrid.errors import (
    ContextOverflow,
    LlamaHybridError,
    RequestCancelled,
    RequestSuperseded,
    SnapshotError,
)
from llamahybrid.memory.adapters import follow
from llamahybrid.memory.context import GuardedContext
from llamahybrid.memory.costs import CostMeter
from llamahybrid.memory.fingerprint import Computation, settings
from llamahybrid.memory.model_files import ModelFiles
from llamahybrid.memory.profile import probe
from llamahybrid.memory.remembered_costs import RememberedCosts
from llamahybrid.memory.sequence import LiveSequence
from llamahybrid.memory.snapshot import HEADER_BYTES
from llamahybrid.memory.state import common_prefix
from llamahybrid.prompt_cache import PromptCache
from llamahybrid.prompt_cache.base import Costs, Tokens
from llamahybrid.request.boundaries import Boundaries
from llamahybrid.request.finalisers import collecting
from llamahybrid.request.gate import Ticket
from llamahybrid.request.report import RequestReport
from llamahybrid.request.request import Request
from llamahybrid.request.requests import RequestHandle, Requests, made_with
from llamahybrid.request.runner import RequestRunner
from llamahybrid.saved_state import UsefulStates, adopt_state, check_state, fit_scores, seal_state
from llamahybrid.speculation.drafts import Drafts

_GENERATE = inspect.signature(llama_cpp.Llama.generate)
_COMPLETE = inspect.signature(llama_cpp.Llama._create_completion)


class Llama(DecodingLlama):
    """`llama_cpp.Llama` that decodes only what is new, for every kind of context memory.

    Takes every argument that upstream takes, and:

    `prompt_cache`: True keeps checkpoints in RAM within the default budget, a `PromptCache` uses that one,
    False is upstream's behaviour. One with a folder names states by the model's content: its files are read
    in full once, while the model is loaded, and again only after they have changed.
    `paging`: attention passes through a second sequence into the cache and back, so that other conversations
    find theirs again. It costs one more recurrent state of memory; False saves that.
    `draft_planes`: rollback planes, states of the last tokens that a hybrid model keeps so that wrong drafts
    can be taken back. None: as many as `draft_model.num_pred_tokens` where layers are offloaded, none on a
    CPU, where a snapshot costs less. The patched engine makes them when they pay, and gives them back.
    `cache_salt`: see the property of that name.
    `explain`: `last_request.reason` also spells the token that a prompt parts from, which may be another
    user's where a cache is shared.
    `wait`: what a second thread gets while a request runs: True waits, False raises `Busy`, seconds do both.
    A generator that nobody advances for a second makes room; it goes on, with the same text, when it is.

    `on_request`, if set, is called with the `RequestReport` of every finished request.
    """

    def __init__(
        self,
        model_path: str,
        *,
        prompt_cache: bool | PromptCache = True,
        wait: bool | float = True,
        paging: bool = True,
        draft_planes: int | None = None,
        cache_salt: str = "",
        explain: bool = False,
        **kwargs: Any,
    ) -> None:
        self._prompt_cache_argument = prompt_cache
        self._explain = explain
        self._paging = paging
        room = min(kwargs.get("n_batch", 512), kwargs.get("n_ubatch", 512))  # the library dies on less
        self._sequences = 2 if paging and prompt_cache is not False and room >= 2 else 1
        if draft_planes is None:
            draft_planes = 0
            if kwargs.get("n_gpu_layers") and "llama_set_n_rs_seq" not in library().optional:
                draft_planes = getattr(kwargs.get("draft_model"), "num_pred_tokens", 0)
        self._planes = 0 if prompt_cache is False else max(0, min(draft_planes, room - 2))  # it dies on more
        self.runner: RequestRunner | None = None
        self._drafts: Drafts | None = None
        self._draft_model: LlamaDraftModel | None = None
        self._score_rows = 0
        self._handoff = False
        self._native_from: int | None = None
        self._upstream_cache: Any = None
        self.requests = Requests(self, wait)
        self._gate = self.requests.gate
        self._all_rows = False
        self.on_request: Callable[[RequestReport], None] | None = None
        self._cache_salt = cache_salt
        if prompt_cache is False or kwargs.get("vocab_only") or kwargs.get("embedding"):
            super().__init__(model_path, **kwargs)
            return
        cache = prompt_cache if isinstance(prompt_cache, PromptCache) else PromptCache()
        files = ModelFiles(model_path, by_content=cache.leaves_process)
        try:
            super().__init__(model_path, **kwargs)
            # With a draft model upstream keeps the logits of every token, which only logprobs need.
            self._all_rows = self._logits_all = bool(kwargs.get("logits_all", False))
            self._keep(cache, files)
        except BaseException:
            files.abandon()
            raise

    def _keep(self, cache: PromptCache, files: ModelFiles) -> None:
        """Start keeping state: probe the memory, guard the context, repair upstream's array sizes."""
        profile = probe(self._ctx, bool(self.context_params.swa_full))
        if not profile.has_memory:
            return
        unmapped = (llama_cpp.LLAMA_LOAD_MODE_NONE, llama_cpp.LLAMA_LOAD_MODE_MLOCK)
        files.loaded(mapped=self.model_params.load_mode not in unmapped)
        guarded = GuardedContext.guard(self._ctx)
        guarded.adapters = follow(guarded, self._lora_adapter, self.lora_scale)
        made_with = settings(self.model_params, self.context_params)
        computation = Computation(files, made_with, guarded.adapters, self._cache_salt)
        mark = computation.fingerprint
        live = LiveSequence(guarded, profile, fingerprint=mark, capacity=self._n_ctx, n_vocab=self._n_vocab)
        live.computation = computation
        boundaries = Boundaries(self._model.vocab, self._n_vocab)
        remembered = RememberedCosts(mark, self._cost_context())
        known = remembered.load() or Costs(token_seconds=profile.token_seconds)
        record = HEADER_BYTES + profile.snapshot_bytes if profile.snapshot_bytes else 0
        meter = CostMeter(self.n_batch, replace(known, snapshot_bytes=record))
        self.runner = RequestRunner(live, cache, boundaries, meter, self._gate, self.n_batch, remembered)
        self._drafts = Drafts(live, meter, self.n_batch, int(self.context_params.n_ubatch))
        self._drafts.model = self._draft_model
        guarded.live = live
        # The library pads n_ctx to a multiple of 256 and takes that many tokens (llama.py:483).
        self.input_ids = np.zeros(self._n_ctx, dtype=np.intc)
        if self._logits_all:
            self._make_scores()

    def _keep_rows(self, rows: bool) -> None:
        """Keep the logits of every token from here on, as upstream does with a draft model; or as told."""
        self._logits_all = self._all_rows or rows
        if rows:
            self._make_scores()

    def _cost_context(self) -> tuple[int, ...]:
        """What costs depend on besides what is in the fingerprint."""
        params = self.context_params
        layers = int(self.model_params.n_gpu_layers)
        return int(params.n_threads), int(params.n_threads_batch), self.n_batch, int(params.n_ubatch), layers

    def _make_scores(self) -> None:
        if len(self.scores) < self._n_ctx:
            self.scores: Any = np.zeros((self._n_ctx, self._n_vocab), dtype=np.single)

    @property
    def draft_model(self) -> LlamaDraftModel | None:
        """The draft model that was given; to the request that runs, `Drafts`, which asks it for what pays."""
        drafting = self._drafts is not None and self._draft_model is not None and self._gate.inside
        return self._drafts if drafting else self._draft_model

    @draft_model.setter
    def draft_model(self, model: LlamaDraftModel | None) -> None:
        self._draft_model = model
        if self._drafts is not None:
            self._drafts.model = model

    @property
    def context_params(self) -> Any:
        """The `llama_context_params` of this model's context."""
        return self._context_params

    @context_params.setter
    def context_params(self, params: Any) -> None:
        # Upstream assigns the defaults here and fills in its own arguments afterwards (llama.py:342).
        params.n_rs_seq = self._planes
        if self._sequences > 1:
            params.n_seq_max = self._sequences
            params.kv_unified = True
        self._context_params = params

    # -- what happened ---------------------------------------------------------------------------

    @property
    def prompt_cache(self) -> PromptCache | None:
        """The cache this model keeps its checkpoints in; None where upstream's behaviour was asked for."""
        return self.runner.cache if self.runner else None

    @property
    def last_request(self) -> RequestReport | None:
        """What the last request (or the running one, so far) decoded, reused and why."""
        return self.requests.last.report(self._spell, explain=self._explain) if self.requests.last else None

    def cancel(self, request: RequestHandle | None = None) -> None:
        """End the request that runs now, or those of a handle; from any thread, or a signal handler.

        A completion ends with the text so far and `finish_reason` "cancelled"; `generate` and `eval` raise
        RequestCancelled. On a CPU a prompt stops inside a batch, elsewhere between batches; an answer stops
        between two tokens. What was decoded is kept. Needs the prompt cache (`prompt_cache` not False).
        """
        if request is None:
            self._gate.cancel()
        else:
            request.cancel()

    def request(self) -> AbstractContextManager[RequestHandle]:
        """A handle for the requests made inside `with llm.request() as handle:`, to cancel just them.

        `handle.cancel()` from any thread: where several users share a model, "the request that runs now" may
        be somebody else's. A stream made inside belongs to it wherever it is advanced.
        """
        return made_with(RequestHandle(self._gate))

    def warm(self, prompt: str | Sequence[int] | Sequence[dict[str, Any]]) -> RequestReport:
        """Decode a prompt ahead of time, so that whatever begins with it starts there; what it took.

        `prompt`: text, token ids, or chat messages (the model's chat format is applied to them).
        """
        if isinstance(prompt, str):
            prompt = self.tokenize(prompt.encode("utf-8"), special=True)
        words: list[Any] = list(prompt)
        if words and isinstance(words[0], dict):
            self.create_chat_completion(words, max_tokens=1)
        else:
            stream = self.generate(words, temp=0.0)
            next(stream)
            stream.close()
        if self.last_request is None:
            raise LlamaHybridError("there is no prompt cache to warm; leave out prompt_cache=False")
        return self.last_request

    # -- generating ------------------------------------------------------------------------------

    def generate(
        self, tokens: Sequence[int], *args: Any, **kwargs: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        """Generate token ids from a prompt; parameters and results as `llama_cpp.Llama.generate`.

        Another request may take its place between two tokens (see `wait`); it goes on when it is advanced.
        Raises ContextOverflow when the prompt does not fit, DecodeError when the library fails,
        RequestCancelled after `cancel()`, Busy (see `wait`), ModelClosed, and RequestSuperseded where it
        lost its place and cannot go on, because an image in its prompt is gone.
        """
        if self.runner is None:
            return super().generate(tokens, *args, **kwargs)  # type: ignore[no-any-return]
        options = dict(_GENERATE.bind(self, tokens, *args, **kwargs).arguments)
        del options["self"], options["tokens"]
        reset = options.pop("reset", True)
        return self._driven(self.requests.ticket(), lambda: self._generate(tokens, reset, options))

    def _create_completion(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Upstream's completion as one request, with the tokens that were cached added to `usage`."""
        if self.runner is None:
            return super()._create_completion(*args, **kwargs)  # type: ignore[no-any-return]
        options = dict(_COMPLETE.bind(self, *args, **kwargs).arguments)
        del options["self"]
        rows = options.get("logprobs") is not None and self._draft_model is not None
        ticket = self.requests.ticket(completing=True, rows=rows)
        if self._handoff:
            ticket.rests_on = self.runner.live.tokens.copy()
        return self._completion(ticket, options)

    def create_chat_completion(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream's; a chat handler of one's own, which decodes by itself, has the model to itself."""
        create = super().create_chat_completion
        if self.runner is None or self.chat_handler is None or self._gate.nested():
            return create(*args, **kwargs)
        rows = kwargs.get("logprobs") is not None and self._draft_model is not None
        ticket = self.requests.ticket(completing=True, rows=rows)
        return self._gate.alone(lambda: create(*args, **kwargs), ticket=ticket)

    def _completion(self, ticket: Ticket, options: dict[str, Any]) -> Generator[Any, Any, None]:
        """A completion, with its end told as it was.

        A cancelled one ends its inner `generate()`, which upstream reads as "length" and without its text
        (llama.py:1392): a stopping criterion makes it take the text, and "cancelled" is put in here.
        """
        if self._gate.nested():
            ticket = self._gate.current or ticket
        criteria = options.get("stopping_criteria")

        def stopped(ids: Any, scores: Any) -> bool:
            ended = ticket.request is not None and ticket.request.cancelled
            return ended or bool(criteria is not None and criteria(ids, scores))

        options["stopping_criteria"] = llama_cpp.StoppingCriteriaList([stopped])
        start = super()._create_completion
        for item in self._driven(ticket, lambda: start(**options)):
            request: Request | None = ticket.request
            if item.get("usage") and request is not None:
                item["usage"]["prompt_tokens_details"] = {"cached_tokens": request.plan.cached}
            if request is not None and request.cancelled:
                for choice in item["choices"]:
                    choice["finish_reason"] = choice["finish_reason"] and "cancelled"
            yield item

    def _driven(
        self, ticket: Ticket, start: Callable[[], Generator[Any, Any, None]]
    ) -> Generator[Any, Any, None]:
        """Run a generator as a request at the gate; as part of the running one when called inside it."""
        if self._gate.nested():
            yield from start()
        else:
            yield from self.requests.drive(ticket, start)

    def _generate(
        self, tokens: Sequence[int], reset: bool, options: dict[str, Any]
    ) -> Generator[int, Sequence[int] | None, None]:
        """`generate` inside its request."""
        request, rest = self._begin(self._checked(tokens), reset)
        try:
            inner = super().generate(rest.tolist(), reset=False, **options)
            sent: Sequence[int] | None = None
            while True:
                try:
                    self._gate.check()
                    token = inner.send(sent)
                except StopIteration:
                    return
                except RequestCancelled:
                    request.cancelled = True
                    if self._gate.completing:
                        return
                    raise
                request.hand_out(token)
                sent = yield token
                request.sent |= sent is not None
        finally:
            # Given up between two steps, it is ended by the gate; a completion ends it inside one.
            if self.requests.active is request and self._gate.inside and not collecting():
                self._retire()

    def _begin(self, prompt: Tokens, reset: bool) -> tuple[Request, Tokens]:
        """Open a request: plan the prompt and bring context memory to the restore point; what is left of it.

        `reset` False: the prompt continues the `n_tokens` that are there.
        """
        assert self.runner is not None
        live, current = self.runner.live, self._gate.current
        self._retire()
        if current is not None and current.rests_on is not None:
            if not np.array_equal(live.tokens, current.rests_on):  # image for image
                raise RequestSuperseded("another request came between the image and the answer to it")
            current.rests_on, self._handoff = None, True
        self._notice_native()
        there = np.asarray(self.input_ids[: self.n_tokens], dtype=np.int32)
        if not reset:
            prompt = np.concatenate([there, prompt])
        if live.n and live.opaque and (self._handoff or not reset) and live.holds(prompt[: live.n]):
            prompt = np.concatenate([live.tokens, prompt[live.n :]])
        self._handoff = False
        if len(prompt) == 0:
            raise ContextOverflow("the prompt is empty: there is nothing to sample from")
        self._fits(len(prompt))
        rows = min(self._score_rows, common_prefix(live.tokens, prompt))
        self._score_rows = 0
        request = self.requests.last = self.requests.active = self.runner.begin(
            prompt, rows if self._logits_all else None
        )
        self._score_rows = min(rows, live.n)
        if self._gate.current is not None:
            self._gate.current.request = request
        if not live.opaque:
            self._native_from = None
        self._settle(prompt[: live.n])
        assert self._drafts is not None
        request.drafts = self._drafts.begin(len(prompt))
        return request, prompt[live.n :]

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the model and its context; what waits to be written to disk is written first.

        A request that runs is cancelled, and its step waited for; later ones raise ModelClosed.
        """
        if self.runner is None:
            super().close()
            return
        self._gate.close(super().close)
        self.runner.cache.flush()

    def __del__(self) -> None:
        # Not `close`: a garbage collection may come while this very thread holds the cache's lock.
        super().close()

    # -- state -----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget the current sequence; what the prompt cache knows stays."""
        if self.runner is None:
            super().reset()
            return
        if self._gate.closed:
            self.n_tokens = 0
        else:
            self._gate.alone(self._reset)

    def _reset(self) -> None:
        assert self.runner is not None
        self.n_tokens = 0
        self._requires_eval = True
        self._handoff = False
        self._native_from = None
        self.runner.live.empty()

    @property
    def cache_salt(self) -> str:
        """Names what computes, beside what is seen of it: states of one salt are never used under another.

        Seen are the model's content, its parameters and the engine, and adapters, control vectors and modes
        set with llama_cpp's functions. Set another salt when numbers change in any other way (a C call of
        your own, weights changed in memory); set it back, and what was kept under the old one serves again.
        """
        return self._cache_salt

    @cache_salt.setter
    def cache_salt(self, salt: str) -> None:
        if self.runner is None or self._gate.closed:
            self._cache_salt = salt
            return
        self._gate.alone(self._set_salt, salt)

    def _set_salt(self, salt: str) -> None:
        assert self.runner is not None
        self._retire()
        self._cache_salt = salt
        live = self.runner.live
        assert live.computation is not None
        live.computed_by(replace(live.computation, salt=salt))

    def save_state(self) -> llama_cpp.LlamaState:
        """The whole context as upstream's `LlamaState`, sealed so that `load_state` can tell damage."""
        if self.runner is None:
            return super().save_state()
        return self._gate.alone(self._save_state)

    def _save_state(self) -> llama_cpp.LlamaState:
        assert self.runner is not None
        self._decode(self._align(), None)
        return seal_state(super().save_state(), self.runner.live, self._score_rows)

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """Make a saved state the current one; works for states that upstream saved, too.

        Raises SnapshotError (nothing changed) when a sealed state is damaged or of another model, and
        RuntimeError when the library does not take it.
        """
        if self.runner is None:
            super().load_state(state)
            return
        self._gate.alone(self._load_useful, state)

    def _load_useful(self, state: llama_cpp.LlamaState) -> None:
        assert self.runner is not None
        self._retire()
        try:
            self._load_state(state, self.runner)
        except (SnapshotError, RuntimeError):
            if not (isinstance(self.cache, UsefulStates) and self.cache.take_back(state)):
                raise

    def _load_state(self, state: llama_cpp.LlamaState, runner: RequestRunner) -> None:
        live = runner.live
        check_state(state, live)
        state, rows = fit_scores(state, len(self.scores))
        live.distrust()
        self._score_rows = 0
        try:
            super().load_state(state)
        except BaseException:
            self.n_tokens = 0
            raise
        finally:
            self.input_ids = np.resize(self.input_ids, self._n_ctx).astype(np.intc)
        self._score_rows = rows if self._logits_all else 0
        if adopt_state(state, live) and live.n:
            logits = live.logits()
            self._requires_eval = logits is None
            if live.profile.needs_checkpoints:
                runner.checkpoint(None, None if logits is None else logits.copy())

    @property
    def cache(self) -> Any:
        """Upstream's whole-state cache, if one was set; consulted only where it knows more than we do."""
        return self._upstream_cache

    @cache.setter
    def cache(self, cache: Any) -> None:
        wanted = cache is not None and self.runner is not None
        self._upstream_cache = UsefulStates(cache, self._depth, self._cuttable) if wanted else cache

    def _depth(self, tokens: Tokens) -> int:
        """Tokens of a prompt that a request would not have to decode now."""
        assert self.runner is not None
        return self.runner.depth(tokens)

    @property
    def _cuttable(self) -> bool:
        assert self.runner is not None
        return not self.runner.live.profile.needs_checkpoints

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {
            **state,
            "prompt_cache": self._prompt_cache_argument,
            "wait": self._gate.wait,
            "paging": self._paging,
            "draft_planes": self._planes,
            "cache_salt": self._cache_salt,
            "explain": self._explain,
        }
