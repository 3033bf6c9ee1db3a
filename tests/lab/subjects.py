"""The models that ratios are promised for: one of each kind of memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Subject:
    """A tiny model: what it is made with, and what it is opened with."""

    arch: str
    making: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `tiny.make`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `Llama`."""


_WINDOW = {"window": 16}
_PRUNED = {"swa_full": False, "n_ubatch": 32}
"""A windowed cache has room for the window and one batch, padded to 256: more are needed to lose any."""
_PLAIN = ("qwen35", "qwen35moe", "qwen3next", "jamba", "falcon-h1", "granitehybrid", "mamba", "llama")

SUBJECTS: Mapping[str, Subject] = {
    **{arch: Subject(arch) for arch in _PLAIN},
    **{arch: Subject(arch, _WINDOW, _PRUNED) for arch in ("lfm2", "gemma3", "gpt-oss")},
    **{f"{arch}-full": Subject(arch, _WINDOW) for arch in ("gemma3", "gpt-oss")},
}
"""By name; with windows of full size attention is all of its state."""
