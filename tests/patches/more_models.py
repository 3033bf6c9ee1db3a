"""Tiny models that only the patches need: attention with an indexer, and a draft on another model's memory.

Hyper-parameters as in `llamahybrid.tiny.specs`; `get_gguf_ctx` in tests/test-llama-archs.cpp of llama.cpp has
others that work. The draft (gemma4-assistant) cannot be asked for its tensors without a file, so they are
named here, as src/models/gemma4-assistant.cpp creates them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llamahybrid import tiny
from llamahybrid.capi.gguf import Gguf, Shape
from llamahybrid.tiny import specs as tiny_specs
from llamahybrid.tiny.specs import Dims, Hparams
from llamahybrid.tiny.vocab import vocabulary


def _latent_with_indexer(d: Dims) -> Hparams:
    rank, rope = d.embd // 2, 16
    return {
        **tiny_specs._moe(d),
        **tiny_specs._indexer(d),
        "attention.indexer.key_length": 128,
        "attention.q_lora_rank": rank,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": 16 + rope,
        "attention.value_length_mla": 16,
        "attention.head_count_kv": 1,
        "rope.dimension_count": rope,
        "leading_dense_block_count": 1,
        "expert_gating_func": 2,
    }


def _latent_with_window(d: Dims) -> Hparams:
    latent = _latent_with_indexer(d)
    per_window = ("kv_lora_rank", "key_length", "value_length", "key_length_mla", "value_length_mla")
    return {
        **latent,
        **{f"attention.{name}_swa": latent[f"attention.{name}"] for name in per_window},
        "attention.sliding_window": d.window or 16,
        "attention.sliding_window_pattern": d.attention(0, 1),
        "attention.indexer.types": d.attention(1, 0),
        "rope.freq_base_swa": 10000.0,
    }


def _gemma4(d: Dims) -> Hparams:
    return {
        "attention.sliding_window": d.window or 16,
        "attention.sliding_window_pattern": d.attention(0, 1),
        "attention.shared_kv_layers": 0,
        "attention.key_length_swa": d.head,
        "attention.value_length_swa": d.head,
        "embedding_length_per_layer_input": d.embd // 2,
        "rope.freq_base_swa": 10000.0,
    }


SPECS = {
    "dots3note": (_latent_with_window,),
    "deepseek32": (_latent_with_indexer,),
    "minimax-m3": (tiny_specs._moe, tiny_specs._indexer),
    "gemma4": (_gemma4,),
}
"""Their memories: llama_kv_cache_dsa_iswa, ..._dsa, ..._msa, ..._iswa."""


LONG_ROWS: Hparams = {
    "ssm.inner_size": 32 * 128,
    "ssm.state_size": 128,
    "ssm.time_step_rank": 32,
    "ssm.group_count": 32,
}
"""A qwen35 with these has recurrent states of 2 MiB a layer."""

NAMES = (*SPECS, "long-rows")


def make(name: str, out: Path) -> Path:
    """A tiny model of one of `NAMES`, written to `out`."""
    long = (*tiny_specs.SPECS["qwen35"], LONG_ROWS)
    arch, specs = ("qwen35", long) if name == "long-rows" else (name, SPECS[name])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_specs.SPECS, arch, specs)
        return tiny.make(arch, out)


def make_assistant(out: Path) -> Path:
    """A draft model that reads the KV cache of the model that `make("gemma4", ...)` writes."""
    words = vocabulary("tiny")
    embd, heads, head, target = 32, 2, 32, 64
    d = Dims(layers=2, embd=embd, heads=heads, vocab=len(words.likely), window=16, context=512)
    hparams = {
        **tiny_specs._plain(d),
        **_gemma4(d),
        **dict.fromkeys(
            (f"attention.{kind}_length{swa}" for kind in ("key", "value") for swa in ("", "_swa")), head
        ),
        "rope.dimension_count": head,
        "embedding_length_out": target,
        "nextn_predict_layers": d.layers,
    }
    layer = {
        "attn_norm": (embd,),
        "attn_q": (embd, head * heads),
        "attn_q_norm": (head,),
        "attn_output": (head * heads, embd),
        "post_attention_norm": (embd,),
        "layer_output_scale": (1,),
        "ffn_norm": (embd,),
        "ffn_gate": (embd, d.ff),
        "ffn_up": (embd, d.ff),
        "ffn_down": (d.ff, embd),
        "post_ffw_norm": (embd,),
    }
    shapes = {
        "token_embd": (embd, d.vocab),
        "output_norm": (embd,),
        "nextn.pre_projection": (2 * target, embd),
        "nextn.post_projection": (embd, target),
        "rope_freqs": (head // 2,),
        **{f"blk.{i}.{name}": ne for i in range(d.layers) for name, ne in layer.items()},
    }
    rng = np.random.default_rng(0)
    with Gguf() as gguf:
        gguf.set({**words.metadata, "general.architecture": "gemma4-assistant"})
        gguf.set({f"gemma4-assistant.{key}": value for key, value in hparams.items()})
        for name, ne in shapes.items():
            shape = Shape(f"{name}.weight", ne)
            gguf.add(shape, rng.standard_normal(shape.size, dtype=np.float32))
        gguf.write(out)
    return out
