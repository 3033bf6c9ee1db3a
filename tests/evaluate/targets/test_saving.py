"""Saving and restoring a state is measured beside a memcpy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from llamahybrid.evaluate.targets import saving
from llamahybrid.evaluate.targets.base import ModelFile, Shape
from llamahybrid.evaluate.targets.choice import target

PROMPT = [(7 * i + 3) % 200 for i in range(200)]


@pytest.mark.parametrize(
    "arch", ["qwen35", *(pytest.param(arch, marks=pytest.mark.full) for arch in ("llama", "mamba"))]
)
def test_save_and_restore_are_measured_with_their_bytes(tiny_model: Callable[..., Path], arch: str) -> None:
    model, sizes = ModelFile("tiny", tiny_model(arch), {"n_threads": 1}), {}
    for kind in ("ours", "stock", "stock+ram", "stock+disk"):
        on = target(kind)
        try:
            with on.open(model, Shape(512)) as session:
                found, shorter = session.saving(PROMPT), session.saving(PROMPT[:100])
        finally:
            on.close()
        assert found is not None
        assert shorter is not None
        assert (shorter.bytes < found.bytes) is (arch != "mamba" or kind != "ours"), "recurrent: one size"
        sizes[kind] = found.bytes
    assert 0 < sizes["ours"] <= sizes["stock"] == sizes["stock+ram"] == sizes["stock+disk"]


@pytest.mark.parametrize("kind", ["class:mine.py:Mine", "ours"])
def test_unknown_kinds_of_caches_are_not_measured(kind: str) -> None:
    llm = SimpleNamespace(reset=lambda: None, eval=lambda tokens: None, runner=None, cache=None)
    assert saving.measured(llm, kind, [1, 2]) is None
