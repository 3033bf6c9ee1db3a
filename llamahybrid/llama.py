"""Llama: the drop-in for `llama_cpp.Llama` whose prompts reuse what was decoded before.

Its methods turn upstream's arguments into requests (`client/`), which the decode loop (`core/`) runs. With
`prompt_cache=False`, for encoders, models of embeddings alone, attention that is not causal and vocabularies
without a model, everything is upstream's.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaDraftModel

from llamahybrid.capi.samplers import Samplers
from llamahybrid.client.answer import TokenBytes, completion
from llamahybrid.client.answers import answers
from llamahybrid.client.chat_template import use_own_formatter
from llamahybrid.client.chat_way import chat_answer
from llamahybrid.client.completion import answer_count, arguments, decode_ahead, generate
from llamahybrid.client.embedding import embedded_alone, embedded_beside
from llamahybrid.client.extras import NO_EXTRAS, current_extras
from llamahybrid.client.handle import RequestHandle, made_with, takes_salt
from llamahybrid.client.native_calls import GuardedModel, NativeCalls, held
from llamahybrid.client.requests import Requests
from llamahybrid.client.salt import digest, text_of
from llamahybrid.client.stateful import StatefulLlama
from llamahybrid.configuration import cache_for, current, is_shared, wait_timeout
from llamahybrid.core.assembly import ContextShape, Wish, assemble, filled_in, require_adapter, slots_for
from llamahybrid.core.report import PromptProgress, RequestReport
from llamahybrid.core.runner import Runner
from llamahybrid.core.slots import Slots
from llamahybrid.devices.offload import Offload
from llamahybrid.errors import LlamaHybridError
from llamahybrid.memory.model_files import ModelFiles
from llamahybrid.memory.vectors import Vectors, embeds_only
from llamahybrid.prompt_cache import PromptCache
from llamahybrid.signatures import as_of
from llamahybrid.speculation.drafts import asked_model

_GENERATE = arguments(llama_cpp.Llama.generate)
_COMPLETE = arguments(llama_cpp.Llama._create_completion)
_CREATE = arguments(llama_cpp.Llama.create_completion)
_CHAT = arguments(llama_cpp.Llama.create_chat_completion)


class Llama(StatefulLlama):
    """`llama_cpp.Llama` with prefix reuse for every kind of context memory.

    Takes upstream's arguments, and:

    `prompt_cache`: True: a cache in RAM of the default size; a `PromptCache`; False: upstream's behaviour.
    None, here and for `n_parallel` and `stock_logprobs`: the value of `configure` or the environment,
    else True, 1 and False.
    `paging`: store attention, too, for conversations that alternate. One slot needs a spare sequence for
    that: memory for one more recurrent state.
    `draft_planes`: rollback planes (states of the last tokens) for undoing drafts on hybrid models. None:
    `draft_model.num_pred_tokens` with offloaded layers, 0 on a CPU, where a snapshot is taken instead.
    `n_parallel`: slots, each with `n_ctx` tokens of context memory. With several, draft models are not used,
    and upstream's attributes (`input_ids`, `n_tokens`, ...) belong to the calling thread's request.
    `flash_attn`: as upstream's; not given, flash attention is on where layers lie on a GPU, which slows
    down those on the CPU.
    `cache_salt`: see the property.
    `rpc_servers`: "host:port,host:port" of llama.cpp's RPC servers, which count as GPUs before this
    machine's. Raises DeviceError if one does not answer.
    `explain`: quote in `last_request.reason` the older prompt's token where a prompt differs, maybe another
    user's.
    `stock_logprobs`: with `echo` and `logprobs`, score each prompt token by the logits behind it, as upstream
    does. False: by the logits before it, as lm-evaluation-harness expects.
    `wait`: without a free slot, True: wait; False: raise `Busy`; seconds: wait, then raise. A stream that is
    not read gives its slot to a waiting request, and continues when it is read.

    `on_request`: called with the `RequestReport` of each finished request. `on_progress`: called with the
    `PromptProgress` of a prompt after each batch; an exception ends the request. Neither may use the model.
    """

    @as_of(llama_cpp.Llama.__init__)
    def __init__(
        self,
        model_path: str,
        *,
        prompt_cache: bool | PromptCache | None = None,
        wait: bool | float | None = True,
        paging: bool = True,
        draft_planes: int | None = None,
        n_parallel: int | None = None,
        cache_salt: str | None = "",
        explain: bool = False,
        rpc_servers: str | Sequence[str] | None = None,
        stock_logprobs: bool | None = None,
        **kwargs: Any,
    ) -> None:
        self._cache_salt, wait = text_of(cache_salt), wait_timeout(wait)
        self.requests = Requests(self, wait)
        self._calls = NativeCalls()
        self.slots = Slots([])
        self._explain = explain
        embedding = bool(kwargs.get("embedding"))
        reusing = not (kwargs.get("vocab_only") or (embedding and embeds_only(model_path, kwargs)))
        cache = cache_for(prompt_cache, reusing)
        self._cache_stays = cache is prompt_cache or is_shared(cache)
        wanted = Wish(current().parallel or 1) if n_parallel is None else n_parallel
        n_parallel = slots_for(wanted, model_path, cache is not None, kwargs)
        self._made_with = {
            **{"prompt_cache": prompt_cache, "paging": paging, "n_parallel": n_parallel, "wait": wait},
            **{"draft_planes": draft_planes, "explain": explain, "rpc_servers": rpc_servers},
            **{"stock_logprobs": stock_logprobs, "embedding": embedding},
        }
        self.stock_logprobs = bool(current().stock_logprobs if stock_logprobs is None else stock_logprobs)
        self.offload = Offload.of(rpc_servers, kwargs.get("n_gpu_layers"), watched=cache is not None)
        gpu = self.offload.computes(kwargs.get("n_gpu_layers"))
        self._shape = ContextShape.of(cache is not None, paging, draft_planes, n_parallel, kwargs, gpu)
        self._draft_model: LlamaDraftModel | None = None
        self.on_request: Callable[[RequestReport], None] | None = None
        self.on_progress: Callable[[PromptProgress], None] | None = None
        self._vectors: Vectors | None = None
        if cache is None:
            self._open(model_path, kwargs)
            return
        self._prompt_cache = cache
        files = ModelFiles(model_path, kwargs.get("lora_path"), by_content=cache.leaves_process)
        try:
            self._open(model_path, {**kwargs, "embedding": False})
            # With a draft model upstream keeps the logits of every token, which only logprobs need.
            kept, rows = self._logits_all, bool(kwargs.get("logits_all", False))
            self.requests.seen.always_rows = self._logits_all = rows
            loop = assemble(self, n_parallel, cache, files, paging)
            if loop is None:
                self._logits_all = kept  # upstream's own drafts need them
            else:
                self.slots, self.requests.loop, self.requests.several = loop.slots, loop, n_parallel > 1
            if embedding:
                lora, flash = (self._lora_adapter, self.lora_scale), bool(kwargs.get("flash_attn"))
                flash = flash or (self._shape.flash and bool(kwargs.get("type_v")))  # a quantized V needs it
                shape = self.context_params, self.n_batch, flash
                self._vectors = Vectors(self._ctx, *shape, lora, self.offload.watch)
            self.draft_model = self._draft_model
        except BaseException:
            files.abandon()
            raise

    def _open(self, model_path: str, options: dict[str, Any]) -> None:
        super().__init__(model_path, **options)
        GuardedModel.guard(self._model, self._calls)
        self._token_bytes = TokenBytes(self)
        self.offload.opened(self._model)
        require_adapter(self)
        use_own_formatter(self)

    pooling_type = held(llama_cpp.Llama.pooling_type)

    model_params = filled_in("_model_params", by="offload")
    context_params = filled_in("_context_params", by="_shape")
    draft_model = asked_model()

    @property
    def cache_salt(self) -> str:
        """Name of the computation: state stored under one salt is never used under another.

        Model content, parameters, engine, and changes by llama_cpp's functions are noticed without a salt.
        Set one when you change the numbers in another way; the old one makes its state usable again.
        """
        return self._cache_salt

    @cache_salt.setter
    def cache_salt(self, salt: str | None) -> None:
        text, loop = text_of(salt), self.requests.loop

        def change() -> None:
            for slot in self.slots:
                slot.runner.computed_under(text)

        if loop is not None and not loop.closed:
            self.requests.whole(change)
        self._cache_salt = text

    @property
    def runner(self) -> Runner | None:
        """The runner of the first slot; None without a prompt cache."""
        return self.slots.all[0].runner if self.slots.all else None

    @property
    def n_parallel(self) -> int:
        """Number of slots."""
        return max(1, len(self.slots))

    @held
    @as_of(llama_cpp.Llama.n_ctx)
    def n_ctx(self) -> int:
        """Tokens that one request may hold."""
        return int(llama_cpp.llama_n_ctx_seq(self.ctx))

    @property
    def embeds(self) -> bool:
        """The model was opened with `embedding`."""
        return self._vectors is not None or bool(self.context_params.embeddings)

    # -- what happened ---------------------------------------------------------------------------

    @property
    def prompt_cache(self) -> PromptCache | None:
        """The prompt cache; None with `prompt_cache=False`."""
        return self._prompt_cache if self.slots.all else None

    @property
    def last_request(self) -> RequestReport | None:
        """Report of the last request of the calling thread, finished or running."""
        last = self.requests.last
        return None if last is None else self.requests.report(last)

    def cancel(self, request: RequestHandle | None = None) -> None:
        """Cancel all running requests, or those of a handle, from any thread or signal handler.

        A completion returns the text so far with `finish_reason` "cancelled"; `generate` and `eval` raise
        RequestCancelled. A prompt stops inside a batch on a CPU, else between batches; an answer between
        tokens. Decoded tokens are kept. Needs the prompt cache.
        """
        (request or self.requests).cancel()

    def request(
        self, cache_salt: str | None = None, on_progress: Callable[[PromptProgress], None] | None = None
    ) -> AbstractContextManager[RequestHandle]:
        """Return a handle for the requests made inside `with llm.request() as handle:`.

        `handle.cancel()` cancels them from any thread, streams included. `on_progress` replaces the model's
        for these requests.

        `cache_salt`: only requests of the same salt, and the same salt of the model, share state. None: the
        salt of the enclosing block; "": the shared default. A secret salt is long and random; its digest is
        stored. A request with a salt and no seed draws a seed. A new thread opens its own block. Raises
        LlamaHybridError inside a request of another salt, and for a salt without a prompt cache.
        """
        handle = self.requests.handle_for(None if cache_salt is None else digest(cache_salt))
        handle.on_progress = on_progress or handle.on_progress
        return made_with(handle)

    def warm(self, prompt: str | Sequence[int] | Sequence[dict[str, Any]]) -> RequestReport:
        """Decode a prompt (text, token ids or chat messages) ahead of time; return its report."""
        return decode_ahead(self, prompt)

    # -- generating ------------------------------------------------------------------------------

    @as_of(llama_cpp.Llama.generate)
    def generate(
        self, tokens: Sequence[int], *args: Any, samplers: Samplers | None = None, **kwargs: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        """Generate token ids from a prompt; parameters and results as `llama_cpp.Llama.generate`.

        `samplers`: further samplers (DRY, XTC, ...).

        Raises ContextOverflow if the prompt does not fit, DecodeError if the library fails, RequestCancelled
        after `cancel()`, Busy (see `wait`), ModelClosed, and RequestSuperseded if it lost its slot and
        cannot continue.
        """
        if self.requests.loop is None:
            self.requests.refuse_salt()
            return super().generate(tokens, *args, **kwargs)  # type: ignore[no-any-return]
        options = _GENERATE(tokens, *args, **kwargs)
        prompt = options.pop("tokens")
        inside = self.requests.inside
        if inside is not None and inside.completing and not inside.begun:  # that completion's own
            return generate(self, inside, prompt, options, samplers)
        request = self.requests.request()
        return self.requests.drive(request, partial(generate, self, request, prompt, options, samplers))

    def _create_completion(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Upstream's completion as one request, with the tokens that were cached added to `usage`."""
        extras, options = current_extras(), _COMPLETE(*args, **kwargs)
        if extras.schema is not None:
            options["grammar"] = extras.schema.instead_of(options.get("grammar"))
        if self.requests.loop is not None:
            return completion(self, extras, options)
        self.requests.refuse_salt()
        if replace(extras, index=0, schema=None) != NO_EXTRAS:
            raise LlamaHybridError("a model without a prompt cache has upstream's arguments alone")
        return super()._create_completion(**options)  # type: ignore[no-any-return]

    @as_of(llama_cpp.Llama.create_completion)
    @takes_salt
    def create_completion(self, *args: Any, n: int | None = 1, **kwargs: Any) -> Any:
        """Complete a prompt as upstream does, with `n` answers to a prompt that is decoded once.

        Answer i equals the answer with `seed + i` alone; usage counts the prompt once. Each chunk of a
        stream has one choice with its index. Several slots decode the answers together; one slot, a subclass
        with an `eval`, `sample` or `generate` of its own, `logits_all` and plain attention decode them one
        after the other. Cancelling one, or an exception in one, ends all. `last_request` reports answer 0.
        `cache_salt`: see `request`. Raises ValueError for an `n` below 1.
        """
        if (count := answer_count(n)) == 1:
            return super().create_completion(*args, **kwargs)
        return answers(self, super().create_completion, _CREATE(*args, **kwargs), count)

    @as_of(llama_cpp.Llama.__call__, create_completion)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See `create_completion`."""
        if kwargs.keys() & {"n", "cache_salt"}:
            return self.create_completion(*args, **kwargs)
        return super().__call__(*args, **kwargs)  # a subclass gets keywords

    @as_of(llama_cpp.Llama.create_chat_completion)
    @takes_salt
    def create_chat_completion(
        self,
        *args: Any,
        n: int | None = 1,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        thinking_budget: int | None = None,
        thinking_budget_message: str = "",
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As upstream's, with `n` answers to the same messages, and `cache_salt`, as `create_completion`.

        `chat_template_kwargs`: variables of the model's chat template, as `{"enable_thinking": False}`.
        `thinking_budget`: longest thought in tokens; a longer one is ended by `thinking_budget_message` and
        the template's end. 0: no thought; None or -1: no bound. A grammar or JSON schema applies behind it.
        `continue_final_message`: the answer continues the last message, which is the assistant's.
        `usage.completion_tokens_details.reasoning_tokens` counts thoughts, where the template has any.
        Raises ValueError for variables that the template does not read, for a budget where it shows no
        thinking, and for a continuation where the chat format is no template. A `chat_handler` has the model
        to itself, in the decode loop's thread: its answers come one by one, and it must not wait for another
        thread that uses the model. Handlers that are registered for a `chat_format` run in the caller's.
        """
        ours = (chat_template_kwargs or {}, thinking_budget, thinking_budget_message, continue_final_message)
        create, options = partial(chat_answer, self, *ours), _CHAT(*args, **kwargs)
        if (count := answer_count(n)) == 1:
            made = create(**options)
            return self.requests.stream(made) if isinstance(made, Iterator) else made
        return answers(self, create, options, count)

    @held
    @as_of(llama_cpp.Llama.embed)
    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """As `llama_cpp.Llama.embed`; without pooling, each of several texts has the vectors it has alone.

        A model that chats embeds in a context of its own, made by the first call, between the batches of
        running requests, which wait for one batch of texts at most. `cancel()` ends it between two. Raises
        RequestCancelled, ModelClosed, ValueError for a text without tokens.
        """
        if self._vectors is not None:
            return embedded_beside(self._vectors, self.requests, self.tokenize, *args, **kwargs)
        return embedded_alone(self, *args, **kwargs)

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Write pending records to disk and free the model and its context.

        Running requests are cancelled; later calls raise ModelClosed. Raises RuntimeError inside a request
        of the calling thread.
        """
        self._calls.require_outside()
        loop = self.requests.loop
        if loop is None:
            if not self._calls.closed:
                self._free()
            return
        if loop.here or self.requests.inside is not None:
            raise RuntimeError("a model cannot be closed from inside one of its own requests")
        if self._ctx.ctx is not None and not self._calls.closed:
            loop.close(partial(self._end, loop.slots))
            self._prompt_cache.flush()

    def _end(self, slots: Slots) -> None:
        """Store what the slots hold, and free the context; the cache may be another model's, too."""
        try:
            if self._cache_stays:
                slots.store(tips=True)
        finally:
            self._free()

    def _free(self) -> None:
        self._calls.end()
        super().close()
        self._ctx.memory = None  # upstream asserts that it is there

    def __del__(self) -> None:
        # Not `close`: a garbage collection may come while this very thread holds the cache's lock.
        # Without `_stack` upstream's constructor failed early. A tokenizer may still use an open model.
        if hasattr(self, "_stack") and self._calls.end_unless_running():
            loop = self.requests.loop
            if loop is None or not loop.abandon(self._stack.close):
                super().close()

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), **self._made_with, "cache_salt": self._cache_salt}
        if self._shape.flash:
            del state["flash_attn"]
        return state

    own_methods: Mapping[str, Any] = {}
    """Methods as they are here: a subclass may have its own."""


Llama.own_methods = {name: getattr(Llama, name) for name in ("eval", "generate", "sample")}
