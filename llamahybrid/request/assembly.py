"""From a model that upstream has opened to what runs requests on it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import llama_cpp

from llamahybrid.capi.shim import library
from llamahybrid.engine import loaded
from llamahybrid.memory.adapters import follow
from llamahybrid.memory.compute_thread import ComputeThread
from llamahybrid.memory.context import GuardedContext
from llamahybrid.memory.costs import CostMeter
from llamahybrid.memory.fingerprint import Computation, settings
from llamahybrid.memory.model_files import ModelFiles
from llamahybrid.memory.outside import OutsideTokens
from llamahybrid.memory.profile import MemoryProfile, probe
from llamahybrid.memory.remembered_costs import RememberedCosts
from llamahybrid.memory.sequence import LiveSequence
from llamahybrid.memory.shared import SharedContext
from llamahybrid.prompt_cache import BasePromptCache
from llamahybrid.prompt_cache.base import Costs, Tokens
from llamahybrid.prompt_cache.envelope import HEADER_BYTES
from llamahybrid.request.batcher import Batcher
from llamahybrid.request.boundaries import Boundaries
from llamahybrid.request.evaluation import Evaluation
from llamahybrid.request.runner import RequestRunner
from llamahybrid.request.slots import Slot, Slots
from llamahybrid.request.stream_params import StreamParams
from llamahybrid.speculation.drafts import Drafts

if TYPE_CHECKING:
    from llamahybrid.llama import Llama
    from llamahybrid.request.requests import Requests

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
            draft_planes = 0
            if options.get("n_gpu_layers") and "llama_set_n_rs_seq" not in library().optional:
                draft_planes = getattr(options.get("draft_model"), "num_pred_tokens", 0)
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
    llm: Llama, slots: Slots, n_parallel: int, cache: BasePromptCache, files: ModelFiles, paging: bool
) -> None:
    """Probe the memory, guard the context, and put live sequences into it, one a slot.

    Leaves the slot that there is without one where the context has no memory (encoders).
    """
    thread = ComputeThread() if n_parallel > 1 else None
    profile = _probe(llm, thread, n_parallel, paging)
    if not profile.has_memory:
        return
    unmapped = (llama_cpp.LLAMA_LOAD_MODE_NONE, llama_cpp.LLAMA_LOAD_MODE_MLOCK)
    files.loaded(mapped=llm.model_params.load_mode not in unmapped)
    guarded = GuardedContext.guard(llm._ctx)
    guarded.watch = llm.offload.watch
    guarded.adapters = follow(guarded, llm._lora_adapter, llm.lora_scale)
    made_with = settings(llm.model_params, llm.context_params)
    computation = Computation(files, made_with, guarded.adapters, llm.cache_salt, together=n_parallel > 1)
    boundaries = Boundaries(llm._model.vocab, llm._n_vocab)
    remembered = RememberedCosts(computation.fingerprint, _cost_context(llm))
    known = remembered.load() or Costs(token_seconds=profile.token_seconds)
    record = HEADER_BYTES + profile.snapshot_bytes if profile.snapshot_bytes else 0
    meter = CostMeter(llm.n_batch, replace(known, snapshot_bytes=record))
    gate = llm.requests.gate
    shared = SharedContext(guarded, llm.n_batch, n_parallel, thread)
    batcher = None
    if n_parallel > 1:
        architecture = llm.metadata.get("general.architecture")
        merges = architecture not in UNMERGED or UNMERGED[architecture] in loaded.patches()
        batcher = Batcher(shared, gate, meter, llm.n_batch, merges)
        logger.info(
            "%d requests at once, each of at most %d tokens: about %d MiB of context memory in all",
            *(n_parallel, llm._n_ctx, n_parallel * profile.slot_bytes(llm._n_ctx) >> 20),
        )
    for seq in range(n_parallel):
        slot = slots.all[0] if seq == 0 else Slot()
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
        runner = RequestRunner(live, cache, boundaries, meter, gate, llm.n_batch, remembered, batcher)
        drafts = Drafts(live, meter, llm.n_batch, int(llm.context_params.n_ubatch))
        if seq:
            slot.arrays.always_rows = slot.arrays.logits_all = slots.all[0].arrays.always_rows
            slots.add(slot)
        slot.arrays.make(llm._n_ctx, llm._n_vocab, len(llm.scores))
        slot.evaluation = Evaluation(runner, drafts, slot.arrays)
    first = slots.all[0].evaluation
    assert first is not None, "it was just made"
    guarded.live = first.runner.live
    if n_parallel == 1:  # else sequence 0 is a slot's
        guarded.outside = OutsideTokens(guarded.live, partial(_hold, llm.requests))
    slots.batcher = batcher
    if batcher is not None:  # with one slot nobody else holds any
        shared.clearing = slots.store_attention


def _probe(llm: Llama, thread: ComputeThread | None, slots: int, paging: bool) -> MemoryProfile:
    """What the memory can do; asked in the thread that decodes later: OpenMP keeps a team for each."""
    found: list[MemoryProfile] = []

    def look() -> None:
        found.append(probe(llm._ctx, bool(llm.context_params.swa_full), slots, paging))

    if thread is None:
        look()
    else:
        thread.run(look, bool)
    return found[0]


def _cost_context(llm: Llama) -> tuple[int, ...]:
    """What costs depend on besides what is in the fingerprint."""
    params = llm.context_params
    layers = int(llm.model_params.n_gpu_layers)
    return int(params.n_threads), int(params.n_threads_batch), llm.n_batch, int(params.n_ubatch), layers


def _hold(requests: Requests, tokens: Tokens) -> bool:
    """Make context memory hold just these tokens, which others go on from.

    False, with nothing done, in a step, whose request memory belongs to.
    """
    if requests.gate.nested():
        return False
    requests.alone(lambda evaluation: evaluation.hold(tokens))
    return True
