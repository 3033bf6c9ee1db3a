"""The models that ratios are promised for: one of each kind of memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.lab.in_process import Comparer


@dataclass(frozen=True)
class Subject:
    """A tiny model: what it is made with, and what it is opened with."""

    arch: str
    making: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `tiny.make`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `Llama`."""
    full: bool = False
    """With windows of full size: attention is then all of its state."""

    @property
    def name(self) -> str:
        """The subject's name."""
        return f"{self.arch}-full" if self.full else self.arch

    def comparer(self, model: Path) -> Comparer:
        """Runs workloads on `model`, made for this subject."""
        return Comparer(model, {"n_threads": 1, "n_threads_batch": 1, **self.options})


_PRUNED = {"swa_full": False, "n_ubatch": 32}
"""A windowed cache has room for the window and one batch, padded to 256: more are needed to lose any."""

SUBJECTS: Mapping[str, Subject] = {
    s.name: s
    for s in (
        *(Subject(a) for a in ("qwen35", "qwen35moe", "qwen3next", "jamba", "falcon-h1", "granitehybrid")),
        Subject("lfm2", {"window": 16}, _PRUNED),
        Subject("mamba"),
        Subject("gemma3", {"window": 16}, _PRUNED),
        Subject("gpt-oss", {"window": 16}, _PRUNED),
        Subject("llama"),
        Subject("gemma3", {"window": 16}, full=True),
        Subject("gpt-oss", {"window": 16}, full=True),
    )
}
