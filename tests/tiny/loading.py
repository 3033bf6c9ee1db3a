"""Tiny models as llama_cpp loads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import llama_cpp

from llamahybrid.capi.gguf import quiet

TinyModel: TypeAlias = Callable[..., Path]

CHAT = [
    {"role": "system", "content": "Answer shortly."},
    {"role": "user", "content": "What is a prefix?"},
    {"role": "assistant", "content": "<think>\nlet me see\n</think>\nA beginning."},
    {"role": "user", "content": "And a suffix, naïvely?"},
]


def load(path: Path, **kw: object) -> llama_cpp.Llama:
    with quiet():
        return llama_cpp.Llama(str(path), n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False, **kw)
