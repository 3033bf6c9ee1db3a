"""A tiny model with tokens for infill, which the tiny vocabulary lacks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llamahybrid import tiny
from llamahybrid.tiny.vocab import vocabulary

FIM = {"pre": 1, "suf": 2, "mid": 3, "rep": 4, "sep": 5}
"""Bytes that no text of a test has."""

CONTROL = 3
"""llama_token_type of llama.h."""


def make(path: Path) -> Path:
    """Write a model whose control tokens `FIM` are."""
    words = vocabulary("tiny")
    types = np.array(words.metadata["tokenizer.ggml.token_type"])
    types[list(FIM.values())] = CONTROL
    keys = {f"tokenizer.ggml.fim_{name}_token_id": token for name, token in FIM.items()}
    metadata = {**words.metadata, **keys, "tokenizer.ggml.token_type": types}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "vocabulary", lambda _: replace(words, metadata=metadata))
        return tiny.make("qwen35", path)
