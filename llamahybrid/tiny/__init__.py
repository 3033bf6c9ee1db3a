"""Random-weight GGUF models of any architecture, reproducible byte for byte.

The loaded library lists the tensors of an architecture. Each is drawn from (seed, tensor name), scaled so
that logits are finite and well apart, depend on distant tokens, and rarely end a text.
"""

from __future__ import annotations

import math
import os
import re
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from llamahybrid.capi.gguf import Floats, Gguf, Shape
from llamahybrid.errors import UnknownArchitecture
from llamahybrid.tiny.specs import ABSENT, ENCODERS, SPECS, Dims, hparams
from llamahybrid.tiny.vocab import VOCABULARIES, VocabName, Vocabulary, vocabulary

__all__ = ["VOCABULARIES", "architectures", "decoders", "impossible", "make"]


@dataclass(frozen=True)
class _Fill:
    """The distribution of tensors with a matching name: mean + spread * noise."""

    name: str
    mean: float = 0.0
    spread: float = 1.0
    fan_in: bool = False
    """Divide by the square root of the input dimension: `spread` is the gain for a unit-variance input."""
    decay: bool = False
    """Store -exp(value): a negative number."""


_EMBEDDING = 0.1
"""Spread of token embeddings: small beside a layer's contribution."""

_TIED = 0.02
"""The same for tied embeddings: smaller, or each token predicts itself."""

_FILLS = (
    # slow decay: a token still matters after a hundred others
    _Fill(r"ssm_a(\.|$)", -4.0, 0.7, decay=True),
    _Fill(r"time_mix_(decay|w0)\.", -4.0, 0.5),
    _Fill(r"time_mix_a0\.", -1.0, 0.2),
    _Fill(r"time_mix_(k_k|k_a)\.", 1.0, 0.1),
    _Fill(r"mix_lerp", 0.5, 0.2),
    _Fill(r"time_mix_(decay_)?[wavg][12]\.", 0.0, 0.5, fan_in=True),
    _Fill(r"ssm_d(\.|$)", 1.0, 0.3),
    # attention that selects single tokens, near or far, instead of averaging
    _Fill(r"attn_[qk]_norm", 2.0, 0.1),
    _Fill(r"post_attention_norm", 0.25, 0.02),
    _Fill(r"post_ffw_norm", 0.2, 0.02),
    # with RoPE these make heads attend at fixed distances, so that greedy text varies
    _Fill(r"attn_[qk]\.bias", 0.0, 2.0),
    _Fill(r"bias", 0.0, 0.1),
    _Fill(r"norm", 1.0, 0.05),
    _Fill(r"conv1d|shortconv\.conv", 0.0, 0.5),
    _Fill(r"token_embd\.", 0.0, _EMBEDDING),
    _Fill(r"^output\.", 0.0, 2.0, fan_in=True),
    # a token's own features count less than memory
    _Fill(r"ffn_down|shortconv|channel_mix", 0.0, 1.0, fan_in=True),
    _Fill(r"ffn_(up|gate)", 0.0, 1.5, fan_in=True),
    _Fill(r"hc_|sinks|scale|time_mix_(first|r_k|v0)", 0.0, 0.3),
    _Fill(r"attn_(q|kv)_|attn_[kv]_b", 0.0, 1.3, fan_in=True),  # latent attention: two matrices in a row
    _Fill(r"", 0.0, 2.5, fan_in=True),
)


def architectures() -> tuple[str, ...]:
    """Architectures `make` knows, as llama.cpp names them."""
    return tuple(SPECS)


def decoders() -> tuple[str, ...]:
    """Architectures that generate text: all but embedding models."""
    return tuple(arch for arch in SPECS if arch not in ENCODERS)


def impossible() -> dict[str, str]:
    """Architectures that the loaded library cannot make, with its reason; other versions may differ."""
    words = vocabulary("tiny")
    reasons: dict[str, str] = {}
    for arch in SPECS:
        try:
            with Gguf() as gguf:
                _shapes(gguf, arch, _dims(words), words)
        except UnknownArchitecture as error:
            reasons[arch] = str(error)
    return reasons


def make(
    arch: str,
    out: Path,
    *,
    vocab: VocabName = "tiny",
    layers: int | None = None,
    embd: int | None = None,
    heads: int | None = None,
    params: int | None = None,
    window: int | None = None,
    context: int = 65536,
    seed: int = 0,
    predictors: int = 0,
) -> Path:
    """Write a random model of architecture `arch` to `out` and return that path.

    `embd` is the model's width, `window` a sliding window in tokens, for architectures that have one.
    `predictors` additional layers predict further tokens, for architectures with multi-token prediction
    (`--spec-type draft-mtp`). `params` sets an approximate number of weights through width and depth;
    matrices are then f16, else f32. With f16 matrices, logits of one prompt cut into different batches differ
    by about 1e-3 of their range; with f32 by 1e-5 to 1e-4.

    Raises:
        UnknownArchitecture: the library cannot make it; the message has the reason.
        ValueError: sizes do not fit together.
        FileExistsError: `out` is a folder or a device.
    """
    if out.exists() and not out.is_file():
        raise FileExistsError(f"{out} is no file")
    if arch not in SPECS:
        raise UnknownArchitecture(f"{arch!r} is none of the architectures tiny can make: {', '.join(SPECS)}")
    words = vocabulary(vocab)
    dims = _dims(words, layers, embd, heads, window, context)
    if predictors:
        dims = replace(dims, layers=dims.layers + predictors, predictors=predictors)
    if params is not None:
        dims = _grown(arch, dims, words, params, layers, embd, heads)
    if dims.layers < 2:
        raise ValueError("one layer cannot hold both kinds that most architectures mix: choose two or more")
    if dims.embd % (8 * dims.heads):
        raise ValueError(
            f"embd {dims.embd} is no multiple of 8 x heads ({dims.heads}): choose another of the two"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f"{out.name}.{os.getpid()}.part")
    try:
        with Gguf() as gguf:
            shapes = _shapes(gguf, arch, dims, words)
            tied = all(shape.name != "output.weight" for shape in shapes)
            for shape in shapes:
                gguf.add(shape, _weights(shape, seed, words, params is not None, tied))
            gguf.write(part)
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
    return out


def _dims(
    words: Vocabulary,
    layers: int | None = None,
    embd: int | None = None,
    heads: int | None = None,
    window: int | None = None,
    context: int = 512,
) -> Dims:
    return Dims(layers or 4, embd or 64, heads or 2, len(words.likely), window, context)


def _shapes(gguf: Gguf, arch: str, dims: Dims, words: Vocabulary) -> list[Shape]:
    gguf.set(words.metadata)
    gguf.set({"general.architecture": arch, "general.name": f"tiny {arch}"})
    gguf.set({f"{arch}.{key}": value for key, value in hparams(arch, dims).items()})
    if dims.predictors:
        gguf.set({f"{arch}.nextn_predict_layers": dims.predictors})
    shapes, reason = gguf.tensors()
    if not shapes:
        raise UnknownArchitecture(f"llama.cpp cannot make this {arch}: {reason}")
    # loaders that skip prediction layers (load_mtp) do not expect their scales
    predict = range(dims.layers - dims.predictors, dims.layers)
    absent = [*ABSENT.get(arch, ()), *(rf"blk\.{i}\..*scale$" for i in predict)]
    return [shape for shape in shapes if not any(re.search(part, shape.name) for part in absent)]


def _grown(
    arch: str,
    dims: Dims,
    words: Vocabulary,
    params: int,
    layers: int | None,
    embd: int | None,
    heads: int | None,
) -> Dims:
    """The dimensions nearest to `params` weights: width in steps of 64, or depth for a given width."""
    if layers and embd:
        raise ValueError("params chooses the width or the depth: leave embd or layers open")

    def at(step: int) -> Dims:
        width = embd or 64 * step
        depth = layers or (step if embd else 12)
        return replace(dims, layers=depth, embd=width, heads=heads or max(1, width // 64))

    def excess(step: int) -> int:
        with Gguf() as gguf:
            return sum(shape.size for shape in _shapes(gguf, arch, at(step), words)) - params

    low = 4 if embd else 1  # fewer layers would lack a kind of layer
    high = 2 * low
    while excess(high) < 0:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    return at(min(low, high, key=lambda step: abs(excess(step))))


def _weights(shape: Shape, seed: int, words: Vocabulary, half: bool, tied: bool) -> Floats:
    """Values of a tensor, flat in ggml order; `tied`: the embedding is also the output matrix."""
    fill = next(fill for fill in _FILLS if re.search(fill.name, shape.name))
    rng = np.random.default_rng([seed, zlib.crc32(shape.name.encode())])
    values = rng.standard_normal(shape.size, dtype=np.float32)
    values *= np.float32(fill.spread / (math.sqrt(shape.ne[0]) if fill.fan_in else 1.0))
    values += np.float32(fill.mean)
    if fill.decay:
        np.negative(np.exp(values, out=values), out=values)
    if shape.name == "token_embd.weight" and tied:
        values *= np.float32(_TIED / _EMBEDDING)
    if shape.name in ("token_embd.weight", "output.weight"):
        values.reshape(-1, shape.ne[0])[~words.likely] *= np.float32(0.05)
    if shape.name == "output_norm.weight" and tied:
        values *= np.float32(2.0 / (_TIED * math.sqrt(shape.ne[0])))  # logits as wide as an own matrix's
    return values.astype(np.float16) if half and fill.fan_in and len(shape.ne) > 1 else values
