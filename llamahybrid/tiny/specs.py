"""Hyper-parameters per architecture: small models with all kinds of memory of the architecture.

Keys are GGUF metadata without the architecture's prefix, as read by `load_arch_hparams` in llama.cpp's
src/models/*.cpp; `get_gguf_ctx` of its tests/test-llama-archs.cpp has a working set. Every hybrid has
recurrent and attention layers, every sliding-window model windowed and full ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from llamahybrid.capi.gguf import Value

Hparams: TypeAlias = dict[str, Value]


@dataclass(frozen=True)
class Dims:
    """The size of a model: the same few numbers for every architecture."""

    layers: int
    embd: int
    heads: int
    vocab: int
    window: int | None
    """Sliding window in tokens; None: 16, or none if the architecture's window is optional."""
    context: int
    predictors: int = 0
    """Number of layers, at the end, for multi-token prediction."""

    @property
    def ff(self) -> int:
        """Width of the feed-forward layers."""
        return 2 * self.embd

    @property
    def head(self) -> int:
        """Width of an attention head."""
        return self.embd // self.heads

    @property
    def interval(self) -> int:
        """Period of the layers with full attention."""
        return 2 if self.layers < 8 else 4

    def attention(self, yes: int, no: int = 0) -> list[int]:
        """A number per layer: `yes` for full-attention and prediction layers, `no` for others."""
        trunk = self.layers - self.predictors
        return [
            yes if i >= trunk or i % self.interval == self.interval - 1 else no for i in range(self.layers)
        ]


Part: TypeAlias = Callable[[Dims], Hparams] | Hparams


def _plain(d: Dims) -> Hparams:
    return {
        "vocab_size": d.vocab,
        "context_length": d.context,
        "embedding_length": d.embd,
        "block_count": d.layers,
        "feed_forward_length": d.ff,
        "attention.head_count": d.heads,
        "attention.head_count_kv": d.heads,
        "attention.key_length": d.head,
        "attention.value_length": d.head,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.dimension_count": d.head,
        "rope.freq_base": 10000.0,
    }


def _moe(d: Dims) -> Hparams:
    return {
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": d.embd,
        "expert_shared_count": 1,
        "expert_shared_feed_forward_length": d.embd,
        "expert_weights_scale": 1.0,
        "expert_weights_norm": True,
        "expert_gating_func": 2,  # sigmoid
    }


def _window(d: Dims) -> Hparams:
    return {"attention.sliding_window": d.window or 16, "attention.sliding_window_pattern": 2}


def _ssm(d: Dims) -> Hparams:
    return {
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 2 * d.embd,
        "ssm.state_size": 16,
        "ssm.time_step_rank": d.heads,
        "ssm.group_count": math.gcd(2, d.heads),  # the library dies on a remainder
    }


def _delta_net(d: Dims) -> Hparams:
    return {
        "full_attention_interval": d.interval,
        "rope.dimension_sections": [d.head // 8] * 4,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": d.embd,
        "ssm.state_size": d.head,
        "ssm.time_step_rank": d.heads,
        "ssm.group_count": d.heads,
    }


def _by_layer(d: Dims) -> Hparams:
    """Recurrent layers, marked by having no KV heads."""
    return {"attention.head_count_kv": d.attention(d.heads)}


def _shortconv(d: Dims) -> Hparams:
    window: Hparams = {"attention.sliding_window": d.window} if d.window else {}
    return {"shortconv.l_cache": 3, **window}


def _latent(d: Dims, rope: int = 16) -> Hparams:
    """Multi-head latent attention, interleaved with Kimi delta attention (KDA) layers."""
    rank = d.embd // 2
    return {
        "attention.q_lora_rank": rank,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": 16 + rope,
        "attention.value_length_mla": 16,
        "rope.dimension_count": rope,
        "kda.head_dim": d.head,
        "kda.safe_gate": True,
        "kda.gate_lower_bound": -5.0,
        "ssm.conv_kernel": 4,
        "leading_dense_block_count": 1,
        "attention.head_count_kv": d.attention(1),  # the latent is one head, shared by all queries
    }


_HYPER: Hparams = {
    "hyper_connection.count": 4,
    "hyper_connection.sinkhorn_iterations": 2,
    "hyper_connection.epsilon": 1e-6,
    "hyper_connection.low_rank": 8,
}


def _indexer(d: Dims) -> Hparams:
    return {
        "attention.indexer.head_count": d.heads,
        "attention.indexer.key_length": d.head,
        "attention.indexer.top_k": 131072,  # all: choosing by a floating-point rank is not stable
        "attention.indexer.block_size": 4,
        "attention.indexer.kpool": 4,
        "attention.indexer.kpool_select_tail": True,
        "attention.indexer.local_blocks": 1,
    }


def _nemotron(d: Dims) -> Hparams:
    """Layers of three kinds: recurrent, attention, feed-forward; prediction layers have experts."""
    kinds = [i % 3 for i in range(d.layers)]
    return {
        **_ssm(d),
        "attention.head_count_kv": [d.heads if kind == 1 else 0 for kind in kinds],
        "feed_forward_length": [d.ff if kind == 2 else 0 for kind in kinds],
        **(_moe(d) if d.predictors else {}),
    }


def _rwkv(d: Dims) -> Hparams:
    if d.embd % 64:
        raise ValueError(f"RWKV heads are 64 wide here: embd {d.embd} is no multiple of that")
    return {
        "attention.head_count": 0,
        "attention.head_count_kv": 0,
        "wkv.head_size": 64,  # the CPU kernel of RWKV 7 works in steps of up to 64 floats without a remainder
        "token_shift_count": 2,
        "time_mix_extra_dim": 16,
        "time_decay_extra_dim": 16,
        "attention.decay_lora_rank": 16,
        "attention.iclr_lora_rank": 16,
        "attention.value_residual_mix_lora_rank": 16,
        "attention.gate_lora_rank": 16,
    }


def _qwen4exp(d: Dims) -> Hparams:
    heads = 4  # (ngram_size - 1) x heads_per_ngram
    return {
        **_moe(d),
        **_delta_net(d),
        **_HYPER,
        **_indexer(d),
        "attention.compress_ratios": [4] * d.layers,
        "ple.layers": [0],
        "ple.ngram_size": 3,
        "ple.heads_per_ngram": heads // 2,
        "ple.conv_kernel": 4,
        "ple.eos_token_id": 0,
        "embedding_length_per_layer_input": d.embd // heads,
        "ple.layer_multipliers": np.array([1, 3, 5], np.uint64),
        "ple.head_offsets": np.arange(heads, dtype=np.uint64) * np.uint64(d.vocab),
        "ple.head_vocab_sizes": np.full(heads, d.vocab, np.uint64),
    }


def _deepseek4(d: Dims) -> Hparams:
    if d.layers < 4:
        raise ValueError("deepseek4 needs four layers, one for each way of compressing")
    ratios = [(0, 0, 4, 128)[i % 4] for i in range(d.layers)]
    return {
        **_moe(d),
        **_HYPER,
        **_indexer(d),
        "attention.head_count_kv": 1,
        "attention.indexer.key_length": 128,  # in blocks of 64, and another than the main cache's
        "attention.key_length": max(64, d.head),
        "attention.value_length": max(64, d.head),
        "rope.dimension_count": d.head // 2,
        "attention.q_lora_rank": d.embd // 2,
        "attention.sliding_window": d.window or 16,
        "attention.output_group_count": d.heads,
        "attention.output_lora_rank": 16,
        "attention.compress_ratios": ratios,
        "attention.compress_rope_freq_base": 160000.0,
        "hash_layer_count": 0,
        "swiglu_clamp_exp": 10.0,
        "expert_gating_func": 4,  # sqrt of softplus
    }


def _bert(d: Dims) -> Hparams:
    return {
        "context_length": min(d.context, 512),
        "attention.causal": False,
        "pooling_type": 1,  # mean
    }


ABSENT: dict[str, tuple[str, ...]] = {"rwkv6qwen2": ("time_mix_first",)}
"""Optional tensors whose presence would change the architecture."""

ENCODERS = ("bert",)
"""Architectures that embed text and cannot generate any."""

_ONE_SHIFT: Hparams = {"token_shift_count": 1}
_KIMI_K3: Hparams = {
    "attn_res.block_size": 12,
    "activation.situ_beta": 4.0,
    "activation.situ_linear_beta": 25.0,
}

SPECS: dict[str, Sequence[Part]] = {
    # plain attention
    "llama": (),
    "qwen3": (),
    # sliding window
    "gemma2": (_window,),
    "gemma3": (_window,),
    "gemma3n": (_window,),
    "gpt-oss": (_moe, _window),
    "cohere2": (_window, {"logit_scale": 1.0}),
    "smallthinker": (_moe, _window),
    "step35": (_moe, _window, lambda d: {"attention.sliding_window_pattern": d.attention(0, 1)}),
    # recurrent
    "mamba": (_ssm,),
    "mamba2": (_ssm,),
    "rwkv6": (_rwkv,),
    "rwkv6qwen2": (_rwkv, _ONE_SHIFT),
    "rwkv7": (_rwkv,),
    "arwkv7": (_rwkv, _ONE_SHIFT),
    # hybrid
    "qwen35": (_delta_net,),
    "qwen35moe": (_moe, _delta_net),
    "qwen3next": (_moe, _delta_net),
    "qwen4exp": (_qwen4exp,),
    "jamba": (_ssm, _by_layer),
    "falcon-h1": (_ssm,),
    "plamo2": (_ssm, _by_layer, {"ssm.group_count": 0}),
    "granitehybrid": (_ssm, _by_layer),
    "lfm2": (_by_layer, _shortconv),
    "lfm2moe": (_by_layer, _shortconv, _moe, {"leading_dense_block_count": 1}),
    "nemotron_h": (_nemotron,),
    "nemotron_h_moe": (_nemotron, _moe),
    "kimi-linear": (_moe, _by_layer, _latent),
    "bailingmoe3": (_moe, _by_layer, _latent),
    "kimi-k3": (_moe, _by_layer, _latent, _KIMI_K3),
    "glm5-next": (_moe, partial(_latent, rope=0), _HYPER, _indexer),
    "minimax-01": (_moe, lambda d: {"full_attention_interval": d.interval, "residual_scale": 1.0}),
    "deepseek4": (_deepseek4,),
    # embeddings
    "bert": (_bert,),
}
"""Parts of each architecture, each of which may replace keys of those before it and of `_plain`."""


def hparams(arch: str, d: Dims) -> Hparams:
    """Return the hyper-parameters of an architecture."""
    found = _plain(d)
    for part in SPECS[arch]:
        found |= part(d) if callable(part) else part
    return found
