"""Footprint: an estimate of the memory of an open model, by its files."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llamahybrid.capi.gguf import Gguf
from llamahybrid.errors import EngineError
from llamahybrid.memory.model_files import shards
from llamahybrid.memory.vectors import FLOAT_BYTES
from llamahybrid.prompt_cache.ram import physical_bytes
from llamahybrid.server.settings import DEFAULT_SLOTS, ModelSettings

logger = logging.getLogger("llamahybrid.server")

SHARE = 3 / 4
"""Share of physical memory for open models, by default."""

BESIDE = 1.1
"""Factor for compute buffers and recurrent states."""

ELEMENT_BYTES = {0: 4, 2: 18 / 32, 3: 20 / 32, 6: 22 / 32, 7: 24 / 32, 8: 34 / 32, 20: 18 / 32}
"""Bytes of an element of the KV cache, by ggml's number of its type; 2 for others."""


def default_models_bytes() -> int:
    """Return three quarters of physical memory, or of a container's limit."""
    return int(SHARE * physical_bytes())


def footprint(settings: ModelSettings) -> int:
    """Return the bytes of files, of the KV of `n_ctx` tokens for each slot, and of a context for embeddings.

    0 without files.
    """
    files = [*shards(settings.model), settings.lora_path, settings.clip_model_path]
    weights = sum(Path(file).stat().st_size for file in files if file is not None and Path(file).exists())
    if settings.vocab_only or not Path(settings.model).exists():
        return weights
    try:
        context = _context(settings)
    except (OSError, KeyError, EngineError, ValueError) as error:
        logger.info("the size of %s's context is not known: %s", settings.model_alias, error)
        context = 0.0
    return int(BESIDE * (weights + context))


def _context(settings: ModelSettings) -> float:
    """Return the bytes of KV, and of a context for embeddings, which computes logits of every token, too."""
    with Gguf(Path(settings.model)) as gguf:
        architecture = str(gguf.read("general.architecture")["general.architecture"])
        told: Mapping[str, Any] = gguf.read(f"{architecture}.")
        rows = gguf.length("tokenizer.ggml.tokens") if settings.embedding else 0

    def number(name: str, otherwise: Any = 0) -> Any:
        return told.get(f"{architecture}.{name}", otherwise)

    layers, heads = int(number("block_count")), number("attention.head_count", 1)
    keyed = number("attention.head_count_kv", heads)
    kv_heads = float(np.sum(keyed)) if np.ndim(keyed) else float(keyed) * layers
    width = number("embedding_length") / max(1, int(np.max(heads)))
    key, value = number("attention.key_length", width), number("attention.value_length", width)
    per_token = kv_heads * (key * _element(settings.type_k) + value * _element(settings.type_v))
    slots = settings.n_parallel or DEFAULT_SLOTS
    outputs = 2 * FLOAT_BYTES * rows * min(settings.n_batch, settings.n_ctx or settings.n_batch)
    return float(per_token * slots * (settings.n_ctx or number("context_length")) + outputs)


def _element(kind: int | None) -> float:
    return 2.0 if kind is None else ELEMENT_BYTES.get(kind, 2.0)
