"""What a state is valid for: the model's content, the engine, and the parameters that shape the state."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import llama_cpp
import xxhash
from llama_cpp import llama_cpp as native

HEAD_BYTES = 4 << 20
SAMPLES = 64
SAMPLE_BYTES = 64 << 10

SHAPING_PARAMETERS = (
    "n_ctx",  # some models choose their rope factors by it (src/llama-model.cpp:2337)
    "type_k",
    "type_v",
    "flash_attn_type",
    "swa_full",
    "kv_unified",
    "n_seq_max",
    "rope_scaling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
    "attention_type",
    "pooling_type",
)
"""Fields of llama_context_params that change the state's numbers or layout."""


def file_digest(path: Path) -> bytes:
    """16 bytes that name a file's content: its size, its head (a GGUF's metadata) and samples of the rest.

    Weights of 20 GB are not read whole: 64 samples of 64 KiB spread over the file tell models apart.
    """
    hasher = xxhash.xxh3_128()
    size = path.stat().st_size
    hasher.update(str(size).encode())
    with path.open("rb") as file:
        hasher.update(file.read(HEAD_BYTES))
        rest = size - HEAD_BYTES
        for i in range(SAMPLES if rest > 0 else 0):
            file.seek(HEAD_BYTES + rest * i // SAMPLES)
            hasher.update(file.read(SAMPLE_BYTES))
    return hasher.digest()


def fingerprint(model_path: str, params: Any, lora_path: str | None, lora_scale: float) -> bytes:
    """16 bytes naming what a snapshot may be used for.

    `params`: the llama_context_params the context was made with.
    """
    library = Path(os.fsdecode(getattr(native._lib, "_name", "")))
    hasher = xxhash.xxh3_128()
    hasher.update(file_digest(Path(model_path)))
    hasher.update(f"{llama_cpp.__version__} {library.stat().st_size if library.is_file() else ''}".encode())
    for name in SHAPING_PARAMETERS:
        hasher.update(f"{name}={getattr(params, name)};".encode())
    if lora_path:
        hasher.update(file_digest(Path(lora_path)))
        hasher.update(str(lora_scale).encode())
    return hasher.digest()
