"""NaN that stays in memory after its sequence was removed."""

from __future__ import annotations

import numpy as np
from llama_cpp import llama_cpp as lib

from llamahybrid.harness.hazards.case import probe
from llamahybrid.harness.hazards.context import PARTIAL, Context, next_prompt
from llamahybrid.harness.hazards.effect import Effect, NotApplicable, all_sound, granted
from llamahybrid.harness.hazards.model import ModelUnderTest


def _shown(context: Context, otherwise: str) -> Context:
    """Return a context whose next logits are NaN. Raises NotApplicable with `otherwise` if they are not."""
    context.feed(12, 13)
    if np.isfinite(context.logits()).all():
        raise NotApplicable(otherwise)
    return context


def _poisoned(tested: ModelUnderTest, flash: int = 1) -> Context:
    """A context whose recurrent row was made NaN through a snapshot, and whose logits show it."""
    tested.need("recurrent")
    context = tested.context(flash_attn_type=flash).grown(12)
    snapshot = bytearray(context.save(flags=PARTIAL))
    snapshot[-4000:] = np.full(1000, np.nan, np.float32).tobytes()
    if not context.load(bytes(snapshot), flags=PARTIAL):
        raise NotApplicable("the library refuses a state that holds NaN")
    return _shown(context, "NaN in the last rows of the state does not reach the logits")


def _emptied(context: Context, way: str, length: int, text: int) -> Effect:
    """Empty a poisoned context, decode another prompt and go on."""
    if way == "seq_rm":
        granted(context.rm(0, -1, -1), "seq_rm returned false")
    else:
        lib.llama_memory_clear(context.memory, way == "clear with data")
    return next_prompt(context, length, way, text=text)


@probe("NaN in a recurrent row after its removal", "llm_graph_context::build_rs")
def nan_after_removal(tested: ModelUnderTest) -> Effect:
    """Poison the state with NaN, remove the sequence, decode a fresh prompt of twelve and go on.

    Again with llama_memory_clear, with and without data, in place of seq_rm.
    """
    ways = ("clear with data", "seq_rm", "clear")
    return all_sound(_emptied(_poisoned(tested), way, 12, 0) for way in ways)


def _poisoned_attention(tested: ModelUnderTest) -> Context:
    """A context without flash attention in whose attention KV a computation left NaN.

    By way of the recurrent state; where there is none, NaN lies in the last values of a restored state.
    """
    if not lib.llama_model_is_recurrent(tested.model) and not lib.llama_model_is_hybrid(tested.model):
        context = tested.context().grown(12)
        state = context.save()
        if not context.load(state[:-64] + b"\xff" * 64):
            raise NotApplicable("the library refuses a state that holds NaN")
        return _shown(context, "NaN in the last values of the state does not reach the logits")
    tested.need("attention")
    return _poisoned(tested, flash=0)


@probe("NaN in attention KV after its removal", "llama_kv_cache::get_n_kv")
def nan_in_attention(tested: ModelUnderTest) -> Effect:
    """No flash attention; decode a token on poisoned state, remove all, decode another prompt and go on.

    Again with llama_memory_clear, without data, in place of seq_rm.
    """
    return all_sound(_emptied(_poisoned_attention(tested), way, 8, 1) for way in ("seq_rm", "clear"))
