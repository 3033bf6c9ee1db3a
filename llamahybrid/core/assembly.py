"""Assembly: build the decode loop of a model that upstream has opened."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import llama_cpp

from llamahybrid.core.checkpoints import Boundaries
from llamahybrid.core.loop import DecodeLoop
from llamahybrid.core.runner import Runner
from llamahybrid.core.scheduler import Scheduler
from llamahybrid.core.slot import Slot
from llamahybrid.core.slots import Slots
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

PADDING = 256
"""Stream sizes are multiples of this number of cells (src/llama-context.cpp, n_ctx_seq)."""

_FLASH = llama_cpp.llama_context_params.flash_attn_type


def _told(name: str, native: Any) -> Any:
    """Return a property that reads as written, while the native field holds `native(params, value)`."""
    field = getattr(llama_cpp.llama_context_params, name)

    def get(params: SlotParams) -> int:
        return int(params.said.get(name, field.__get__(params)))

    def put(params: SlotParams, value: int) -> None:
        params.said[name] = value
        field.__set__(params, native(params, value))

    return property(get, put)


def _of_all(params: SlotParams, tokens: int) -> int:
    return -(-tokens // PADDING) * PADDING * params.slots


def _shared_out(params: SlotParams, tokens: int) -> int:
    """Some graphs need the same number of tokens of each sequence (kimi-linear)."""
    return -(-tokens // params.slots) * params.slots


class SlotParams(llama_cpp.llama_context_params):  # type: ignore[misc]
    """`llama_context_params` of slots, each with a KV stream if there are several.

    The library divides `n_ctx` of such a context among its sequences. Upstream's code writes and reads the
    value of one slot; the library gets the total.
    """

    slots: int
    flash: bool
    """Use flash attention where the backend supports it, whatever upstream writes."""
    said: dict[str, int]
    """Values that upstream wrote."""

    @classmethod
    def of(cls, params: llama_cpp.llama_context_params, slots: int, flash: bool) -> SlotParams:
        """Return the same parameters for a number of slots."""
        made: SlotParams = cls.from_buffer_copy(params)
        made.slots, made.flash, made.said = slots, flash, {}
        for name in ("n_ctx", "n_batch", "n_ubatch"):
            setattr(made, name, getattr(params, name))
        return made

    n_ctx = _told("n_ctx", _of_all)
    n_batch = _told("n_batch", _shared_out)
    n_ubatch = _told("n_ubatch", _shared_out)

    @property
    def flash_attn_type(self) -> int:
        """Use of flash attention."""
        return int(_FLASH.__get__(self))

    @flash_attn_type.setter
    def flash_attn_type(self, kind: int) -> None:
        _FLASH.__set__(self, llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO if self.flash else kind)


UNMERGED = {"plamo2": "0035", "rwkv6qwen2": "0035", "arwkv7": "0035"}
"""Architectures whose batches of several sequences leave wrong states or end the process, and the number of
the last patch that fixes it. Without it each batch has one sequence. src/models/plamo2.cpp multiplies offsets
by n_seqs (0030) and swaps tokens and sequences; src/llama-graph.cpp, build_rwkv_token_shift_store, takes
strided rows for contiguous ones."""


MOST_ON_CPU = 2048
"""Most tokens of a prompt's ubatch on a CPU, which is no slower: a batch is stopped between two nodes of its
graph, and one of 32768 tokens of an 8B model takes tens of seconds."""

MOST_CELLS = (1 << 31) - 1
"""Most cells of all slots: the library counts them in 32 bits."""


@dataclass(frozen=True)
class ContextShape:
    """Parameters of a context beyond upstream's."""

    sequences: int
    """With one slot: its own, and one for paging. With several: one each, with a KV stream."""
    planes: int
    """Rollback planes."""
    slots: int = 1
    flash: bool = False
    """Use flash attention: a GPU computes and the caller did not choose. Without it V is read row by row
    (src/llama-kv-cache.cpp, state_write_data), which takes 30 to 120 ms there. On a CPU it is slower: a step
    of 3 answers of 3,000 tokens takes 1.85 times as long (100M, f16, one thread)."""

    @classmethod
    def of(
        cls,
        caching: bool,
        paging: bool,
        draft_planes: int | None,
        slots: int,
        options: Mapping[str, Any],
        gpu: bool = False,
    ) -> ContextShape:
        """Return the shape for a number of slots; `options`: upstream's arguments; `gpu`: layers lie there.

        The library ends the process where a batch has no room for one token of each sequence, or for the
        planes and two tokens, and hangs on a negative `n_ctx` with several sequences. Raises ValueError for
        batches without tokens or without room for the slots, and for a negative `n_ctx`.
        """
        if (n_ctx := options.get("n_ctx", 512)) < 0:
            raise ValueError("n_ctx counts tokens: 1 or more, or 0 for as many as the model was trained with")
        n_batch = options.get("n_batch", 512)
        if (room := min(n_batch, options.get("n_ubatch", 512) or n_batch)) < 1:  # 0: as long as a batch
            raise ValueError("n_batch and n_ubatch count tokens: 1 or more")
        room = min(room, n_ctx or room)  # upstream's batches are no longer than that
        flash = caching and gpu and "flash_attn" not in options
        if slots < 1:
            raise ValueError("n_parallel counts requests that run at once: 1 or more")
        if slots > (most := llama_cpp.llama_max_parallel_sequences()):
            raise ValueError(f"n_parallel={slots} requests are more than a context takes: {most}")
        if slots > 1:
            if room <= slots:
                raise ValueError(f"n_parallel={slots} needs more tokens a batch (n_batch, n_ubatch, n_ctx)")
            if n_ctx * slots > MOST_CELLS:
                raise ValueError(f"n_parallel={slots} of {n_ctx} tokens each are more than a context takes")
            return cls(slots, 0, slots, flash)
        if draft_planes is None:
            offloaded = bool(options.get("n_gpu_layers"))
            draft_planes = getattr(options.get("draft_model"), "num_pred_tokens", 0) if offloaded else 0
        sequences = 2 if paging and caching and room >= 2 else 1
        return cls(sequences, max(0, min(draft_planes, room - 2)) if caching else 0, flash=flash)

    def ask_for(self, params: Any) -> Any:
        """Return the `llama_context_params` of this shape, in place of `params`."""
        params.n_rs_seq = self.planes
        if self.slots > 1 or self.flash:
            params = SlotParams.of(params, self.slots, self.flash)
        if self.sequences > 1:
            params.n_seq_max, params.kv_unified = self.sequences, self.slots == 1
        return params


def filled_in(params: str, by: str) -> Any:
    """Return a property for `model_params` or `context_params` of `Llama`, stored as `params`.

    Upstream assigns the defaults and sets its arguments later; the setter lets the attribute `by` add ours in
    between.
    """

    def get(llm: Any) -> Any:
        return getattr(llm, params)

    def put(llm: Any, made: Any) -> None:
        setattr(llm, params, getattr(llm, by).ask_for(made))

    get.__doc__ = f"The `llama{params}` that this model was opened with."
    return property(get, put)


def require_adapter(llm: Any) -> None:
    """Raise RuntimeError for a LoRA adapter that could not be read.

    Upstream compares the pointer with None, which it never is; a decode with it ends the process.
    """
    if llm.lora_path and not llm._lora_adapter:
        raise RuntimeError(f"Failed to initialize LoRA adapter from lora path: {llm.lora_path}")


class Wish(int):
    """A default number of slots, which must not make a constructor fail."""


def slots_for(wanted: int, model_path: str, caching: bool, options: Mapping[str, Any]) -> int:
    """Return the number of slots of a model; one where a `Wish` for several cannot be met.

    `options`: upstream's arguments. Raises ValueError for several without a prompt cache.
    """
    if not isinstance(wanted, Wish):
        if wanted > 1 and not caching:
            raise ValueError("n_parallel: requests run at once with the prompt cache only")
        return wanted
    if wanted == 1 or not caching:
        return 1
    reason = ""
    if options.get("draft_model") is not None:
        reason = "its program gives a draft_model, which needs a single slot"
    try:
        ContextShape.of(caching, True, None, wanted, options)
    except ValueError as error:
        reason = str(error)
    if reason:
        logger.warning("one request at a time on %s, not %d: %s", model_path, wanted, reason)
    return 1 if reason else int(wanted)


def assemble(
    llm: Any, n_parallel: int, cache: PromptCache, files: ModelFiles, paging: bool
) -> DecodeLoop | None:
    """Probe the memory, guard the context, and return its decode loop.

    None without memory (encoders) and without causal attention, where upstream decodes.
    """
    with ThreadPoolExecutor(1) as apart:  # OpenMP keeps a team for each living thread that has computed
        profile = apart.submit(
            probe, llm._ctx, bool(llm.context_params.swa_full), n_parallel, paging
        ).result()
    if not (profile.has_memory and _is_causal(llm)):
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
    n_batch = _batch(llm)
    meter = CostMeter(n_batch, record, profile.token_seconds)
    shared = SharedContext(guarded, llm.n_batch, n_parallel)
    view = llm.requests.seen
    view.make(llm._n_ctx, llm._n_vocab, len(view.scores))
    made: list[Slot] = []
    if n_parallel > 1:
        total = n_parallel * (profile.token_bytes * llm._n_ctx + profile.snapshot_bytes)
        logger.info(
            "%d requests at once, each of at most %d tokens: about %d MiB of context memory in all",
            *(n_parallel, llm._n_ctx, total >> 20),
        )
    for seq in range(n_parallel):
        size = {"capacity": llm._n_ctx, "n_vocab": llm._n_vocab}
        live = LiveSequence(shared, profile, computation, **size, seq=seq)
        runner = Runner(live, cache, boundaries, meter, n_batch)
        drafts = Drafts(live, meter, llm.n_batch)
        made.append(Slot(runner, drafts))
    guarded.live = made[0].live
    slots = Slots(made)
    loop = DecodeLoop(slots, shared, Scheduler(meter, n_batch, _merges(llm)), llm.requests.reporter())
    if n_parallel == 1:  # else sequence 0 belongs to a slot
        guarded.outside = OutsideTokens(guarded.live, partial(_hold, ref(llm.requests)))
    else:  # with one slot there are no other sequences
        shared.clearing = slots.store
    return loop


def _is_causal(llm: Any) -> bool:
    """A token sees no later one: else the state of a prefix depends on what follows it in its batch."""
    kind = llm.context_params.attention_type
    if kind != llama_cpp.LLAMA_ATTENTION_TYPE_UNSPECIFIED:
        return bool(kind == llama_cpp.LLAMA_ATTENTION_TYPE_CAUSAL)
    key = f"{llm.metadata.get('general.architecture')}.attention.causal"
    said = (llm.kv_overrides or {}).get(key, llm.metadata.get(key, True))
    return str(said).lower() == "true"


def _batch(llm: Any) -> int:
    """Return the most tokens of a batch; a GPU of the machine may compute without layers on it, too."""
    long = (llm.context_params.n_ubatch or llm.n_batch) > MOST_ON_CPU
    return MOST_ON_CPU if long and not llm.offload.computes(-1) else int(llm.n_batch)


def _merges(llm: Any) -> bool:
    """Tokens of several sequences may be in one batch."""
    architecture = llm.metadata.get("general.architecture")
    return architecture not in UNMERGED or UNMERGED[architecture] in loaded.patches()


def _hold(requests: ref[Any], tokens: Tokens) -> bool:
    """Restore exactly these tokens for other code; False, with nothing done, in the loop's thread."""
    made = requests()
    if made is None or made.loop is None or made.loop.here:
        return False
    made.alone(lambda slot: slot.hold(tokens))
    return True
