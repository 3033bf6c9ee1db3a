"""Llama: the drop-in for `llama_cpp.Llama` whose prompts reuse what was decoded before.

Thin: plan, restore, then upstream's own `generate()`, whose `eval()` calls come back here and are cut
where checkpoints are due. With `prompt_cache=False`, for embeddings, encoders and vocabularies without a
model, everything is upstream's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaDraftModel
from llama_cpp.llama_tokenizer import LlamaTokenizer

from llamahybrid.capi.sampling import RowSampler, require_grammar
from llamahybrid.errors import LlamaHybridError, RequestCancelled
from llamahybrid.memory.model_files import ModelFiles
from llamahybrid.memory.sequence import LiveSequence
from llamahybrid.prompt_cache import PromptCache
from llamahybrid.prompt_cache.base import Logits
from llamahybrid.request.answer_text import AnswerText
from llamahybrid.request.answers import answer_count, answers
from llamahybrid.request.arrays import UpstreamArrays, upstream_attribute
from llamahybrid.request.assembly import assemble, context_shape
from llamahybrid.request.evaluation import Evaluation
from llamahybrid.request.finalisers import collecting
from llamahybrid.request.report import RequestReport
from llamahybrid.request.requests import RequestHandle, Requests, made_with
from llamahybrid.request.runner import RequestRunner
from llamahybrid.request.slots import Slots
from llamahybrid.request.ticket import Ticket
from llamahybrid.saved_state import UsefulStates, load, save
from llamahybrid.speculation.drafts import Drafts

_GENERATE = inspect.signature(llama_cpp.Llama.generate)
_COMPLETE = inspect.signature(llama_cpp.Llama._create_completion)
_CREATE = inspect.signature(llama_cpp.Llama.create_completion)
_CHAT = inspect.signature(llama_cpp.Llama.create_chat_completion)


class Llama(llama_cpp.Llama):  # type: ignore[misc]
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
    `n_parallel`: requests that may run at once, in threads or as open generators; each is a sequence of its
    own in the one context of `n_ctx` tokens, and their answers are decoded together. It costs one more
    recurrent state of memory for each. Upstream's attributes (`input_ids`, `n_tokens`, ...) are then those of
    the calling thread's request; draft models are not asked.
    `cache_salt`: see the property of that name.
    `explain`: `last_request.reason` also spells the token that a prompt parts from, which may be another
    user's where a cache is shared.
    `wait`: what a second thread gets while a request runs: True waits, False raises `Busy`, seconds do both.
    A generator that nobody advances for a second makes room; it goes on, with the same text, when it is.

    `on_request`, if set, is called with the `RequestReport` of every finished request.

    `requests`, `evaluation`, `runner` and `drafts` are what runs inside, for this package and its tests.
    """

    def __init__(
        self,
        model_path: str,
        *,
        prompt_cache: bool | PromptCache = True,
        wait: bool | float = True,
        paging: bool = True,
        draft_planes: int | None = None,
        n_parallel: int = 1,
        cache_salt: str = "",
        explain: bool = False,
        **kwargs: Any,
    ) -> None:
        self.requests = Requests(self, wait)
        self._gate = self.requests.gate
        self.slots = Slots(self._gate)
        self._prompt_cache_argument = prompt_cache
        self._explain = explain
        self._paging = paging
        caching = not (prompt_cache is False or kwargs.get("vocab_only") or kwargs.get("embedding"))
        self._parallel = n_parallel
        if n_parallel > 1 and not caching:
            raise ValueError("n_parallel: requests run at once with the prompt cache only")
        shape = context_shape(prompt_cache is not False, paging, draft_planes, n_parallel, kwargs)
        self._sequences, self._planes = shape
        self._draft_model: LlamaDraftModel | None = None
        self.user_cache: Any = None
        self.on_request: Callable[[RequestReport], None] | None = None
        self._cache_salt = cache_salt
        self.logprobs_on_request = False
        """Requests with `logprobs` keep the rows that these need, as with `logits_all`, and no others do."""
        self._answer_text: AnswerText | None = None
        if not caching:
            super().__init__(model_path, **kwargs)
            return
        cache = prompt_cache if isinstance(prompt_cache, PromptCache) else PromptCache()
        self._prompt_cache = cache
        files = ModelFiles(model_path, by_content=cache.leaves_process)
        try:
            super().__init__(model_path, **kwargs)
            # With a draft model upstream keeps the logits of every token, which only logprobs need.
            self.arrays.always_rows = self._logits_all = bool(kwargs.get("logits_all", False))
            assemble(self, self.slots, n_parallel, cache, files)
            self._answer_text = AnswerText(self.token_bos())
            self.draft_model = self._draft_model
        except BaseException:
            files.abandon()
            raise

    input_ids = upstream_attribute("input_ids")
    n_tokens = upstream_attribute("n_tokens")
    scores = upstream_attribute("scores")
    _sampler = upstream_attribute("sampler")
    _mirostat_mu = upstream_attribute("mirostat_mu")
    _requires_eval = upstream_attribute("requires_eval")
    _logits_all = upstream_attribute("logits_all")

    @property
    def _seed(self) -> int:
        """In a step the seed of its request; elsewhere the next one's, which upstream draws from it."""
        return self.arrays.seed if self._gate.inside else self.requests.seed

    @_seed.setter
    def _seed(self, seed: int) -> None:
        self.requests.seed = seed
        if self._gate.inside:  # elsewhere this thread's last slot may be another request's
            self.arrays.seed = seed

    @property
    def arrays(self) -> UpstreamArrays:
        """Upstream's attributes of the slot that is meant: in a request its own, else this thread's last."""
        return self.slots.seen

    @property
    def evaluation(self) -> Evaluation | None:
        """What decodes in that slot; None where upstream's behaviour was asked for."""
        return self.slots.here().evaluation

    @property
    def runner(self) -> RequestRunner | None:
        """What runs requests on context memory; None where upstream's behaviour was asked for."""
        return None if self.evaluation is None else self.evaluation.runner

    @property
    def drafts(self) -> Drafts | None:
        """What stands between `generate` and the draft model; None as `runner`."""
        return None if self.evaluation is None else self.evaluation.drafts

    @property
    def draft_model(self) -> LlamaDraftModel | None:
        """The draft model that was given; to the request that runs, `Drafts`, which asks it for what pays."""
        drafting = self.evaluation is not None and self._draft_model is not None and self._gate.inside
        if drafting and self._parallel > 1:
            return None  # its rollback planes hold the rows of others, too
        return self.drafts if drafting else self._draft_model

    @draft_model.setter
    def draft_model(self, model: LlamaDraftModel | None) -> None:
        self._draft_model = model
        if self.evaluation is not None:
            self.evaluation.drafts.model = model

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
        return None if self.evaluation is None else self._prompt_cache

    @property
    def last_request(self) -> RequestReport | None:
        """What the last request (or the running one, so far) decoded, reused and why."""
        last = self.requests.last
        return None if last is None else self.requests.report(last)

    def cancel(self, request: RequestHandle | None = None) -> None:
        """End all requests that run now, or those of a handle; from any thread, or a signal handler.

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
        if self.evaluation is None:
            return super().generate(tokens, *args, **kwargs)  # type: ignore[no-any-return]
        options = dict(_GENERATE.bind(self, tokens, *args, **kwargs).arguments)
        del options["self"], options["tokens"]
        reset = options.pop("reset", True)
        return self.requests.drive(self.requests.ticket(), lambda: self._generate(tokens, reset, options))

    def _create_completion(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Upstream's completion as one request, with the tokens that were cached added to `usage`."""
        if self.evaluation is None:
            return super()._create_completion(*args, **kwargs)  # type: ignore[no-any-return]
        options = dict(_COMPLETE.bind(self, *args, **kwargs).arguments)
        del options["self"]
        ticket = self.requests.ticket(completing=True, rows=self.keeps_rows(options))
        ticket.rests_on = self.slots.rests_on
        return self._completion(ticket, options)

    def keeps_rows(self, options: Mapping[str, Any]) -> bool:
        """A completion with these options needs the logits of every token, and gets them for itself alone."""
        asked = options.get("logprobs")
        if asked is None or asked is False:  # 0 is asked for
            return False
        return self.logprobs_on_request or self._draft_model is not None

    def create_completion(self, *args: Any, n: int | None = 1, **kwargs: Any) -> Any:
        """As upstream's, with `n` answers to one prompt, which is decoded once.

        Answer i is what `seed + i` gives alone (answer 0: what this call gives without `n`), as the choice
        of that index; usage counts the prompt once. In a stream each chunk has one choice, whose index says
        whose it is. With `n_parallel` slots as many answers are decoded together, and a `logits_processor`
        or `stopping_criteria` is called in threads of their own, one at a time. With one slot, with
        `logits_all`, and where one slot cannot go on from what another one decoded (plain attention), they
        come one after the other. Cancelling one ends all; so does what one of them raises. Each is a request
        of its own to `on_request`; `last_request` tells of answer 0. Raises ValueError for an `n` below 1.
        """
        if (count := answer_count(n)) == 1:
            return super().create_completion(*args, **kwargs)
        options = _CREATE.bind(self, *args, **kwargs).arguments
        del options["self"]
        return answers(self, super().create_completion, options, count)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See `create_completion`."""
        return self.create_completion(*args, **kwargs)

    def create_chat_completion(self, *args: Any, n: int | None = 1, **kwargs: Any) -> Any:
        """As upstream's, with `n` answers to the same messages, as `create_completion` gives them.

        A chat handler of one's own, which decodes by itself, has the model to itself: its answers come one
        after the other, and what it decodes (an image) is decoded for each.
        """
        if (count := answer_count(n)) == 1:
            return self._chat(*args, **kwargs)
        options = _CHAT.bind(self, *args, **kwargs).arguments
        del options["self"]
        return answers(self, self._chat, options, count)

    def _chat(self, *args: Any, **kwargs: Any) -> Any:
        create = super().create_chat_completion
        if self.evaluation is None or self.chat_handler is None or self._gate.nested():
            return create(*args, **kwargs)
        ticket = self.requests.ticket(completing=True, rows=self.keeps_rows(kwargs))
        ticket.whole = True
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
            return ticket.ended_early or bool(criteria is not None and criteria(ids, scores))

        options["stopping_criteria"] = llama_cpp.StoppingCriteriaList([stopped])
        start = super()._create_completion
        for item in self.requests.drive(ticket, lambda: start(**options)):
            ticket.tell(item)
            yield item

    def _generate(
        self, tokens: Sequence[int], reset: bool, options: dict[str, Any]
    ) -> Generator[int, Sequence[int] | None, None]:
        """`generate` inside its request."""
        try:
            request, rest = self.requests.open(tokens, reset)
        except RequestCancelled:
            if self._gate.completing:
                return
            raise
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
                self.requests.end_active()

    def eval(self, tokens: Sequence[int]) -> None:
        """Decode tokens behind the `n_tokens` that are there, in native batches of at most `n_batch`.

        Raises ContextOverflow before anything is decoded when they do not fit, DecodeError when the
        library fails; the state is sound either way.
        """
        if self.evaluation is None:
            super().eval(tokens)
            return
        gate = self._gate
        if gate.inside and not gate.telling and self.evaluation.append(tokens):
            return
        gate.alone(self._eval, tokens)

    def _eval(self, tokens: Sequence[int]) -> None:
        assert self.evaluation is not None, "else upstream decodes"
        self.evaluation.eval(tokens)

    def sample(self, *args: Any, **kwargs: Any) -> int:
        """Sample a token from the logits of the last one, as `llama_cpp.Llama.sample`."""
        work = partial(super().sample, *args, **kwargs)
        if self._parallel == 1 or self._gate.inside:
            return int(work())
        return int(self._gate.alone(self._sample, work))

    def _sample(self, work: Callable[[], int]) -> int:
        assert self.evaluation is not None, "else there is one slot"
        if self.n_tokens:
            self.evaluation.bring_logits()
        return work()

    def detokenize(
        self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False
    ) -> bytes:
        """As `llama_cpp.Llama.detokenize`; of a list that grows, only what is new is spelt."""
        if special or self._answer_text is None or type(self.tokenizer_) is not LlamaTokenizer:
            text: bytes = super().detokenize(tokens, prev_tokens=prev_tokens, special=special)
            return text
        return self._answer_text.spell(tokens, super().detokenize)

    def _init_sampler(self, *args: Any, **kwargs: Any) -> Any:
        if (grammar := kwargs.get("grammar")) is not None:
            require_grammar(self._model.vocab, grammar)
        sampler = super()._init_sampler(*args, **kwargs)
        return sampler if self._parallel == 1 else RowSampler.over(sampler, self)

    def copied_row(self) -> Logits | None:
        """The logits of the last token, where another request's batch took their place in the context."""
        return None if self.runner is None else self.runner.live.row.copied()

    @property
    def _scores(self) -> Any:
        # A criterion is shown the last row even where a request was cancelled before its first batch.
        return self.scores[: max(1, self.n_tokens), :]

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the model and its context; what waits to be written to disk is written first.

        A request that runs is cancelled, and its step waited for; later ones raise ModelClosed.
        """
        if self.evaluation is None:
            super().close()
            return
        self._gate.close(super().close)
        self.slots.close()
        self.evaluation.runner.cache.flush()

    def __del__(self) -> None:
        # Not `close`: a garbage collection may come while this very thread holds the cache's lock.
        if hasattr(self, "_stack"):  # else it was refused before upstream had a look at it
            super().close()

    # -- state -----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget the current sequence; what the prompt cache knows stays."""
        if self.evaluation is None:
            super().reset()
        elif self._gate.closed:
            self.n_tokens = 0
        else:
            self._gate.alone(self._reset)

    def _reset(self) -> None:
        assert self.evaluation is not None, "else upstream resets"
        self.evaluation.reset()

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
        if self.evaluation is None or self._gate.closed:
            self._cache_salt = salt
        else:
            self._whole(self._set_salt, salt, self.evaluation.runner.live)

    def _set_salt(self, salt: str, live: LiveSequence) -> None:
        self.requests.end_active()
        self._cache_salt = salt
        for each in live.shared.members:
            assert each.identity.computation is not None
            each.identity.computed_by(replace(each.identity.computation, salt=salt))

    def save_state(self) -> llama_cpp.LlamaState:
        """The whole context as upstream's `LlamaState`, sealed so that `load_state` can tell damage."""
        if self.evaluation is None:
            return super().save_state()
        return self._whole(save, self, super().save_state)

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """Make a saved state the current one; works for states that upstream saved, too.

        Raises SnapshotError (nothing changed) when a sealed state is damaged or of another model, and
        RuntimeError when the library does not take it.
        """
        if self.evaluation is None:
            super().load_state(state)
        else:
            self._whole(load, self, state, super().load_state)

    def _whole(self, work: Callable[..., Any], *args: Any) -> Any:
        """A single operation on the whole context, while no other request is in."""
        if self._parallel > 1 and self._gate.nested():
            raise LlamaHybridError("the whole context cannot be had inside a request, with others beside it")
        ticket = self.requests.ticket()
        ticket.whole = True
        return self._gate.alone(work, *args, ticket=ticket)

    @property
    def cache(self) -> Any:
        """Upstream's whole-state cache, if one was set; consulted only where it knows more than we do."""
        return None if self._parallel > 1 and self._gate.inside else self.user_cache

    @cache.setter
    def cache(self, cache: Any) -> None:
        self.user_cache = cache
        if cache is not None and self.evaluation is not None:
            runner = self.evaluation.runner
            self.user_cache = UsefulStates(cache, runner.depth, not runner.live.profile.needs_checkpoints)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {
            **state,
            "prompt_cache": self._prompt_cache_argument,
            "wait": self._gate.wait,
            "paging": self._paging,
            "draft_planes": self._planes,
            "n_parallel": self._parallel,
            "cache_salt": self._cache_salt,
            "explain": self._explain,
        }
