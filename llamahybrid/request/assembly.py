"""From a model that upstream has opened to what runs requests on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import llama_cpp

from llamahybrid.capi.shim import library
from llamahybrid.memory.adapters import follow
from llamahybrid.memory.context import GuardedContext
from llamahybrid.memory.costs import CostMeter
from llamahybrid.memory.fingerprint import Computation, settings
from llamahybrid.memory.model_files import ModelFiles
from llamahybrid.memory.profile import probe
from llamahybrid.memory.remembered_costs import RememberedCosts
from llamahybrid.memory.sequence import LiveSequence
from llamahybrid.memory.snapshot import HEADER_BYTES
from llamahybrid.prompt_cache import PromptCache
from llamahybrid.prompt_cache.base import Costs
from llamahybrid.request.arrays import UpstreamArrays
from llamahybrid.request.boundaries import Boundaries
from llamahybrid.request.evaluation import Evaluation
from llamahybrid.request.runner import RequestRunner
from llamahybrid.speculation.drafts import Drafts

if TYPE_CHECKING:
    from llamahybrid.llama import Llama


def context_shape(
    caching: bool, paging: bool, draft_planes: int | None, options: Mapping[str, Any]
) -> tuple[int, int]:
    """Sequences and rollback planes that a context gets; `options`: upstream's arguments for it.

    The library dies where a batch has no room for one token of each sequence, or for planes and two tokens.
    """
    room = min(options.get("n_batch", 512), options.get("n_ubatch", 512))
    if draft_planes is None:
        draft_planes = 0
        if options.get("n_gpu_layers") and "llama_set_n_rs_seq" not in library().optional:
            draft_planes = getattr(options.get("draft_model"), "num_pred_tokens", 0)
    sequences = 2 if paging and caching and room >= 2 else 1
    return sequences, max(0, min(draft_planes, room - 2)) if caching else 0


def assemble(llm: Llama, arrays: UpstreamArrays, cache: PromptCache, files: ModelFiles) -> Evaluation | None:
    """Probe the memory, guard the context, repair upstream's array sizes; None without memory (encoders)."""
    profile = probe(llm._ctx, bool(llm.context_params.swa_full))
    if not profile.has_memory:
        return None
    unmapped = (llama_cpp.LLAMA_LOAD_MODE_NONE, llama_cpp.LLAMA_LOAD_MODE_MLOCK)
    files.loaded(mapped=llm.model_params.load_mode not in unmapped)
    guarded = GuardedContext.guard(llm._ctx)
    guarded.adapters = follow(guarded, llm._lora_adapter, llm.lora_scale)
    made_with = settings(llm.model_params, llm.context_params)
    computation = Computation(files, made_with, guarded.adapters, llm.cache_salt)
    mark = computation.fingerprint
    live = LiveSequence(guarded, profile, fingerprint=mark, capacity=llm._n_ctx, n_vocab=llm._n_vocab)
    live.identity.computation = computation
    boundaries = Boundaries(llm._model.vocab, llm._n_vocab)
    remembered = RememberedCosts(mark, _cost_context(llm))
    known = remembered.load() or Costs(token_seconds=profile.token_seconds)
    record = HEADER_BYTES + profile.snapshot_bytes if profile.snapshot_bytes else 0
    meter = CostMeter(llm.n_batch, replace(known, snapshot_bytes=record))
    runner = RequestRunner(live, cache, boundaries, meter, llm.requests.gate, llm.n_batch, remembered)
    drafts = Drafts(live, meter, llm.n_batch, int(llm.context_params.n_ubatch))
    guarded.live = live
    arrays.make(llm._n_ctx, llm._n_vocab, len(llm.scores))
    return Evaluation(runner, drafts, arrays)


def _cost_context(llm: Llama) -> tuple[int, ...]:
    """What costs depend on besides what is in the fingerprint."""
    params = llm.context_params
    layers = int(llm.model_params.n_gpu_layers)
    return int(params.n_threads), int(params.n_threads_batch), llm.n_batch, int(params.n_ubatch), layers
