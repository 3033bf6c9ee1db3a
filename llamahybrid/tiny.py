"""Random-weight GGUF models of any architecture, from the loaded library alone and the same bytes every time.

The library is asked which tensors an architecture has; each is filled from (seed, tensor name), scaled so that
logits are finite and well apart, depend on tokens far back, and rarely end a text.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from llamahybrid.errors import UnknownArchitecture
from llamahybrid.tiny_native import Floats, Gguf, Shape
from llamahybrid.tiny_specs import SPECS, Dims
from llamahybrid.tiny_vocab import VocabName, Vocabulary, vocabulary

_GAIN = 2.5
"""Matrices scale a unit-variance input by this, so that layers outweigh the embedding they start from."""

_SHARPNESS = 2.5
"""The same for queries and keys: attention that picks tokens out, near or far, in place of an average."""


def architectures() -> tuple[str, ...]:
    """Architectures `make` can make."""
    return tuple(SPECS)


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
) -> Path:
    """Write a random model of architecture `arch` to `out` and return that path.

    `embd` is the model's width, `window` a sliding window in tokens where the architecture can have one.
    `params` asks for about that many weights, chosen by width and depth; matrices are f16 then, else f32.
    Raises UnknownArchitecture with the library's reason if there is no such model.
    """
    if arch not in SPECS:
        raise UnknownArchitecture(f"{arch!r} is none of the architectures tiny can make: {', '.join(SPECS)}")
    words = vocabulary(vocab)
    dims = Dims(layers or 4, embd or 64, heads or 2, len(words.likely), window, context)
    if params is not None:
        dims = _grown(arch, dims, words, params, fixed=(layers, embd, heads))
    wide = np.float16 if params is not None else np.float32
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(out.name + f".{os.getpid()}.part")
    with Gguf() as gguf:
        for shape in _shapes(gguf, arch, dims, words):
            gguf.add(shape, _weights(shape, seed, words, wide))
        gguf.write(part)
    part.replace(out)
    return out


def _shapes(gguf: Gguf, arch: str, dims: Dims, words: Vocabulary) -> list[Shape]:
    gguf.set(words.metadata)
    gguf.set({"general.architecture": arch, "general.name": f"tiny {arch}"})
    gguf.set({f"{arch}.{key}": value for key, value in SPECS[arch](dims).items()})
    shapes, reason = gguf.tensors()
    if not shapes:
        raise UnknownArchitecture(f"llama.cpp cannot make this {arch}: {reason}")
    return shapes


def _grown(
    arch: str, dims: Dims, words: Vocabulary, params: int, fixed: tuple[int | None, int | None, int | None]
) -> Dims:
    """Dims with about `params` weights: the widest multiple of 64 that stays below, never under one."""
    layers, embd, heads = fixed
    best = dims
    for width in [embd] if embd else range(64, 8192, 64):
        grown = replace(dims, layers=layers or 12, embd=width, heads=heads or max(1, width // 64))
        with Gguf() as gguf:
            size = sum(shape.size for shape in _shapes(gguf, arch, grown, words))
        if size > params and width > 64:
            break
        best = grown
    return best


def _weights(shape: Shape, seed: int, words: Vocabulary, wide: type[np.float32] | type[np.float16]) -> Floats:
    """Values for one tensor, ggml order flattened."""
    name = shape.name
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    noise = rng.standard_normal(shape.size, dtype=np.float32)
    part = name.split(".", 2)[-1] if name.startswith("blk.") else name
    if part.startswith("ssm_a") and "alpha" not in part:
        return -0.005 - 0.03 * np.abs(noise)
    if "norm" in part:
        mean = (
            0.0
            if part.endswith("bias")
            else _SHARPNESS
            if part.startswith(("attn_q_norm", "attn_k_norm"))
            else 1.0
        )
        return 0.05 * noise + mean
    if part.startswith("ssm_d") and "dt" not in part:
        return 0.3 * noise + 1.0
    if "bias" in part or len(shape.ne) == 1:
        return 0.1 * noise
    if part in ("token_embd.weight", "output.weight"):
        rows = noise.reshape(-1, shape.ne[0])
        rows *= np.where(words.likely, 1.0, 0.05)[:, None].astype(np.float32)
        scale = 0.05 if part == "token_embd.weight" else 2.0 / np.sqrt(shape.ne[0])
        return (rows * scale).ravel().astype(wide)
    if "conv1d" in part or "shortconv.conv" in part:
        return 0.5 * noise
    gain = _SHARPNESS if part.startswith(("attn_q", "attn_k")) else _GAIN
    return (noise * (gain / np.sqrt(shape.ne[0]))).astype(wide)
