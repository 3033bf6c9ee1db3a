"""From a model that upstream has opened to what runs requests on it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import llama_cpp

from llamahybrid.core.boundaries import Boundaries
from llamahybrid.core.executor import Executor
from llamahybrid.core.loop import DecodeLoop
from llamahybrid.core.runner import Runner
from llamahybrid.core.scheduler import Scheduler
from llamahybrid.core.slots import Slots
from llamahybrid.core.stream_params import StreamParams
from llamahybrid.engine import loaded
from llamahybrid.memory.context import GuardedContext
from llamahybrid.memory.costs import CostMeter
from llamahybrid.memory.fingerprint import Computation, settings
from llamahybrid.memory.model_files import ModelFiles
from llamahybrid.memory.outside import OutsideTokens
from llamahybrid.memory.profile import probe
from llamahybrid.memory.sequence import LiveSequence
from llamahybrid.memory.shared import SharedContext
from llamahybrid.prompt_cache import PromptCache
from llamahybrid.prompt_cache.base import Tokens
from llamahybrid.prompt_cache.envelope import HEADER_BYTES
from llamahybrid.speculation.drafts import Drafts

logger = logging.getLogger("llamahybrid")

UNMERGED = {"plamo2": "0030"}
"""Architectures whose batches of several sequences write states to other sequences' places, or end the
process (src/models/plamo2.cpp multiplies where they begin by n_seqs), and the number of the patch that mends
it. Without it their answers take turns, by tokens."""


MOST_CELLS = (1 << 31) - 1
"""Of all slots: the library counts them in 32 bits."""


@dataclass(frozen=True)
class ContextShape:
    """What a context is made with besides what upstream asks for."""

    sequences: int
    """Of one slot: its own, and one to page through. Of several: theirs, each with a KV stream."""
    planes: int
    """Rollback planes."""
    slots: int = 1
    flash: bool = False
    """There is to be flash attention where a GPU computes: who opens the model did not say."""

    @classmethod
    def of(
        cls, caching: bool, paging: bool, draft_planes: int | None, slots: int, options: Mapping[str, Any]
    ) -> ContextShape:
        """That of so many slots; `options`: upstream's arguments.

        The library dies where a batch has no room for one token of each sequence, or for planes and two
        tokens, and never comes back from a negative `n_ctx` with several sequences. Raises ValueError where
        there is none for the slots, and for that.
        """
        if (n_ctx := options.get("n_ctx", 512)) < 0:
            raise ValueError("n_ctx counts tokens: 1 or more, or 0 for as many as the model was trained with")
        room = min(options.get("n_batch", 512), options.get("n_ubatch", 512))
        room = min(room, n_ctx or room)  # upstream's batches are no longer than that
        if slots < 1:
            raise ValueError("n_parallel counts requests that run at once: 1 or more")
        if slots > 1:
            if room <= slots:
                raise ValueError(f"n_parallel={slots} needs more tokens a batch (n_batch, n_ubatch, n_ctx)")
            if n_ctx * slots > MOST_CELLS:
                raise ValueError(f"n_parallel={slots} of {n_ctx} tokens each are more than a context takes")
            return cls(slots, 0, slots, bool(options.get("n_gpu_layers")) and "flash_attn" not in options)
        if draft_planes is None:
            offloaded = bool(options.get("n_gpu_layers"))
            draft_planes = getattr(options.get("draft_model"), "num_pred_tokens", 0) if offloaded else 0
        sequences = 2 if paging and caching and room >= 2 else 1
        return cls(sequences, max(0, min(draft_planes, room - 2)) if caching else 0)

    def ask_for(self, params: Any) -> Any:
        """The `llama_context_params` that say so, to be used in place of `params`."""
        params.n_rs_seq = self.planes
        if self.slots > 1:
            return StreamParams.of(params, self.slots, self.flash and llama_cpp.llama_supports_gpu_offload())
        if self.sequences > 1:
            params.n_seq_max = self.sequences
            params.kv_unified = True
        return params


def filled_in(params: str, by: str) -> Any:
    """`model_params` or `context_params` of `Llama`, kept as `params`.

    Upstream assigns the defaults to it, and fills in its arguments later; in between the attribute `by` asks
    for what is wanted besides.
    """

    def get(llm: Any) -> Any:
        return getattr(llm, params)

    def put(llm: Any, made: Any) -> None:
        setattr(llm, params, getattr(llm, by).ask_for(made))

    get.__doc__ = f"The `llama{params}` that this model was opened with."
    return property(get, put)


def require_adapter(llm: Any) -> None:
    """Raise RuntimeError where the LoRA adapter that a model was to be opened with could not be read.

    Upstream compares the pointer with None, which it never is; the library dies when it decodes with it.
    """
    if llm.lora_path and not llm._lora_adapter:
        raise RuntimeError(f"Failed to initialize LoRA adapter from lora path: {llm.lora_path}")


class Wish(int):
    """A number of slots that was not given for this very model, and must not make its constructor fail."""


def attainable_slots(wish: Wish, model_path: str, caching: bool, options: Mapping[str, Any]) -> int:
    """So many slots where the model and upstream's arguments for it allow for several, else one."""
    if wish == 1 or not caching:
        return 1
    reason = ""
    if options.get("draft_model") is not None:
        reason = "its program gives a draft_model, which is asked where requests run alone"
    try:
        ContextShape.of(caching, True, None, wish, options)
    except ValueError as error:
        reason = str(error)
    if reason:
        logger.warning("one request at a time on %s, not %d: %s", model_path, wish, reason)
    return 1 if reason else int(wish)


def slots_for(wanted: int, model_path: str, caching: bool, options: Mapping[str, Any]) -> int:
    """The slots that a model is opened with. Raises ValueError for several without a prompt cache."""
    if isinstance(wanted, Wish):
        return attainable_slots(wanted, model_path, caching, options)
    if wanted > 1 and not caching:
        raise ValueError("n_parallel: requests run at once with the prompt cache only")
    return wanted


def assemble(
    llm: Any, n_parallel: int, cache: PromptCache, files: ModelFiles, paging: bool
) -> DecodeLoop | None:
    """Probe the memory, guard the context, and make the loop that decodes in it, with so many slots.

    None where the context has no memory (encoders).
    """
    with ThreadPoolExecutor(1) as apart:  # OpenMP keeps threads for each thread that has computed, and lives
        profile = apart.submit(
            probe, llm._ctx, bool(llm.context_params.swa_full), n_parallel, paging
        ).result()
    if not profile.has_memory:
        return None
    unmapped = (llama_cpp.LLAMA_LOAD_MODE_NONE, llama_cpp.LLAMA_LOAD_MODE_MLOCK)
    files.loaded(mapped=llm.model_params.load_mode not in unmapped)
    guarded = GuardedContext.guard(llm._ctx)
    guarded.watch = llm.offload.watch
    made_with = settings(llm.model_params, llm.context_params)
    scale = f"lora {llm.lora_scale!r}".encode() if llm.lora_path else b""
    computation = Computation(files, made_with, scale, llm.cache_salt, together=n_parallel > 1)
    boundaries = Boundaries(llm._model.vocab, llm._n_vocab)
    record = HEADER_BYTES + profile.snapshot_bytes if profile.snapshot_bytes else 0
    meter = CostMeter(llm.n_batch, record, profile.token_seconds)
    shared = SharedContext(guarded, llm.n_batch, n_parallel)
    view = llm.requests.seen
    view.make(llm._n_ctx, llm._n_vocab, len(view.scores))
    executors = []
    if n_parallel > 1:
        logger.info(
            "%d requests at once, each of at most %d tokens: about %d MiB of context memory in all",
            *(n_parallel, llm._n_ctx, n_parallel * profile.slot_bytes(llm._n_ctx) >> 20),
        )
    for seq in range(n_parallel):
        live = LiveSequence(
            guarded,
            profile,
            fingerprint=computation.fingerprint,
            capacity=llm._n_ctx,
            n_vocab=llm._n_vocab,
            shared=shared,
            seq=seq,
        )
        live.identity.computation = computation
        runner = Runner(live, cache, boundaries, meter, llm.n_batch)
        drafts = Drafts(live, meter, llm.n_batch)
        executors.append(Executor(runner, drafts, view))
    guarded.live = executors[0].live
    slots = Slots(executors)
    loop = DecodeLoop(slots, shared, Scheduler(meter, llm.n_batch, _merges(llm)), llm.requests.tell_weakly())
    if n_parallel == 1:  # else sequence 0 is a slot's
        guarded.outside = OutsideTokens(guarded.live, partial(_hold, ref(llm.requests)))
    else:  # with one slot nobody else holds any
        shared.clearing = slots.store_attention
    return loop


def _merges(llm: Any) -> bool:
    """Tokens of several sequences may be in one batch."""
    architecture = llm.metadata.get("general.architecture")
    return architecture not in UNMERGED or UNMERGED[architecture] in loaded.patches()


def _hold(requests: ref[Any], tokens: Tokens) -> bool:
    """Make context memory hold just these tokens, which others go on from.

    False, with nothing done, in the loop's thread, whose memory it is.
    """
    made = requests()
    if made is None or made.loop is None or made.loop.here:
        return False
    made.alone(lambda executor: executor.hold(tokens))
    return True
